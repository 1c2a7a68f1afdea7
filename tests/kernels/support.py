"""What the kernel tests share: a float64 oracle written with loops, torch's own attention, and random problems."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from spa_dist.kernels import attention

ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass(frozen=True)
class Case:
    """The options of one random attention problem."""

    batch: int
    kv_heads: int
    group: int
    queries: int
    keys: int
    d_qk: int
    d_v: int
    causal: bool
    lengths: tuple[int, ...] | None
    layout: str
    dtype: torch.dtype
    scale: float
    seed: int

    @property
    def key_lengths(self) -> Tensor | None:
        return None if self.lengths is None else torch.tensor(self.lengths)


@st.composite
def cases(draw, dtypes, max_length=70, widths_qk=(4, 16, 33), widths_v=(8, 32, 40), max_batch=3, min_length=1, min_keys=0):
    batch = draw(st.integers(1, max_batch))
    queries = draw(st.integers(min_length, max_length))
    keys = queries if draw(st.booleans()) else draw(st.integers(min_length, max_length))
    lengths = draw(st.none() | st.tuples(*[st.integers(min(min_keys, keys), keys)] * batch))
    d_qk = draw(st.sampled_from(widths_qk))
    return Case(
        batch=batch,
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)),
        queries=queries,
        keys=keys,
        d_qk=d_qk,
        d_v=draw(st.sampled_from(widths_v)),
        causal=draw(st.booleans()),
        lengths=lengths,
        layout=draw(st.sampled_from(["bhnd", "bnhd", "bhdn", "sliced"])),
        dtype=draw(st.sampled_from(dtypes)),
        scale=draw(st.sampled_from([d_qk**-0.5, 0.05, 1.0])),
        seed=draw(st.integers(0, 2**20)),
    )


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values in memory in another order: strides that models really hand over."""
    if layout == "bnhd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "bhdn":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "sliced":
        wide = x.new_full((*x.shape[:2], x.shape[2] + 3, 2 * x.shape[3]), torch.nan)
        wide[:, :, 2 : 2 + x.shape[2], 1::2] = x
        return wide[:, :, 2 : 2 + x.shape[2], 1::2]
    return x.contiguous()


def tensors(case: Case, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the output's gradient of a case, in its dtype and layout."""
    generator = torch.Generator().manual_seed(case.seed)
    heads = case.kv_heads * case.group

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, case.dtype)

    q = laid_out(normal(case.batch, heads, case.queries, case.d_qk), case.layout)
    k = laid_out(normal(case.batch, case.kv_heads, case.keys, case.d_qk), case.layout)
    v = laid_out(normal(case.batch, case.kv_heads, case.keys, case.d_v), case.layout)
    return q, k, v, normal(case.batch, heads, case.queries, case.d_v)


def visible(case: Case) -> Tensor:
    """bool [batch, queries, keys] by a loop over the definition: i sees j <= i + (keys - queries), j < length."""
    seen = torch.zeros(case.batch, case.queries, case.keys, dtype=torch.bool)
    for b in range(case.batch):
        length = case.keys if case.lengths is None else case.lengths[b]
        for i in range(case.queries):
            last = min(length, i + case.keys - case.queries + 1) if case.causal else length
            seen[b, i, : max(0, last)] = True
    return seen


def oracle(q: Tensor, k: Tensor, v: Tensor, seen_bnm: Tensor, scale: float) -> Tensor:
    """Attention in float64, one head at a time, without a softmax call: exp(s - max) / sum over the keys that are seen."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    out = []
    for b in range(q.shape[0]):
        mask = seen_bnm[b].to(q.device).double()
        for h in range(q.shape[1]):
            scores = (q[b, h] @ k[b, h // group].T) * scale
            top = scores.detach().masked_fill(mask == 0, -torch.inf).amax(-1, keepdim=True).clamp(min=-1e300)
            weights = torch.exp((scores - top).clamp(max=0.0)) * mask
            total = weights.sum(-1, keepdim=True)
            out.append(weights / torch.where(total == 0, torch.ones_like(total), total) @ v[b, h // group])
    return torch.stack(out).view(q.shape[0], q.shape[1], q.shape[2], v.shape[3])


def torch_attention(q: Tensor, k: Tensor, v: Tensor, seen_bnm: Tensor, scale: float) -> Tensor:
    """torch's own attention with the mask as a bool tensor; rows without a key are set to 0."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    mask = seen_bnm.to(q.device)[:, None]
    alive = mask.any(-1, keepdim=True)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask | ~alive, scale=scale)
    return out * alive


def with_gradients(function, *inputs_and_d_out):
    """[output, gradient of each input] of function(*inputs): [output, d_q, d_k, d_v] of an attention's q, k and v."""
    *inputs, d_out = inputs_and_d_out
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(out.dtype))]


def assert_as_exact_as_torch(case: Case, backend: str, device: str = "cpu", factor: float = 2.0) -> None:
    """The backend's error against float64, output and each gradient, is at most twice that of torch in the same dtype.

    The floor is for the cases in which torch happens to be exact: a fraction of the dtype's roundoff, and for d_q and d_k,
    which are differences of larger numbers, float32's roundoff of those.
    """
    q, k, v, d_out = tensors(case, device)
    seen = visible(case)
    lengths = None if case.key_lengths is None else case.key_lengths.to(device)

    def ours(q, k, v):
        return attention(q, k, v, scale=case.scale, causal=case.causal, key_lengths=lengths, backend=backend)

    truth = with_gradients(lambda q, k, v: oracle(q, k, v, seen, case.scale), q.double(), k.double(), v.double(), d_out)
    mine = with_gradients(ours, q, k, v, d_out)
    theirs = with_gradients(lambda q, k, v: torch_attention(q, k, v, seen, case.scale), q, k, v, d_out)
    most_keys = int(seen.sum(-1).max())
    size = case.scale * float(d_out.double().norm() * v.double().norm()) / max(1, most_keys)
    for name, exact, a, b in zip(("out", "d_q", "d_k", "d_v"), truth, mine, theirs, strict=True):
        assert a.dtype == case.dtype and a.shape == exact.shape
        if case.dtype == torch.float64:  # the oracle is no more exact than the backend
            torch.testing.assert_close(a, exact, rtol=1e-10, atol=1e-11)
            continue
        error, allowed = float((a.double() - exact).norm()), factor * float((b.double() - exact).norm())
        floor = 0.25 * ROUNDOFF[case.dtype] * float(exact.norm())
        if name in ("d_q", "d_k"):
            floor += 2 * ROUNDOFF[torch.float32] * size
        assert error <= allowed + floor, f"{name}: error {error:.3g}, torch's {allowed / factor:.3g}, floor {floor:.3g}"
