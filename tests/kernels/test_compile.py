"""The Triton kernels compile for the GPUs they are meant for: no register on the stack, and within shared memory."""

import json
import os
import subprocess
import sys

from tests.distributed import ROOT
from tests.kernels.aot import TASK, blocks, covering, elementwise, everything, faults


def test_each_row_of_the_tables_neither_spills_nor_overflows_shared_memory(tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.aot", "--covering"]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert finished.stdout, finished.stderr[-2000:]
    rows = json.loads(finished.stdout)
    assert len(rows) == len(covering()) + len(elementwise())
    assert faults(rows) == []
    assert all(row["registers"] >= 16 for row in rows)


def test_the_report_of_every_configuration_is_of_these_block_sizes():
    """All were compiled as they are launched now, and none spills; after a change of the tables `tests/kernels/aot.py` says how."""
    report = json.loads((ROOT / "docs/results/kernels_aot.json").read_text())
    rows = {tuple(row[key] for key in TASK): row for row in report["rows"]}
    tasks = [(kernel, *widths, *rest) for kernel, widths, *rest in everything()]
    assert sorted(rows) == sorted(tasks) and len(tasks) == 1890
    assert [task for task in tasks if rows[task]["blocks"] != list(blocks(*task[:4]))] == []
    assert faults(report["rows"]) == []
