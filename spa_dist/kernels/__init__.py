"""Fused attention for queries and keys narrower than the values (d_qk ≠ d_v), and the elementwise work around it."""

from torch import Tensor

from spa_dist.kernels import dispatch
from spa_dist.kernels.cross_entropy import cross_entropy
from spa_dist.kernels.dispatch import CannotServe
from spa_dist.kernels.pointwise import bias_dropout_residual, bias_gelu, layer_norm, rms_norm
from spa_dist.kernels.problem import make_problem

__all__ = [
    "CannotServe",
    "attention",
    "bias_dropout_residual",
    "bias_gelu",
    "cross_entropy",
    "layer_norm",
    "rms_norm",
]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    key_lengths: Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    backend: str = "auto",
) -> Tensor:
    """softmax(scale · q kᵀ + mask) v without an N×N matrix in memory, for d_qk equal to d_v or not.

    q [batch, heads, Nq, d_qk], k [batch, kv_heads, Nk, d_qk], v [batch, kv_heads, Nk, d_v]: one dtype (float16, bfloat16,
    float32 or float64), any strides. heads is a multiple of kv_heads; query head h reads head h // (heads // kv_heads) of
    k and v. Returns [batch, heads, Nq, d_v] in q's dtype; sums and softmax are float32 at least.

    scale: multiplies the scores; never guessed from a width. causal: query i sees keys j <= i + (Nk - Nq).
    key_lengths: integers [batch]; keys at or past a sequence's length are not seen, whatever they hold. A score of -inf is
    an unseen key too. A row that sees no key gives 0 and gradients of 0. dropout: of the probabilities, in [0, 1); its mask
    is a function of `seed` and the shapes alone, so that a recomputed forward has the same one.
    backend: "auto" picks from the table in `dispatch.py` and logs its choice once; or "triton", "cudnn", "sdpa", "flex",
    "tiled", "reference". Decoding is one query with causal=True, or with key_lengths, against a cache of keys and values.

    Raises ValueError where the arguments do not fit each other, and CannotServe (a ValueError) where the backend that was named
    cannot serve them, saying why.
    """
    problem = make_problem(q, k, v, scale=scale, causal=causal, key_lengths=key_lengths, dropout=dropout, seed=seed)
    if problem.empty:
        nothing = q[..., :0].sum() + k[..., :0].sum() + v[..., :0].sum()
        return nothing.expand(problem.batch, problem.heads, problem.queries, problem.d_v).clone()
    return dispatch.run(problem, backend, q, k, v, key_lengths)
