"""A checkpoint of any tensor-parallel × ZeRO layout → a folder with one plain PyTorch file.

    python tools/convert_checkpoint.py --checkpoint runs/spa_tiny --output exported

`--checkpoint` takes a run (its newest step), RUN/<step>, or a checkpoint folder. Nothing in a checkpoint is executed.
Exit codes: 0 done; 2 the user's mistake, one line on stderr.
"""

import argparse
from pathlib import Path

from spa_dist.cli import run_command


def main() -> int:
    """Parse, convert, print what was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, metavar="RUN[/STEP]")
    parser.add_argument("--output", required=True, metavar="DIR")
    parser.add_argument("--format", choices=["pytorch", "safetensors"], default="pytorch")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument(
        "--fold",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="multiply S into the query and key weights (default)",
    )
    parser.add_argument("--force", action="store_true", help="replace what is at --output")
    args = parser.parse_args()

    from spa_dist.export.checkpoint import open_checkpoint
    from spa_dist.export.convert import DTYPES, convert

    checkpoint = open_checkpoint(args.checkpoint)
    output = Path(args.output)
    written = convert(
        checkpoint, output, file_format=args.format, fold=args.fold, dtype=DTYPES[args.dtype], force=args.force
    )
    print(f"{checkpoint.manifest.folder} (step {checkpoint.manifest.step}) → {output}")
    for name, size in written.items():
        print(f"  {name:20} {size:>14,} bytes")
    return 0


if __name__ == "__main__":
    run_command(main)
