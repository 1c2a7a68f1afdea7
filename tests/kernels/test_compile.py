"""The Triton kernels compile for the GPUs they are meant for: no register on the stack, and within shared memory."""

import json
import os
import subprocess
import sys

from tests.kernels.aot import covering, faults


def test_each_row_of_the_tables_neither_spills_nor_overflows_shared_memory(tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.aot", "--covering"]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert finished.stdout, finished.stderr[-2000:]
    rows = json.loads(finished.stdout)
    assert len(rows) == len(covering())
    assert faults(rows) == []
    assert all(row["registers"] > 16 for row in rows)
