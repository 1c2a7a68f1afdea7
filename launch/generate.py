"""Continue prompts with an exported model: `python launch/generate.py --model exported --prompt "def main("`.

Greedy by default; with `--temperature` tokens are drawn, and `--top-k`, `--top-p` and `--seed` say how. One prompt streams to the
terminal as it grows; of more than one each is printed when all are done. Needs neither DeepSpeed nor Megatron.
Exit codes: 0 done; 2 the user's mistake, one line on stderr.
"""

import argparse
import sys
from typing import TYPE_CHECKING

from spa_dist.cli import run_command, share_cores
from spa_dist.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from data_pipeline.tokenizer import Tokenizer


def main() -> int:
    """Parse, load, generate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR", help="an export, a run, or a checkpoint")
    parser.add_argument("--prompt", required=True, nargs="+", metavar="TEXT", help="- reads standard input")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) takes the likeliest token")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens (default: all)")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="draw from the smallest set with probability P (default: 1)"
    )
    parser.add_argument("--seed", type=int, help="of the draws (default 0)")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    idle = [name for name in ("top_k", "top_p", "seed") if getattr(args, name) is not None]
    if idle and args.temperature == 0.0:
        parser.error(f"--{idle[0].replace('_', '-')} has no effect without --temperature: the likeliest token is taken")
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
    texts = [_standard_input() if text == "-" else text for text in args.prompt]
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal of another encoding shows what it can
    stream = _Stream(tokenizer, texts[0]) if len(texts) == 1 else None
    try:
        new = generate(
            loaded.model,
            [_tokens(tokenizer, text) for text in texts],
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k or 0,
            top_p=1.0 if args.top_p is None else args.top_p,
            seed=args.seed or 0,
            on_token=stream,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if stream:
        stream.finish()
    for text, tokens in zip(texts, new) if stream is None else ():
        print(text + tokenizer.decode(tokens), end="\n---\n")
    return 0


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError:
        raise DataError("standard input is not UTF-8: convert it first") from None


def _tokens(tokenizer: "Tokenizer", text: str) -> list[int]:
    """A document's beginning: the end-of-text token, then the text."""
    try:
        return [tokenizer.eos_id, *tokenizer.encode(text).tolist()]
    except UnicodeEncodeError:
        raise DataError(f"the prompt {ascii(text)[:60]} is not UTF-8: encode it so, or give it on standard input") from None


class _Stream:
    """Prints the prompt, and text as tokens come; a character of several byte tokens waits until it is whole."""

    def __init__(self, tokenizer: "Tokenizer", prompt: str) -> None:
        self._tokenizer, self._prompt = tokenizer, prompt
        self._tokens: list[int] = []
        self._shown = 0

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
        sys.stdout.write(self._prompt + text[self._shown :])
        self._prompt = ""
        sys.stdout.flush()
        self._shown = len(text)


if __name__ == "__main__":
    run_command(main)
