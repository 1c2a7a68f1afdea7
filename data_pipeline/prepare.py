#!/usr/bin/env python
"""Prepare training data: train a tokenizer on a corpus and write it as webdataset shards with an index.

python data_pipeline/prepare.py --source python --output data/python
python data_pipeline/prepare.py --source text --input my_texts/ --output data/mine --vocab-size 8192
"""

import argparse
import os
import signal
import sys
from pathlib import Path

if not __package__:
    # Run as a script: this folder's modules must not be importable as top-level names.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from data_pipeline.build import Options, Result, prepare_dataset
from data_pipeline.sources import SOURCES
from data_pipeline.tokenizer import MODEL_TYPES
from spa_dist.cli import run_command

DEFAULT_PYTHON_BYTES = 24_000_000


def main() -> int:
    options = _parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    result = prepare_dataset(options)
    print(_summary(result))
    return 0


def _parse(arguments: list[str]) -> Options:
    defaults = Options(source="python", output=Path())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--source", required=True, choices=SOURCES, help="what kind of corpus --input holds; python: the installed packages")
    add("--input", help="the corpus: a folder, or a file for text and arxiv; not for python")
    add("--output", required=True, type=Path, help="folder of the dataset, made by this command")
    add("--vocab-size", type=int, default=defaults.vocab_size, help="pieces of the tokenizer (%(default)s)")
    add("--tokenizer", type=Path, help="use this sentencepiece model instead of training one")
    add("--model-type", choices=MODEL_TYPES, default=defaults.model_type, help="of the trained tokenizer (%(default)s)")
    add("--tokenizer-bytes", type=int, default=defaults.tokenizer_bytes, help="text it is trained on (%(default)s)")
    add("--shard-tokens", type=int, default=defaults.shard_tokens, help="tokens after which a shard is closed (%(default)s)")
    add("--streams", type=int, default=defaults.streams, help="canonical streams: data-parallel sizes must divide it; a tiny "
        "corpus gets a divisor of it (%(default)s)")  # fmt: skip
    add("--limit-bytes", type=int, help=f"stop after this much text (python: {DEFAULT_PYTHON_BYTES}; others: no limit)")
    add("--validation-fraction", type=float, default=defaults.validation_fraction, help="share of the documents held out, where "
        "the source has no splits of its own (%(default)s)")  # fmt: skip
    add("--test-fraction", type=float, default=defaults.test_fraction, help="the same for the test split (%(default)s)")
    add("--seed", type=int, default=defaults.seed, help="of the splits (%(default)s)")
    add("--num-threads", type=int, default=os.cpu_count() or 1, help="for encoding; no effect on the result (%(default)s)")
    add("--force", action="store_true", help="replace the dataset at --output")
    given = vars(parser.parse_args(arguments))
    if given["source"] == "python" and given["limit_bytes"] is None:
        given["limit_bytes"] = DEFAULT_PYTHON_BYTES
    return Options(**given, progress=sys.stderr.isatty())


def _summary(result: Result) -> str:
    dataset = result.dataset
    lines = [f"{'split':<12}{'documents':>11}{'bytes':>15}{'words':>14}{'tokens':>14}{'bytes/token':>13}{'shards':>8}"]
    for name, split in dataset.splits.items():
        ratio = f"{split.bytes / split.tokens:.2f}" if split.tokens else "-"
        lines.append(
            f"{name:<12}{split.documents:>11,}{split.bytes:>15,}{split.words:>14,}{split.tokens:>14,}"
            f"{ratio:>13}{len(split.shards):>8}"
        )
    counts = ", ".join(f"{count:,} {reason}" for reason, count in result.counts.items()) or "nothing"
    lines.append(f"left out or mended: {counts} (each in manifest.jsonl, but for what was skipped by name)")
    lines.append(f"tokenizer: {dataset.vocab_size} pieces; canonical streams: {dataset.canonical_streams}")
    if result.reused:
        lines.append(f"{dataset.path}: already prepared")
    else:
        tokens = sum(split.tokens for split in dataset.splits.values())
        lines.append(f"{dataset.path}: prepared in {result.seconds:.1f} s, {tokens / result.seconds:,.0f} tokens/s")
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
