"""The adaptive gate: one positive temperature exp(g_h) on the logits of each head, folded into W_Q (Section 5.3.6)."""

from torch import Tensor


def fold_gate(weight: Tensor, gate: Tensor) -> Tensor:
    """exp(g_h)·W_h for every head: the gated queries' weight, or bias.

    weight [H·d, D] or [H·d]; gate g [H]. Scaling a head's queries scales its logits, and commutes with S and with RoPE.
    """
    heads = weight.unflatten(0, (gate.shape[0], -1))
    factor = gate.to(weight.dtype).exp().reshape(-1, *([1] * (heads.dim() - 1)))
    return (heads * factor).flatten(0, 1)
