"""One layer of attention after a convolution of width 2: the least that recall needs, so that its width decides.

The convolution puts a pair's key beside its value; attention then finds the position whose key is the question's, among all.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spa_dist import kernels
from spa_dist.attention import fold_gate, fold_projection, logit_scale, make_projection, query_key_width
from spa_dist.attention.masks import LearnedProjection, MaskMethod, TemperatureSchedule
from spa_dist.comparison.recall.data import VALUES, VOCABULARY

WIDTH = 128
"""Of the model and of its one head: d_k = d_v = 128."""


class RecallAttention(nn.Module):
    """One head of attention from questions to a context; `section` is the config's section `attention`.

    Without positions: a pair is found by what it holds. `projection` is None, a fixed S, or a `LearnedProjection`.
    """

    def __init__(self, section: dict[str, Any], steps: int, seed: int):
        super().__init__()
        kind, d_proj = section["kind"], section["d_proj"]
        width = query_key_width(kind, WIDTH, d_proj)
        own = WIDTH if kind == "spa" else width
        self.scale = logit_scale(section["scale"] if kind == "spa" else "paper", WIDTH, width)
        self.query, self.key = (nn.Linear(WIDTH, own, bias=False) for _ in range(2))
        self.value, self.output = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.gate = nn.Parameter(torch.zeros(1)) if section["gate"] else None
        self.projection: Tensor | LearnedProjection | None = None
        if kind == "spa":
            self._add_projection(section, steps, seed)

    def _add_projection(self, section: dict[str, Any], steps: int, seed: int) -> None:
        mask = section.get("mask")
        del self.projection
        if mask is None:
            options: dict[str, Any] = {"block": tuple(section["block"])} if "block" in section else {}
            pattern, sparsity = section["pattern"], section["sparsity"]
            drawn = make_projection(pattern, WIDTH, section["d_proj"], sparsity=sparsity, seed=seed, **options)
            self.register_buffer("projection", drawn)
            return
        method = MaskMethod(mask["method"], TemperatureSchedule(last=steps))
        self.projection = LearnedProjection(method, (1, WIDTH, section["d_proj"]), seed=seed, name="recall")
        start = method.initial(make_projection("gaussian", WIDTH, section["d_proj"], seed=seed))
        self.projection.load_state_dict(start)

    def weights(self) -> tuple[Tensor, Tensor]:
        """W_Q and W_K [d_qk, D] with S and the gate multiplied in."""
        query, key = self.query.weight, self.key.weight
        projection = self.projection() if isinstance(self.projection, LearnedProjection) else self.projection
        if projection is not None:
            query, key = fold_projection(query, projection), fold_projection(key, projection)
        return query if self.gate is None else fold_gate(query, self.gate), key

    def forward(self, questions: Tensor, context: Tensor, weights: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Attend from questions [B, Q, D] to a context [B, M, D]; [B, Q, D]. weights: in place of its own W_Q and W_K."""
        query, key = self.weights() if weights is None else weights
        q, k = F.linear(questions, query), F.linear(context, key)
        attended = kernels.attention(
            q.unsqueeze(1), k.unsqueeze(1), self.value(context).unsqueeze(1), scale=self.scale, backend="reference"
        )
        return self.output(attended.squeeze(1))


class RecallModel(nn.Module):
    """Embedding, convolution of width 2, attention, values."""

    def __init__(self, section: dict[str, Any], steps: int, seed: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.here, self.before = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm, self.final_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VALUES)
        self.attention = RecallAttention(section, steps, seed)  # last: what variants share is drawn before they differ

    def convolved(self, tokens: Tensor) -> Tensor:
        """Each token mixed with the one before it, [B, N, D]."""
        x = self.embedding(tokens)
        return self.norm(self.here(x) + self.before(F.pad(x, (0, 0, 1, 0))[:, :-1]))

    def forward(self, context: Tensor, questions: Tensor, weights: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Logits of the values [B, Q, 64] for a context [B, 2P] and questions [B, Q]."""
        asked = self.convolved(questions)
        return self.head(self.final_norm(asked + self.attention(asked, self.convolved(context), weights)))


def truncated(query: Tensor, key: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """W_Q and W_K of the nearest product W_Qᵀ W_K of a rank: what dense attention needs of its width. [rank, D] each."""
    left, values, right = torch.linalg.svd(query.double().T @ key.double(), full_matrices=False)
    root = values[:rank].sqrt()
    return (left[:, :rank] * root).T.to(query.dtype), (root[:, None] * right[:rank]).to(key.dtype)
