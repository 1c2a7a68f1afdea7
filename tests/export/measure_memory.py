"""Peak memory of converting a model of several GB, in each format: `python -m tests.export.measure_memory RESULT.json`.

Writes a run of 3.2 GB and one export at a time into a temporary folder, and removes them. TMPDIR says where.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from tests.export.synthetic_run import make_run
from tests.export.test_memory import measure, resident

LAYERS, SHARD_BYTES = 16, 500_000_000
SIZES = {
    "model.num_layers": LAYERS, "model.hidden_size": 2048, "model.ffn_hidden_size": 8192, "model.head_dim": 256,
    "attention.d_proj": 128, "model.value_dim": 256, "model.vocab_size": 32000, "model.tie_embeddings": False,
}  # fmt: skip


def main() -> None:
    """Write the run, convert it in each format in a process of its own, save the numbers."""
    result: dict[str, object] = {"tensor_parallel": 2, "data_parallel": 2, "dtype": "fp32", "formats": {}}
    result["imports_alone_mb"] = round(resident())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = make_run(folder / f"run{LAYERS}", SIZES, tensor=2, data=2)
        files = [path.stat().st_size for path in run.checkpoint.glob("*.safetensors")]
        result["parameters"] = sum(tensor.numel() for tensor in run.tensors.values())
        result["checkpoint_mb"] = round(sum(files) / 1e6)
        for file_format, limit in (("pytorch", 0), ("safetensors", SHARD_BYTES), ("huggingface", SHARD_BYTES)):
            peak, shard, export = measure(folder, LAYERS, file_format, limit)
            numbers = {"peak_resident_mb": peak, "largest_file_mb": shard, "export_mb": export}
            result["formats"][file_format] = {key: round(value) for key, value in numbers.items()}  # type: ignore[index]
            shutil.rmtree(folder / f"{file_format}{LAYERS}")
    Path(sys.argv[1]).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
