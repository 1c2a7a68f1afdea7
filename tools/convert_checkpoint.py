"""A checkpoint of any tensor-parallel × ZeRO layout → a folder with the plain model.

    python tools/convert_checkpoint.py --checkpoint runs/spa_tiny --output exported --format huggingface --dtype bf16
    python tools/convert_checkpoint.py --import exported --output runs/again [--set optimizer.lr=1e-4]    # the way back

`--checkpoint` takes a run (its newest step), RUN/<step>, or a checkpoint folder. Nothing in a checkpoint is executed.
`--import` makes a run whose step 0 is the export: go on with `launch/pretrain.py --config RUN/config.json --resume auto`.
Exit codes: 0 done; 2 the user's mistake, one line on stderr.
"""

import argparse
import re
from pathlib import Path

from spa_dist.cli import run_command


def main() -> int:
    """Parse, convert, print what was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint", metavar="RUN[/STEP]")
    source.add_argument("--import", dest="export", metavar="EXPORT")
    parser.add_argument("--output", required=True, metavar="DIR")
    parser.add_argument("--format", choices=["pytorch", "safetensors", "huggingface"], help="default pytorch")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="default fp32")
    parser.add_argument(
        "--fold",
        action=argparse.BooleanOptionalAction,
        help="multiply S into the query and key weights (default)",
    )
    parser.add_argument(
        "--max-shard-size", type=_bytes, metavar="SIZE", help="of a safetensors file, as 500MB or 2GB (default 5GB)"
    )
    parser.add_argument("--set", nargs="+", action="extend", metavar="section.key=value", help="of an import's run config")
    parser.add_argument("--force", action="store_true", help="replace what is at --output")
    args = parser.parse_args()
    exporting = ("format", "dtype", "fold", "max_shard_size", "force")
    for option in exporting if args.export else ("set",):
        if getattr(args, option) not in (None, False) or (option == "fold" and args.fold is not None):
            parser.error(f"--{option.replace('_', '-')} has no effect with {'--import' if args.export else '--checkpoint'}")
    return _import(args) if args.export else _export(args, parser)


def _import(args: argparse.Namespace) -> int:
    from spa_dist.training.checkpoint.import_export import import_export

    folder = import_export(Path(args.export), Path(args.output), args.set or ())
    print(f"{args.export} → {folder}; train on with --config {Path(args.output) / 'config.json'} --resume auto")
    return 0


def _export(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if args.max_shard_size and args.format not in ("safetensors", "huggingface"):
        parser.error("--max-shard-size has no effect on --format pytorch, which is one file: use --format safetensors")
    from spa_dist.export.checkpoint import open_checkpoint
    from spa_dist.export.write import DTYPES, ExportOptions, write_export

    options = ExportOptions(
        args.format or "pytorch",
        fold=args.fold is not False,
        dtype=DTYPES[args.dtype or "fp32"],
        max_shard_bytes=args.max_shard_size,
    )
    checkpoint = open_checkpoint(args.checkpoint)
    output = Path(args.output)
    written = write_export(checkpoint, output, options, force=args.force)
    print(f"{checkpoint.manifest.folder} (step {checkpoint.manifest.step}) → {output}")
    for name, size in written.items():
        print(f"  {name:20} {size:>14,} bytes")
    return 0


def _bytes(text: str) -> int:
    """A size in bytes, decimal units allowed."""
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)B?", text.strip().upper())
    if not match or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 500MB or 2GB")
    return int(match[1]) * 1000 ** " KMGT".index(match[2] or " ")


if __name__ == "__main__":
    run_command(main)
