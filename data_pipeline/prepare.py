"""Prepare a dataset: train a tokenizer on a corpus, and write its documents as webdataset shards with an index.

    python data_pipeline/prepare.py --source python --output data/python
    python data_pipeline/prepare.py --source pg19 --input PG19_FOLDER --output data/pg19 --vocab-size 32000

Sources: `python` (Python source of the standard library and the installed packages: text that every machine has), `text` (a
file, or a folder of text files), `pg19` (train|validation|test/<id>.txt), `arxiv` (JSON lines of RedPajama or scientific_papers).
The same inputs and options again do nothing. Exit codes: 0 done; 2 the user's mistake, one line on stderr.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from data_pipeline.build import Options, Report, build_dataset, fingerprint, is_prepared
from data_pipeline.sources import SOURCES
from spa_dist.cli import run_command
from spa_dist.errors import DataError

PYTHON_LIMIT = 24 << 20


def main() -> int:
    """Parse, build, print what was written."""
    args = _parser().parse_args()
    options = Options(
        source=args.source,
        input=args.input,
        vocab_size=args.vocab_size,
        tokenizer=args.tokenizer,
        tokenizer_bytes=args.tokenizer_bytes,
        shard_tokens=args.shard_tokens,
        streams=args.streams,
        limit_bytes=PYTHON_LIMIT if args.limit_bytes is None and args.source == "python" else args.limit_bytes,
        validation=args.validation_fraction,
        test=args.test_fraction,
        seed=args.seed,
    )
    _check(options)
    folder = Path(args.output)
    if not args.force and is_prepared(folder, fingerprint(options)):
        print(f"{folder} is already prepared from the same input with the same options")
        return 0
    print_report(folder, build_dataset(folder, options, force=args.force, reading=_bar))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--source", choices=sorted(SOURCES), required=True)
    add("--input", metavar="PATH", help="folder or file of the corpus; not for source python")
    add("--output", metavar="DIR", required=True, help="the dataset folder to write")
    add("--vocab-size", type=int, default=4096, metavar="N", help="pieces of the tokenizer to train (default 4096)")
    add("--tokenizer", metavar="FILE", help="use this sentencepiece model instead of training one")
    add("--tokenizer-bytes", type=int, default=8 << 20, metavar="N", help="bytes of text to train it on (default 8 MiB)")
    add("--shard-tokens", type=int, default=1 << 22, metavar="N", help="close a shard at this many tokens (default 4 Mi)")
    add("--streams", type=int, default=64, metavar="C", help="canonical streams; the data-parallel size must divide it (64)")
    add("--limit-bytes", type=int, metavar="N", help="stop after this much text (default for source python: 24 MiB)")
    add("--validation-fraction", type=float, default=0.02, metavar="F", help="of documents, by hash of their name (0.02)")
    add("--test-fraction", type=float, default=0.0, metavar="F", help="likewise (0)")
    add("--seed", type=int, default=0, help="of the split")
    add("--force", action="store_true", help="replace what is at --output")
    return parser


def _check(options: Options) -> None:
    for name, value in (
        ("vocab-size", options.vocab_size),
        ("shard-tokens", options.shard_tokens),
        ("streams", options.streams),
    ):
        if value < 1:
            raise DataError(f"--{name} {value} must be at least 1")
    if not (0 <= options.validation < 1 and 0 <= options.test < 1 and options.validation + options.test < 1):
        raise DataError(
            f"--validation-fraction {options.validation} and --test-fraction {options.test} must leave text to train on"
        )


def _bar(title: str, total: int) -> tuple[Callable[[int], None], Callable[[], None]]:
    bar = tqdm(total=total, desc=title, unit="B", unit_scale=True, mininterval=0.5, dynamic_ncols=True)
    return lambda size: bar.update(size) and None, bar.close


def print_report(folder: Path, report: Report) -> None:
    """A table by split, and what was left out."""
    print(f"\n{'split':12}{'documents':>11}{'bytes':>14}{'words':>13}{'tokens':>13}{'bytes/token':>13}{'shards':>8}")
    for name, split in report.index.splits.items():
        ratio = split.bytes / max(1, split.tokens)
        print(
            f"{name:12}{split.documents:>11,}{split.bytes:>14,}{split.words:>13,}{split.tokens:>13,}{ratio:>13.2f}"
            f"{len(split.shards):>8}"
        )
    tally = report.corpus.tally
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in sorted(tally.left_out.items())) or "nothing"
    total = sum(split.bytes for split in report.index.splits.values())
    print(f"left out: {left_out}; not UTF-8, read as Latin-1: {tally.not_utf8:,}")
    print(
        f"{folder}: vocabulary {report.index.vocab_size:,}, {report.index.canonical_streams} streams, "
        f"{report.seconds:.1f} s, {total / report.seconds / 1e6:.1f} MB/s"
    )


if __name__ == "__main__":
    run_command(main)
