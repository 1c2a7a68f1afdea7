"""The parameter layout table: for every parameter, its full shape and how tensor parallelism splits it.

One table drives initialisation (the full tensor from a generator seeded by the parameter's name, then this rank's slice, so
that every tensor-parallel size starts from the same model), the gradient-norm marks, checkpoints and export. It is a function
of the config alone, and it is saved with each checkpoint.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

from spa_dist.config import Config

Kind = Literal["replicated", "column", "row", "vocabulary", "per_head"]
_SPLIT_DIM: dict[str, int | None] = {"replicated": None, "column": 0, "row": 1, "vocabulary": 0, "per_head": 0}


@dataclass(frozen=True)
class ParameterLayout:
    """Where one parameter lives. A rank holds part `rank` of `size` equal parts along `dim`, or everything."""

    kind: Kind
    shape: tuple[int, ...]
    dim: int | None
    std: float = 0.0
    """Standard deviation of the initial normal values; 0 for a constant."""
    value: float = 0.0
    """Initial constant where `std` is 0."""
    buffer: bool = False
    """Not trained, but part of the model."""

    def local_shape(self, tensor_size: int) -> tuple[int, ...]:
        """Shape of one rank's part."""
        shape = list(self.shape)
        if self.dim is not None:
            assert shape[self.dim] % tensor_size == 0, (self, tensor_size)
            shape[self.dim] //= tensor_size
        return tuple(shape)

    def local_part(self, full: torch.Tensor, tensor_rank: int, tensor_size: int) -> torch.Tensor:
        """The part of `full` that a rank holds (a view)."""
        if self.dim is None:
            return full
        return full.chunk(tensor_size, dim=self.dim)[tensor_rank]

    def as_json(self) -> dict[str, Any]:
        """For a checkpoint's manifest."""
        entry = asdict(self)
        return {key: entry[key] for key in ("kind", "shape", "dim", "buffer")}


Layout = dict[str, ParameterLayout]


def padded_vocabulary(vocab_size: int, multiple: int) -> int:
    """Rows of the embedding: the vocabulary rounded up to a multiple, the same at each tensor-parallel size."""
    return math.ceil(vocab_size / multiple) * multiple


def parameter_layout(config: Config) -> Layout:
    """The table for a resolved config whose vocabulary is known. Names are those of a checkpoint."""
    model = config.model
    assert model.vocab_size is not None
    rows = padded_vocabulary(model.vocab_size, model.vocab_multiple)
    table: Layout = {"embedding.weight": _entry("vocabulary", (rows, model.hidden_size), std=model.init_std)}
    if model.positions == "learned":
        table["positions.weight"] = _entry("replicated", (model.sequence_length, model.hidden_size), std=model.init_std)
    for index in range(model.num_layers):
        for name, entry in _block_layout(config).items():
            table[f"layers.{index}.{name}"] = entry
    table |= _norm_layout("norm", config)
    if not model.tie_embeddings:
        table["head.weight"] = _entry("vocabulary", (rows, model.hidden_size), std=model.init_std)
    return table


def _block_layout(config: Config) -> Layout:
    model = config.model
    hidden, std = model.hidden_size, model.init_std
    assert model.num_kv_heads and model.value_dim and model.ffn_hidden_size
    out_std = std / math.sqrt(2 * model.num_layers)
    width = query_key_parameter_width(config)
    table: Layout = {}
    columns = {
        "query": model.num_heads * width,
        "key": model.num_kv_heads * width,
        "value": model.num_kv_heads * model.value_dim,
    }
    for name, size in columns.items():
        table[f"attention.{name}.weight"] = _entry("column", (size, hidden), std=std)
        if model.bias:
            table[f"attention.{name}.bias"] = _entry("column", (size,))
    table |= _projection_layout(config)
    table["attention.output.weight"] = _entry("row", (hidden, model.num_heads * model.value_dim), std=out_std)
    table["mlp.up.weight"] = _entry("column", (model.ffn_hidden_size, hidden), std=std)
    table["mlp.down.weight"] = _entry("row", (hidden, model.ffn_hidden_size), std=out_std)
    if model.bias:
        table["attention.output.bias"] = _entry("replicated", (hidden,))
        table["mlp.up.bias"] = _entry("column", (model.ffn_hidden_size,))
        table["mlp.down.bias"] = _entry("replicated", (hidden,))
    return table | _norm_layout("norm1", config) | _norm_layout("norm2", config)


def _projection_layout(config: Config) -> Layout:
    model, attention = config.model, config.attention
    assert model.num_kv_heads and model.head_dim and attention.d_proj
    table: Layout = {}
    if attention.kind == "spa":
        per_head = projection_is_per_head(config)
        shape = (model.num_kv_heads if per_head else 1, model.head_dim, attention.d_proj)
        kind: Kind = "per_head" if per_head else "replicated"
        for suffix, buffer in _projection_tensors(config).items():
            table[f"attention.projection{suffix}"] = _entry(kind, shape, buffer=buffer)
    if attention.gate:
        table["attention.gate"] = _entry("per_head", (model.num_heads,))
    if attention.qk_norm:
        width = model.head_dim if attention.kind == "dense" else attention.d_proj
        for name in ("query_norm", "key_norm"):
            table[f"attention.{name}.weight"] = _entry("replicated", (width,), value=1.0)
    return table


def _projection_tensors(config: Config) -> dict[str, bool]:
    """Suffix of the name of each tensor that S is made of → whether it is a buffer."""
    attention = config.attention
    if not attention.learns_mask:
        return {"": not attention.trainable}
    assert attention.mask
    mask = {"magnitude": {".mask": True}, "gumbel": {".mask_logits": False}, "l0": {".mask_logits": False}}
    return {".weight": False} | mask.get(attention.mask.method, {})


def _norm_layout(name: str, config: Config) -> Layout:
    table = {f"{name}.weight": _entry("replicated", (config.model.hidden_size,), value=1.0)}
    if config.model.norm == "layernorm":
        table[f"{name}.bias"] = _entry("replicated", (config.model.hidden_size,))
    return table


def _entry(kind: Kind, shape: tuple[int, ...], **options: Any) -> ParameterLayout:
    return ParameterLayout(kind, shape, _SPLIT_DIM[kind], **options)


def query_key_parameter_width(config: Config) -> int:
    """Width per head of W_Q and W_K as parameters: d_k, or d_k′ for the thin control, which has no S."""
    width = config.attention.d_proj if config.attention.kind == "thin" else config.model.head_dim
    assert width is not None
    return width


def projection_is_per_head(config: Config) -> bool:
    """True where each key/value head has an S of its own."""
    return config.attention.per == "head" or config.attention.drawn_pattern == "head_specific"


def layout_name(parameter: str) -> str:
    """The table's name of a module's parameter: attention keeps its weights as `query_weight`, so that one module owns them."""
    for suffix in ("weight", "bias"):
        parameter = parameter.removesuffix(f"_{suffix}") + f".{suffix}" if parameter.endswith(f"_{suffix}") else parameter
    return parameter


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters and saved buffers under the table's names."""
    saved = model.state_dict(keep_vars=True)
    return {layout_name(name): tensor for name, tensor in saved.items() if isinstance(tensor, torch.Tensor)}


def parameter_seed(seed: int, name: str) -> int:
    """A 63-bit seed for one parameter, the same on every rank and machine."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@torch.no_grad()
def initialise(
    model: nn.Module,
    layout: Layout,
    *,
    seed: int,
    tensor_rank: int,
    tensor_size: int,
    special: Callable[[str], torch.Tensor | None],
) -> None:
    """Fill every tensor with its part of the full model that `seed` means, and mark the split ones.

    Args:
        special: gives the full tensor of a parameter that no normal distribution or constant describes (S), or None.
    """
    tensors = model_tensors(model)
    assert tensors.keys() == layout.keys(), sorted(tensors.keys() ^ layout.keys())
    for name, entry in layout.items():
        tensor = tensors[name]
        assert tuple(tensor.shape) == entry.local_shape(tensor_size), (name, tensor.shape, entry, tensor_size)
        full = special(name)
        if full is None and entry.std:
            generator = torch.Generator().manual_seed(parameter_seed(seed, name))
            full = torch.empty(entry.shape).normal_(0.0, entry.std, generator=generator)
        if full is None:
            tensor.fill_(entry.value)
        else:
            tensor.copy_(entry.local_part(full, tensor_rank, tensor_size))
        if isinstance(tensor, nn.Parameter):
            # DeepSpeed's gradient norm reads this mark.
            tensor.tensor_model_parallel = entry.dim is not None  # type: ignore[attr-defined]
