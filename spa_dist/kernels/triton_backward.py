"""The Triton backward kernels: one over key blocks for dK and dV, one over query blocks for dQ; no atomics, so deterministic.

With P = exp2(S - lse) and D = Σ dO ∘ O per row: dV = Pᵀ dO, dS = P ∘ (dO Vᵀ - D), dQ = scale dS K, dK = scale dSᵀ Q.
"""

import triton
import triton.language as tl

from spa_dist.kernels.triton_parts import dot_two, keep, load_rows, store_rows


@triton.jit
def delta_kernel(
    Out, D_out, Delta, stride_ob, stride_oh, stride_on, stride_gb, stride_gh, stride_gn, heads, queries,
    DV: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Delta [batch * heads, queries] = the row sums of dO ∘ O."""
    first_row = tl.program_id(0) * BLOCK_M
    bh = tl.program_id(1)
    b, h = tl.cast(bh // heads, tl.int64), tl.cast(bh % heads, tl.int64)
    o_base = Out + b * stride_ob + h * stride_oh
    g_base = D_out + b * stride_gb + h * stride_gh
    delta = tl.zeros([BLOCK_M], tl.float32)
    for part in tl.static_range(PARTS):
        out = load_rows(o_base, first_row, stride_on, queries, part * DV, DV, BLOCK_M).to(tl.float32)
        d_out = load_rows(g_base, first_row, stride_gn, queries, part * DV, DV, BLOCK_M).to(tl.float32)
        delta += tl.sum(out * d_out, 1)
    row = first_row + tl.arange(0, BLOCK_M)
    tl.store(Delta + tl.cast(bh, tl.int64) * queries + row, delta, mask=row < queries)


@triton.jit
def dkdv_kernel(
    Q, K, V, D_out, Lse, Delta, D_k, D_v, Lengths,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_km, stride_vb, stride_vh, stride_vm,
    stride_gb, stride_gh, stride_gn, stride_dkb, stride_dkh, stride_dkm, stride_dvb, stride_dvh, stride_dvm,
    heads, group, queries, keys, shift, scale, scale_log2, seed_low, seed_high, threshold, keep_scale,
    D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, PARTS: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N keys of one key/value head, DV columns of dV; the first part also makes dK.

    It walks the query heads of the group and their rows, from the first row that sees the block's first key.
    """
    first_key = tl.program_id(0) * BLOCK_N
    part = tl.program_id(2)
    kv_heads = heads // group
    b = tl.cast(tl.program_id(1) // kv_heads, tl.int64)
    g = tl.cast(tl.program_id(1) % kv_heads, tl.int64)
    length = tl.minimum(tl.load(Lengths + b), keys)
    k_base = K + b * stride_kb + g * stride_kh
    v_base = V + b * stride_vb + g * stride_vh
    k0 = load_rows(k_base, first_key, stride_km, length, 0, D0, BLOCK_N)
    k1 = k0
    if D1 > 0:
        k1 = load_rows(k_base, first_key, stride_km, length, D0, D1, BLOCK_N)
    d_k0 = tl.zeros([BLOCK_N, D0], tl.float32)
    d_k1 = tl.zeros([BLOCK_N, D1 if D1 > 0 else 16], tl.float32)
    d_v = tl.zeros([BLOCK_N, DV], tl.float32)
    key = first_key + tl.arange(0, BLOCK_N)
    start = tl.maximum(first_key - shift, 0) // BLOCK_M * BLOCK_M
    stop = tl.where(first_key < length, queries, start)

    for r in range(group):
        h = g * group + r
        bh = b * heads + h
        q_base = Q + b * stride_qb + h * stride_qh
        g_base = D_out + b * stride_gb + h * stride_gh
        for i in range(start, stop, BLOCK_M):
            row = i + tl.arange(0, BLOCK_M)
            q0 = load_rows(q_base, i, stride_qn, queries, 0, D0, BLOCK_M)
            q1 = q0
            if D1 > 0:
                q1 = load_rows(q_base, i, stride_qn, queries, D0, D1, BLOCK_M)
            lse = tl.load(Lse + bh * queries + row, mask=row < queries, other=float("inf"))
            seen = (key[:, None] < length) & (key[:, None] <= row[None, :] + shift)
            scores = tl.where(seen, dot_two(k0, k1, q0, q1, D1, PRECISION) * scale_log2, -float("inf"))
            weights = tl.exp2(scores - lse[None, :])
            dropped = weights
            if DROPOUT:
                kept = keep(seed_low, seed_high, threshold, bh, row[None, :], key[:, None])
                dropped = tl.where(kept, weights * keep_scale, 0.0)
            d_out = load_rows(g_base + part * DV, i, stride_gn, queries, 0, DV, BLOCK_M)
            d_v = tl.dot(dropped.to(d_out.dtype), d_out, d_v, input_precision=PRECISION)
            if part == 0:
                v = load_rows(v_base, first_key, stride_vm, length, 0, DV, BLOCK_N)
                d_weights = tl.dot(v, tl.trans(d_out), input_precision=PRECISION)
                for other in range(1, PARTS):
                    v = load_rows(v_base, first_key, stride_vm, length, other * DV, DV, BLOCK_N)
                    d_out = load_rows(g_base, i, stride_gn, queries, other * DV, DV, BLOCK_M)
                    d_weights = tl.dot(v, tl.trans(d_out), d_weights, input_precision=PRECISION)
                if DROPOUT:
                    d_weights = tl.where(kept, d_weights * keep_scale, 0.0)
                delta = tl.load(Delta + bh * queries + row, mask=row < queries, other=0.0)
                d_scores = (weights * (d_weights - delta[None, :])).to(q0.dtype)
                d_k0 = tl.dot(d_scores, q0, d_k0, input_precision=PRECISION)
                if D1 > 0:
                    d_k1 = tl.dot(d_scores, q1, d_k1, input_precision=PRECISION)

    dv_base = D_v + b * stride_dvb + g * stride_dvh + part * DV
    store_rows(dv_base, first_key, stride_dvm, keys, d_v, 0, DV, BLOCK_N)
    if part == 0:
        dk_base = D_k + b * stride_dkb + g * stride_dkh
        store_rows(dk_base, first_key, stride_dkm, keys, d_k0 * scale, 0, D0, BLOCK_N)
        if D1 > 0:
            store_rows(dk_base, first_key, stride_dkm, keys, d_k1 * scale, D0, D1, BLOCK_N)


@triton.jit
def dq_kernel(
    Q, K, V, D_out, Lse, Delta, D_q, Lengths,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_km, stride_vb, stride_vh, stride_vm,
    stride_gb, stride_gh, stride_gn, stride_dqb, stride_dqh, stride_dqn,
    heads, group, queries, keys, shift, scale, scale_log2, seed_low, seed_high, threshold, keep_scale,
    D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, PARTS: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: dQ of BLOCK_M query rows of one head."""
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    bh = tl.cast(tl.program_id(1), tl.int64)
    b, h = bh // heads, bh % heads
    length = tl.minimum(tl.load(Lengths + b), keys)
    q_base = Q + b * stride_qb + h * stride_qh
    k_base = K + b * stride_kb + (h // group) * stride_kh
    v_base = V + b * stride_vb + (h // group) * stride_vh
    g_base = D_out + b * stride_gb + h * stride_gh
    q0 = load_rows(q_base, first_row, stride_qn, queries, 0, D0, BLOCK_M)
    q1 = q0
    if D1 > 0:
        q1 = load_rows(q_base, first_row, stride_qn, queries, D0, D1, BLOCK_M)
    row = first_row + tl.arange(0, BLOCK_M)
    lse = tl.load(Lse + bh * queries + row, mask=row < queries, other=float("inf"))
    delta = tl.load(Delta + bh * queries + row, mask=row < queries, other=0.0)
    d_out = load_rows(g_base, first_row, stride_gn, queries, 0, DV, BLOCK_M)
    d_q0 = tl.zeros([BLOCK_M, D0], tl.float32)
    d_q1 = tl.zeros([BLOCK_M, D1 if D1 > 0 else 16], tl.float32)
    stop = tl.maximum(tl.minimum(length, first_row + BLOCK_M + shift), 0)
    for j in range(0, stop, BLOCK_N):
        key = j + tl.arange(0, BLOCK_N)
        k0 = load_rows(k_base, j, stride_km, length, 0, D0, BLOCK_N)
        k1 = k0
        if D1 > 0:
            k1 = load_rows(k_base, j, stride_km, length, D0, D1, BLOCK_N)
        seen = (key[None, :] < length) & (key[None, :] <= row[:, None] + shift)
        scores = tl.where(seen, dot_two(q0, q1, k0, k1, D1, PRECISION) * scale_log2, -float("inf"))
        weights = tl.exp2(scores - lse[:, None])
        v = load_rows(v_base, j, stride_vm, length, 0, DV, BLOCK_N)
        d_weights = tl.dot(d_out, tl.trans(v), input_precision=PRECISION)
        for other in range(1, PARTS):
            v = load_rows(v_base, j, stride_vm, length, other * DV, DV, BLOCK_N)
            d_out_other = load_rows(g_base, first_row, stride_gn, queries, other * DV, DV, BLOCK_M)
            d_weights = tl.dot(d_out_other, tl.trans(v), d_weights, input_precision=PRECISION)
        if DROPOUT:
            kept = keep(seed_low, seed_high, threshold, bh, row[:, None], key[None, :])
            d_weights = tl.where(kept, d_weights * keep_scale, 0.0)
        d_scores = (weights * (d_weights - delta[:, None])).to(k0.dtype)
        d_q0 = tl.dot(d_scores, k0, d_q0, input_precision=PRECISION)
        if D1 > 0:
            d_q1 = tl.dot(d_scores, k1, d_q1, input_precision=PRECISION)
    dq_base = D_q + b * stride_dqb + h * stride_dqh
    store_rows(dq_base, first_row, stride_dqn, queries, d_q0 * scale, 0, D0, BLOCK_M)
    if D1 > 0:
        store_rows(dq_base, first_row, stride_dqn, queries, d_q1 * scale, D0, D1, BLOCK_M)
