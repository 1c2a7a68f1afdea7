"""The tail of every "unknown name" message: the nearest valid name, and all of them."""

import difflib
from collections.abc import Iterable


def nearest(name: object, valid: Iterable[str]) -> str:
    """`; did you mean 'random'? (one of block, conv, random)` for a misspelt name, to end a one-line error with."""
    names = sorted(valid)
    if not names:
        return ": there are none here"
    close = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{hint} (one of {', '.join(names)})"
