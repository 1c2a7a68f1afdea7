"""Peak memory of a conversion does not grow with the model: measured in processes of their own, at two sizes."""

import subprocess
import sys
from pathlib import Path

from tests.distributed import ROOT
from tests.export.synthetic_run import make_run

SMALL, LARGE = 4, 16
SIZES = {
    "model.hidden_size": 512, "model.ffn_hidden_size": 2048, "model.head_dim": 64, "attention.d_proj": 32,
    "model.value_dim": 64, "model.vocab_size": 2000,
}  # fmt: skip
PROGRAM = """
import re, sys
from pathlib import Path
from spa_dist.export.checkpoint import open_checkpoint
from spa_dist.export.write import ExportOptions, write_export
if len(sys.argv) > 1:
    limit = int(sys.argv[4]) or None
    write_export(open_checkpoint(sys.argv[1]), Path(sys.argv[2]), ExportOptions(sys.argv[3], max_shard_bytes=limit))
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def resident(*arguments: str) -> float:
    """Peak resident memory in MB of a conversion in a process of its own; without arguments, of the imports alone."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout) / 1000


def measure(folder: Path, layers: int, file_format: str, limit: int) -> tuple[float, float, float]:
    """Peak resident memory, and sizes of the largest file and of the whole export, in MB."""
    source, output = folder / f"run{layers}", folder / f"{file_format}{layers}"
    peak = resident(str(source), str(output), file_format, str(limit))
    sizes = [path.stat().st_size / 1e6 for path in output.iterdir()]
    return peak, max(sizes), sum(sizes)


def test_memory_follows_the_largest_shard_not_the_model(tmp_path: Path) -> None:
    for layers in (SMALL, LARGE):
        make_run(tmp_path / f"run{layers}", SIZES | {"model.num_layers": layers}, tensor=2, data=2)
    for file_format, limit in (("safetensors", 20_000_000), ("huggingface", 20_000_000), ("pytorch", 0)):
        (small, small_shard, small_all), (large, large_shard, large_all) = (
            measure(tmp_path, layers, file_format, limit) for layers in (SMALL, LARGE)
        )
        assert large_all - small_all > 120, "the larger model must stand out from the noise"
        allowed = 1.3 * (large_shard - small_shard) + 30
        assert large - small <= allowed, (file_format, small, large, small_shard, large_shard)
