"""Loss and perplexity of an export or a checkpoint on a prepared dataset.

    python launch/evaluate.py --model exported --data data/python --split validation

`--model` takes an export folder, a run, or a checkpoint; a checkpoint is merged in memory. Needs neither DeepSpeed nor Megatron.
Exit codes: 0 done; 2 the user's mistake, one line on stderr.
"""

import argparse
import json
from pathlib import Path

from spa_dist.cli import run_command, share_cores
from spa_dist.errors import CheckpointError, ConfigError, DataError


def main() -> int:
    """Parse, load, evaluate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR", help="an export, a run, or a checkpoint")
    parser.add_argument("--data", required=True, metavar="DIR", help="a dataset written by data_pipeline/prepare.py")
    parser.add_argument("--split", default="validation")
    parser.add_argument("--sequences", type=int, metavar="N", help="at most this many sequences (default: the whole split)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="sequences of one forward pass (default 8)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here too")
    args = parser.parse_args()
    share_cores()

    from data_pipeline.dataset import open_dataset
    from data_pipeline.stream import EvalStream
    from spa_dist.export.evaluate import perplexities, total_loss
    from spa_dist.export.load import load_model

    loaded = load_model(args.model, device=args.device)
    model, dataset = loaded.model, open_dataset(args.data)
    if dataset.vocab_size != model.config.vocab_size or loaded.tokenizer_sha256 not in (
        None,
        dataset.index.tokenizer_sha256,
    ):
        raise DataError(f"{args.data} was written with another tokenizer than {args.model}: its token ids mean other text")
    if args.batch_size < 1 or (args.sequences is not None and args.sequences < 1):
        raise CheckpointError("--batch-size and --sequences must be at least 1")
    stream = EvalStream(dataset, args.split, sequence_length=model.config.sequence_length, limit=args.sequences)
    total, tokens = total_loss(model, stream.batches(args.batch_size))
    result = perplexities(total, tokens, stream.words)
    for name, value in result.items():
        print(f"{name:18}{value:,.6f}" if isinstance(value, float) else f"{name:18}{value:,}")
    if args.json:
        try:
            Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {args.json} cannot be written: {error.strerror}") from None
    return 0


if __name__ == "__main__":
    run_command(main)
