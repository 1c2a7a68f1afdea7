"""Pieces that the Triton kernels share: loads of a width in two power-of-two parts, scores, the mask, the dropout draw."""

import triton
import triton.language as tl


@triton.jit
def load_rows(base, start, stride, limit, first: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Rows [start, start + ROWS) and columns [first, first + WIDTH) at `base`; rows at or past `limit` are 0."""
    row = tl.arange(0, ROWS)
    column = first + tl.arange(0, WIDTH)
    pointers = base + tl.cast(start, tl.int64) * stride + row[:, None] * stride + column[None, :]
    return tl.load(pointers, mask=(start + row < limit)[:, None], other=0.0)


@triton.jit
def store_rows(base, start, stride, limit, value, first: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Write what `load_rows` would read."""
    row = tl.arange(0, ROWS)
    column = first + tl.arange(0, WIDTH)
    pointers = base + tl.cast(start, tl.int64) * stride + row[:, None] * stride + column[None, :]
    tl.store(pointers, value.to(base.dtype.element_ty), mask=(start + row < limit)[:, None])


@triton.jit
def dot_two(a0, a1, b0, b1, D1: tl.constexpr, PRECISION: tl.constexpr):
    """a bᵀ over a width held in one or two parts: [rows of a, rows of b], float32."""
    product = tl.dot(a0, tl.trans(b0), input_precision=PRECISION)
    if D1 > 0:
        product = tl.dot(a1, tl.trans(b1), product, input_precision=PRECISION)
    return product


@triton.jit
def keep(seed_low, seed_high, threshold, bh, query, key):
    """Which probabilities dropout keeps, from Philox 4x32-10: counter (key, query, head of the batch, 0), key `seed`.

    `query` and `key` broadcast against each other; kept where the first output word is at least `threshold`.
    """
    zero = (query + key) * 0
    seed = (tl.cast(seed_high, tl.uint64) << 32) | tl.cast(seed_low, tl.uint32, bitcast=True).to(tl.uint64)
    word, _, _, _ = tl.philox(
        seed, (zero + key).to(tl.uint32), (zero + query).to(tl.uint32), (zero + bh).to(tl.uint32), zero.to(tl.uint32)
    )
    return word >= tl.cast(threshold, tl.uint32, bitcast=True)
