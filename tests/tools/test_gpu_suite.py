"""The GPU script on a machine without one: every step runs, small, and what is missing is said."""

import json
import subprocess
import sys

from tests.distributed import ROOT


def test_the_script_runs_where_only_torch_and_triton_are(tmp_path):
    output = tmp_path / "suite.json"
    command = [sys.executable, str(ROOT / "tools/gpu_suite.py"), "--output", str(output)]
    command += ["--without", "pytest", "hypothesis", "deepspeed"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(output.read_text())
    assert report["failed"] == [] and "tests" not in report
    assert [line.split(":")[0] for line in report["left_out"]][:2] == ["tests/kernels", "tests/kernels"]
    assert len(report["exactness"]) == 12 and len(report["benchmark"]["rows"]) == 4
    assert [row["function"] for row in report["elementwise"]] == ["bias_gelu", "bias_dropout_residual", "cross_entropy"]
    for dtype in ("bfloat16", "float16"):
        assert report[f"training_{dtype}"]["last"] < 0.1 * report[f"training_{dtype}"]["first"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["suite.json"]
