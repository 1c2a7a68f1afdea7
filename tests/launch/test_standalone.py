"""What must work where DeepSpeed, Megatron and Ray are not installed does not import them."""

import subprocess
import sys

from tests.distributed import ROOT

ROOMS = {
    "import spa_dist.attention, spa_dist.kernels, spa_dist.config": {
        "deepspeed",
        "megatron",
        "ray",
        "webdataset",
        "sentencepiece",
    },
    "import spa_dist.export.load, spa_dist.export.convert, spa_dist.export.evaluate, data_pipeline.stream": {
        "deepspeed",
        "megatron",
        "ray",
    },
    "import runpy; runpy.run_path('launch/generate.py'); runpy.run_path('launch/evaluate.py')": {
        "deepspeed",
        "megatron",
        "ray",
    },
}


def test_rooms_stand_on_their_own() -> None:
    for statement, forbidden in ROOMS.items():
        check = f"{statement}; import sys; print(sorted({forbidden!r} & set(sys.modules)))"
        done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == "[]", (statement, done.stdout)
