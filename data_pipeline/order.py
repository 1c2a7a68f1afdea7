"""Seeded orders as pure functions: the same on every machine and with every version of NumPy.

NumPy may change its generators' streams between versions, and a data cursor must outlive an upgrade, so an order here is
the stable sort of keys made by SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

import hashlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def permutation(length: int, *key: int | str) -> np.ndarray:
    """A permutation of range(length), int64 [length], that depends on `length` and `key` alone."""
    start = np.frombuffer(_digest(key)[:8], "<u8").astype(np.uint64)
    z = start + np.arange(1, length + 1, dtype=np.uint64) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return np.argsort(z ^ (z >> np.uint64(31)), kind="stable")


def unit_interval(*key: int | str) -> float:
    """A number in [0, 1) that depends on `key` alone, uniform over keys."""
    return int.from_bytes(_digest(key)[:6], "big") / 2**48


def _digest(key: tuple[int | str, ...]) -> bytes:
    """Names may hold lone surrogates: that is how Python spells file names that are not UTF-8."""
    return hashlib.sha256("/".join(map(str, key)).encode("utf-8", "surrogatepass")).digest()
