"""The Triton forward kernel: flash attention with a running maximum, in float32, for d_qk ≠ d_v."""

import triton
import triton.language as tl

from spa_dist.kernels.triton_parts import dot_two, keep, load_rows, store_rows


@triton.jit
def _attend(
    acc, total, top, q0, q1, k_base, v_base, stride_k, stride_v, start, stop, length, first_row, shift, scale_log2,
    seed_low, seed_high, threshold, bh,
    D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fold keys [start, stop) into the running (output, sum, maximum) of BLOCK_M rows; scores are in units of log 2."""
    row = first_row + tl.arange(0, BLOCK_M)
    for j in range(start, stop, BLOCK_N):
        k0 = load_rows(k_base, j, stride_k, length, 0, D0, BLOCK_N)
        k1 = k0
        if D1 > 0:
            k1 = load_rows(k_base, j, stride_k, length, D0, D1, BLOCK_N)
        scores = dot_two(q0, q1, k0, k1, D1, PRECISION) * scale_log2
        key = j + tl.arange(0, BLOCK_N)
        if MASKED:
            seen = (key[None, :] < length) & (key[None, :] <= row[:, None] + shift)
            scores = tl.where(seen, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        safe_top = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(scores - safe_top[:, None])
        fade = tl.exp2(top - safe_top)
        total = total * fade + tl.sum(weights, 1)
        if DROPOUT:
            kept = keep(seed_low, seed_high, threshold, bh, row[:, None], key[None, :])
            weights = tl.where(kept, weights, 0.0)
        v = load_rows(v_base, j, stride_v, length, 0, DV, BLOCK_N)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        top = new_top
    return acc, total, top


@triton.jit
def forward_kernel(
    Q, K, V, Out, Lse, Lengths,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_km, stride_vb, stride_vh, stride_vm,
    stride_ob, stride_oh, stride_on,
    heads, group, queries, keys, shift, scale_log2, seed_low, seed_high, threshold, keep_scale,
    D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M query rows of one head, DV columns of the values. Lse [batch * heads, queries], in base 2.

    Keys that every row of the block sees come first and need no mask; the last rows, which see most, are started first.
    """
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    bh = tl.program_id(1)
    part = tl.program_id(2)
    b = tl.cast(bh // heads, tl.int64)
    h = bh % heads
    length = tl.minimum(tl.load(Lengths + b), keys)
    q_base = Q + b * stride_qb + tl.cast(h, tl.int64) * stride_qh
    k_base = K + b * stride_kb + tl.cast(h // group, tl.int64) * stride_kh
    v_base = V + b * stride_vb + tl.cast(h // group, tl.int64) * stride_vh + part * DV
    q0 = load_rows(q_base, first_row, stride_qn, queries, 0, D0, BLOCK_M)
    q1 = q0
    if D1 > 0:
        q1 = load_rows(q_base, first_row, stride_qn, queries, D0, D1, BLOCK_M)

    stop = tl.maximum(tl.minimum(length, first_row + BLOCK_M + shift), 0)
    plain = tl.maximum(tl.minimum(length, first_row + 1 + shift), 0) // BLOCK_N * BLOCK_N
    acc = tl.zeros([BLOCK_M, DV], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    acc, total, top = _attend(
        acc, total, top, q0, q1, k_base, v_base, stride_km, stride_vm, 0, plain, length, first_row, shift, scale_log2,
        seed_low, seed_high, threshold, bh, D0, D1, DV, DROPOUT, False, PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    acc, total, top = _attend(
        acc, total, top, q0, q1, k_base, v_base, stride_km, stride_vm, plain, stop, length, first_row, shift, scale_log2,
        seed_low, seed_high, threshold, bh, D0, D1, DV, DROPOUT, True, PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip

    empty = total == 0.0
    acc = acc * (keep_scale / tl.where(empty, 1.0, total))[:, None]
    o_base = Out + b * stride_ob + tl.cast(h, tl.int64) * stride_oh + part * DV
    store_rows(o_base, first_row, stride_on, queries, acc, 0, DV, BLOCK_M)
    if part == 0:
        row = first_row + tl.arange(0, BLOCK_M)
        lse = tl.where(empty, float("inf"), top + tl.log2(tl.where(empty, 1.0, total)))
        tl.store(Lse + tl.cast(bh, tl.int64) * queries + row, lse, mask=row < queries)
