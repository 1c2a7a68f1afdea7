"""A trained model on torch alone: this file, `config.json` and the weights are all that inference needs.

The file imports nothing of spa_dist, so it can be copied to any machine that has torch (and safetensors, for weights in
that format). It holds a pre-norm decoder with Sparse Projection Attention. Exported with folding, S is multiplied into
the query and key weights, and what remains is ordinary attention whose queries and keys are d_k′ wide.

    model = PlainModel.from_folder("exported")
    new_tokens = generate(model, [[1, 2, 3]], max_new_tokens=20)

Letters in shapes: B batch, N tokens given, M tokens so far (cached ones included), H heads, G key/value heads (query head
h reads key/value head h // (H // G)), D hidden_size, V vocabulary, d_qk and d_v the widths of a head in attention.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

FORMAT = "spa_dist.export/1"
_NORMS: dict[str, Callable[..., nn.Module]] = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}

_SIZES = (
    "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "query_key_width", "value_dim",
    "ffn_hidden_size", "sequence_length",
)  # fmt: skip

_MAX_CONFIG_BYTES, _MAX_LAYERS, _MAX_ENTRIES = 1 << 28, 1 << 12, 1 << 44  # beyond any model: a damaged file costs no time

_TYPES: dict[str, Any] = {str(int): int, str(float): (float, int), str(str): str, str(bool): bool}


@dataclass(frozen=True)
class PlainConfig:
    """The architecture: the fields of `config.json` that the model reads. Widths of attention are per head."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of the query and key weights: d_k where S is kept, query_key_width where it is folded or absent."""
    query_key_width: int
    """d_qk, the width at which queries meet keys: d_k′ for Sparse Projection Attention."""
    value_dim: int
    ffn_hidden_size: int
    sequence_length: int
    """Tokens per training sequence. Learned positions end here; other positions go on, at falling quality."""
    positions: str
    rope_theta: float
    tie_embeddings: bool
    norm: str
    norm_eps: float
    bias: bool
    qk_norm: bool
    logit_scale: float
    """The factor on query-key products. No kernel's default, which follows the width, is right for a projected width."""
    num_projections: int = 0
    """Projections S kept per layer: 0 where folded or absent, 1 shared by all heads, or one for each key/value head."""
    eos_id: int | None = None

    def __post_init__(self) -> None:
        for message in self._faults():
            raise ValueError(f"config.json: {message}")

    def _faults(self) -> Iterator[str]:
        for field in fields(self):
            value, kind = getattr(self, field.name), field.type
            wanted = _TYPES.get(str(kind), (int, type(None)))
            if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
                yield f"{field.name} has a value of the wrong type: {value!r}"
        for name in (*_SIZES, "rope_theta", "norm_eps", "logit_scale"):
            if not 0 < getattr(self, name) < 2**31:
                yield f"{name}={getattr(self, name)} must be above 0, and finite"
        if self.num_layers > _MAX_LAYERS:
            yield f"num_layers={self.num_layers} is more than {_MAX_LAYERS}"
        heads = self.num_heads * max(self.head_dim, self.value_dim)
        rows = max(self.vocab_size, self.sequence_length, self.ffn_hidden_size, heads)
        entries = max(self.hidden_size * rows, self.num_kv_heads * self.head_dim * self.query_key_width)
        if entries > _MAX_ENTRIES:
            yield f"its sizes make a matrix of {entries} entries, and the largest that is read has {_MAX_ENTRIES}"
        if self.positions not in ("rope", "learned", "none") or self.norm not in _NORMS:
            yield f"positions={self.positions!r} or norm={self.norm!r} is unknown"
        if self.num_heads % self.num_kv_heads:
            yield f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
        if self.num_projections not in (0, 1, self.num_kv_heads):
            yield f"num_projections={self.num_projections} must be 0, 1 or num_kv_heads={self.num_kv_heads}"
        if not self.num_projections and self.head_dim != self.query_key_width:
            yield f"head_dim={self.head_dim} is not query_key_width={self.query_key_width}, and num_projections is 0"
        if self.positions == "rope" and self.query_key_width % 2:
            yield f"rope turns pairs of features: query_key_width={self.query_key_width} must be even"

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> "PlainConfig":
        """The config in a `config.json`'s object; entries for other readers are passed over. Raises ValueError."""
        missing = [field.name for field in fields(cls) if field.default is MISSING and field.name not in tree]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}: it is not one of {FORMAT}")
        return cls(**{field.name: tree[field.name] for field in fields(cls) if field.name in tree})


class Cache(Protocol):
    """Keys and values of the tokens so far. `KVCache` is one; so is transformers' DynamicCache."""

    def get_seq_length(self) -> int:
        """Tokens stored."""

    def update(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Append one layer's k [B, G, N, d_qk] and v [B, G, N, d_v]; return all of them, [B, G, M, …]."""


class KVCache:
    """Room for `capacity` tokens: d_qk + d_v numbers per layer, key/value head and token. ValueError where memory ends."""

    def __init__(self, config: PlainConfig, batch: int, capacity: int, like: Tensor) -> None:
        shape = (config.num_layers, batch, config.num_kv_heads, capacity)
        try:
            self.keys = like.new_empty(*shape, config.query_key_width)
            self.values = like.new_empty(*shape, config.value_dim)
        except RuntimeError:
            raise ValueError(f"no memory for a cache of {batch} × {capacity} tokens: ask for fewer new ones") from None
        self.lengths = [0] * config.num_layers

    def get_seq_length(self) -> int:
        return self.lengths[0]

    def update(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        start, end = self.lengths[layer], self.lengths[layer] + k.shape[2]
        self.keys[layer, :, :, start:end] = k
        self.values[layer, :, :, start:end] = v
        self.lengths[layer] = end
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class Attention(nn.Module):
    """Grouped-query attention: weights, then S where it is kept, then QK-norm, then RoPE on d_qk."""

    projection: Tensor | None

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        heads, kv_heads = config.num_heads, config.num_kv_heads
        self.heads, self.kv_heads, self.scale = heads, kv_heads, config.logit_scale
        self.query = nn.Linear(config.hidden_size, heads * config.head_dim, bias=config.bias)
        self.key = nn.Linear(config.hidden_size, kv_heads * config.head_dim, bias=config.bias)
        self.value = nn.Linear(config.hidden_size, kv_heads * config.value_dim, bias=config.bias)
        self.output = nn.Linear(heads * config.value_dim, config.hidden_size, bias=config.bias)
        shape = (config.num_projections, config.head_dim, config.query_key_width)
        self.register_buffer("projection", torch.zeros(shape) if config.num_projections else None)
        self.query_norm = nn.RMSNorm(config.query_key_width, eps=config.norm_eps) if config.qk_norm else None
        self.key_norm = nn.RMSNorm(config.query_key_width, eps=config.norm_eps) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        visible: Tensor | None,
        causal: bool,
        cache: Cache | None,
        layer: int,
    ) -> Tensor:
        """x [B, N, D] → [B, N, D]. visible: bool, broadcasts to [B, H, N, M]; rotation: cos, sin [B or 1, 1, N, d_qk/2]."""
        q = self._heads(self.query(x), self.heads, self.query_norm, rotation)
        k = self._heads(self.key(x), self.kv_heads, self.key_norm, rotation)
        v = self.value(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, layer)
        grouped = self.heads != self.kv_heads
        o_bhnv = F.scaled_dot_product_attention(q, k, v, visible, is_causal=causal, scale=self.scale, enable_gqa=grouped)
        return self.output(o_bhnv.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor, heads: int, norm: nn.Module | None, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x.unflatten(-1, (heads, -1))
        if self.projection is not None:
            grouped = x.unflatten(-2, (self.projection.shape[0], -1))
            x = torch.einsum("bnghk,gkp->bnghp", grouped, self.projection).flatten(2, 3)
        if norm is not None:
            x = norm(x)
        x = x.transpose(1, 2)
        return x if rotation is None else rotate(x, *rotation)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE: turn the pairs (x_i, x_{i+d/2}) of the last dimension by the angles of their position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Layer(nn.Module):
    """h += attention(norm1(h)); h += down(gelu(up(norm2(h))))."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        norm = _NORMS[config.norm]
        self.norm1 = norm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config)
        self.norm2 = norm(config.hidden_size, eps=config.norm_eps)
        up = nn.Linear(config.hidden_size, config.ffn_hidden_size, bias=config.bias)
        down = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=config.bias)
        self.mlp = nn.ModuleDict({"up": up, "down": down})

    def forward(self, h: Tensor, *attention: Any) -> Tensor:
        h = h + self.attention(self.norm1(h), *attention)
        return h + self.mlp["down"](F.gelu(self.mlp["up"](self.norm2(h))))


class PlainModel(nn.Module):
    """Token ids → logits over the vocabulary (without the padding it had in training)."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.sequence_length, config.hidden_size) if learned else None
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = _NORMS[config.norm](config.hidden_size, eps=config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        tokens: Tensor,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits of the next token.

        tokens: int [B, N], those after the cached ones. mask: [B, M], true for tokens and false for padding, which may
        stand on either side; default all true. positions: int [B, N]; default counts the unmasked tokens from 0. cache is
        appended to. Returns [B, N, V], or [B, 1, V] with last_only. Raises ValueError past the end of learned positions.
        """
        past = 0 if cache is None else cache.get_seq_length()
        if positions is None:
            positions = _positions(tokens, mask, past)
        h_bnd = self.embedding(tokens)
        if self.positions is not None:
            if int(positions.max()) >= self.config.sequence_length:
                raise ValueError(
                    f"the model has {self.config.sequence_length} learned positions: the sequence is too long for it"
                )
            h_bnd = h_bnd + F.embedding(positions, self.positions.weight)
        rotation = self._rotation(positions) if self.config.positions == "rope" else None
        visible = _visible(tokens, mask, past)
        for index, layer in enumerate(self.layers):
            h_bnd = layer(h_bnd, rotation, visible, visible is None and tokens.shape[1] > 1, cache, index)
        h_bnd = self.norm(h_bnd[:, -1:] if last_only else h_bnd)
        return F.linear(h_bnd, self.embedding.weight if self.head is None else self.head.weight)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of position · theta^(-2i/d_qk), from float64 angles; [B, 1, N, d_qk/2]."""
        width = self.config.query_key_width
        wide = torch.float32 if positions.device.type == "mps" else torch.float64
        exponents = torch.arange(0, width, 2, device=positions.device, dtype=wide) / width
        angles = positions[:, None, :, None].to(wide) * self.config.rope_theta**-exponents
        dtype = torch.promote_types(self.embedding.weight.dtype, torch.float32)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    @classmethod
    def from_folder(
        cls, folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> "PlainModel":
        """Load an export of any format, in its own dtype or the given one, ready for inference.

        Weights are read as data only (no pickle code runs), each name and shape must be exactly what the config says.
        Raises ValueError, in one line, for a folder that is missing, damaged or not an export.
        """
        folder = Path(folder)
        config = PlainConfig.from_dict(read_config(folder))
        with torch.device("meta"):
            model = cls(config)
        expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
        weights: dict[str, Tensor] = {}
        for name, tensor in _read_weights(folder):
            if expected.get(name) != tensor.shape or not tensor.is_floating_point():
                raise ValueError(
                    f"{folder}: weight {name!r} {list(tensor.shape)} does not belong to the model of config.json"
                )
            weights[name] = tensor.to(device, dtype or tensor.dtype)
        if weights.keys() != expected.keys():
            raise ValueError(f"{folder}: weights lack {', '.join(sorted(expected.keys() - weights.keys())[:3])}")
        model.load_state_dict(weights, strict=True, assign=True)
        return model.eval()


def _positions(tokens: Tensor, mask: Tensor | None, past: int) -> Tensor:
    """Positions [B or 1, N] that count tokens from 0, padding left out."""
    n = tokens.shape[1]
    if mask is None:
        return torch.arange(past, past + n, device=tokens.device)[None]
    return (mask.long().cumsum(1) - 1).clamp(min=0)[:, -n:]


def _visible(tokens: Tensor, mask: Tensor | None, past: int) -> Tensor | None:
    """Which keys a query sees, bool [B or 1, 1, N, M]; None where causality from an empty cache, or one query, says it."""
    n = tokens.shape[1]
    if mask is None and (past == 0 or n == 1):
        return None
    keys = torch.arange(past + n, device=tokens.device)
    queries = keys[past:, None]
    if mask is None:
        return (keys <= queries)[None, None]
    # Padding sees itself, so that no softmax is empty; nothing reads what comes of it.
    return ((keys <= queries) & mask.bool()[:, None, None, :]) | (keys == queries)


@torch.inference_mode()
def generate(
    model: PlainModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    use_cache: bool = True,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Continue each prompt; rows of unequal length are padded on the left and stay independent of each other.

    temperature 0 takes the likeliest token; above 0 a token is drawn from softmax(logits / temperature), cut to the top_k
    likeliest (0: all) and then to the smallest set with probability top_p. Row r draws from its own generator, seeded
    seed + r. on_token(row, token) is called for each new token as it comes. use_cache=False recomputes everything at each
    step. Returns the new tokens of each row, up to its end-of-text token (left out) or max_new_tokens. Quality falls past
    sequence_length with rope or no positions; learned positions end there. Raises ValueError, in one line, for arguments
    that do not fit.
    """
    longest = max(map(len, prompts), default=0)
    if not -(2**63) <= seed < 2**63 - len(prompts):
        raise ValueError(f"seed={seed} does not fit into 64 bits")
    _check_request(model.config, prompts, longest + max_new_tokens, max_new_tokens, temperature, top_k, top_p)
    device = model.embedding.weight.device
    tokens = torch.tensor([[0] * (longest - len(row)) + list(row) for row in prompts], device=device)
    padding = torch.tensor([longest - len(row) for row in prompts], device=device)
    generators = [Generator().manual_seed(seed + row) for row in range(len(prompts))]
    cache = KVCache(model.config, len(prompts), longest + max_new_tokens, model.embedding.weight) if use_cache else None
    ended = [False] * len(prompts)
    new: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_new_tokens):
        mask = torch.arange(tokens.shape[1], device=device) >= padding[:, None] if bool(padding.any()) else None
        past = cache.get_seq_length() if cache else 0
        logits_bv = model(tokens[:, past:], mask=mask, cache=cache, last_only=True)[:, -1].float()
        chosen = sample(logits_bv, temperature, top_k, top_p, generators)
        for row, token in enumerate(chosen.tolist()):
            ended[row] = ended[row] or token == model.config.eos_id
            if not ended[row]:
                new[row].append(token)
                if on_token:
                    on_token(row, token)
        if all(ended):
            break
        tokens = torch.cat((tokens, chosen[:, None]), dim=1)
    return new


def sample(logits_bv: Tensor, temperature: float, top_k: int, top_p: float, generators: Sequence[Generator]) -> Tensor:
    """One token for each row of fp32 logits [B, V]: [B]. Draws are made on the CPU: the same on any device."""
    if temperature == 0.0:
        return logits_bv.argmax(dim=-1)
    values_bv, order_bv = logits_bv.double().sort(dim=-1, descending=True, stable=True)
    # Differences to the likeliest, in float64: a temperature near 0 makes the others -inf and nothing NaN.
    probability_bv = ((values_bv - values_bv[:, :1]) / temperature).softmax(dim=-1)
    if top_k:
        probability_bv[:, top_k:] = 0.0
        probability_bv /= probability_bv.sum(dim=-1, keepdim=True)
    before_bv = probability_bv.cumsum(dim=-1) - probability_bv
    probability_bv[:, 1:] *= before_bv[:, 1:] < top_p  # the likeliest token always stays
    rows = zip(probability_bv.cpu(), generators)
    drawn_b1 = torch.stack([torch.multinomial(row, 1, generator=generator) for row, generator in rows])
    return order_bv.gather(1, drawn_b1.to(order_bv.device))[:, 0]


def _check_request(
    config: PlainConfig,
    prompts: Sequence[Sequence[int]],
    length: int,
    new: int,
    temperature: float,
    top_k: int,
    top_p: float,
) -> None:
    if not prompts or not all(len(row) for row in prompts):
        raise ValueError("a prompt has no tokens: give each at least one (the end-of-text token starts a document)")
    if not all(0 <= token < config.vocab_size for row in prompts for token in row):
        raise ValueError(f"a prompt has a token outside the vocabulary of {config.vocab_size}: is it another tokenizer's?")
    if new < 1 or not 0.0 <= temperature < float("inf") or top_k < 0 or not 0.0 < top_p <= 1.0:
        raise ValueError(
            "max_new_tokens must be at least 1, temperature finite and at least 0, top_k at least 0, top_p in (0, 1]"
        )
    if config.positions == "learned" and length > config.sequence_length:
        raise ValueError(
            f"prompt and max_new_tokens make {length} tokens, and the model has {config.sequence_length} learned positions: "
            "shorten one of them"
        )


def read_config(folder: Path) -> dict[str, Any]:
    """The object in an export's `config.json`. Raises ValueError."""
    path = folder / "config.json"
    try:
        if path.exists() and not (path.is_file() and path.stat().st_size <= _MAX_CONFIG_BYTES):
            raise ValueError("it is no file of JSON")
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{folder} is not an export: its config.json cannot be read ({error})") from None
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise ValueError(f"{folder}/config.json is not one of an export of format {FORMAT}")
    return tree


def _read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of each weight; tensors are mapped from the file, not copied, where the format allows it."""
    try:
        if (folder / "model.pt").is_file():
            state = torch.load(folder / "model.pt", map_location="cpu", weights_only=True, mmap=True)
            if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
                raise ValueError("it does not hold a state dict")
            yield from state.items()
            return
        from safetensors import safe_open

        for name in _safetensors_files(folder):
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  (not a dict)
                    yield key.removeprefix("model."), file.get_tensor(key)
    except ImportError:
        raise ValueError(f"{folder} holds safetensors: install the package safetensors to read it") from None
    except Exception as error:
        raise ValueError(f"{folder}: the weights cannot be read: {' '.join(str(error).split())[:300]}") from None


def _safetensors_files(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{index.name} names a file outside the folder: {name!r}")
    return names
