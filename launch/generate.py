"""Continue prompts with an exported model: `python launch/generate.py --model exported --prompt "def main("`.

Greedy by default; `--temperature`, `--top-k`, `--top-p` and `--seed` sample. Text streams to the terminal as it comes; with more
than one prompt each is printed when all are done. Needs neither DeepSpeed nor Megatron.
Exit codes: 0 done; 2 the user's mistake, one line on stderr.
"""

import argparse
import sys

from spa_dist.cli import run_command, share_cores
from spa_dist.errors import CheckpointError


def main() -> int:
    """Parse, load, generate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR", help="an export, a run, or a checkpoint")
    parser.add_argument("--prompt", required=True, nargs="+", metavar="TEXT")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) takes the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K likeliest tokens (0: all)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="keep the smallest set with probability P")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    share_cores()

    from data_pipeline.tokenizer import Tokenizer
    from spa_dist.export.load import load_model
    from spa_dist.export.model import generate

    loaded = load_model(args.model, device=args.device)
    if loaded.tokenizer is None:
        raise CheckpointError(f"{args.model} has no tokenizer.model: copy it there")
    tokenizer = Tokenizer.from_file(loaded.tokenizer)
    if loaded.tokenizer_sha256 not in (None, tokenizer.sha256):
        raise CheckpointError(f"{loaded.tokenizer} is not the tokenizer that the model was trained with")
    eos = tokenizer.eos_id
    prompts = [[eos, *tokenizer.encode(text).tolist()] for text in args.prompt]
    stream = _Stream(tokenizer) if len(prompts) == 1 else None
    if stream:
        print(args.prompt[0], end="", flush=True)
    try:
        new = generate(
            loaded.model,
            prompts,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
            on_token=stream,
        )
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if stream:
        stream.finish()
    for text, tokens in zip(args.prompt, new) if stream is None else ():
        print(text + tokenizer.decode(tokens), end="\n---\n")
    return 0


class _Stream:
    """Prints text as tokens come; a character of several byte tokens waits until it is whole."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer, self._tokens, self._shown = tokenizer, [], 0

    def __call__(self, row: int, token: int) -> None:
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        if not text.endswith("\ufffd"):
            self._show(text)

    def finish(self) -> None:
        """Print what is left."""
        self._show(self._tokenizer.decode(self._tokens))
        print()

    def _show(self, text: str) -> None:
        sys.stdout.write(text[self._shown :])
        sys.stdout.flush()
        self._shown = len(text)


if __name__ == "__main__":
    run_command(main)
