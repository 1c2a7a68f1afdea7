"""From a checkpoint to the plain model's tensors: vocabulary padding removed, masks applied, gates and S folded in, tied weights once."""

from dataclasses import replace

import torch
from pydantic import ValidationError
from torch import Tensor

from spa_dist.attention import fold_gate, fold_projection, logit_scale, num_projections, query_key_width
from spa_dist.config import AttentionConfig, ModelConfig
from spa_dist.errors import CheckpointError
from spa_dist.export.checkpoint import Checkpoint
from spa_dist.export.learned import FIXED, LearnedParts, Read, learned_parts
from spa_dist.export.manifest import Manifest
from spa_dist.export.model import PlainConfig, PlainModel


def plain_config(manifest: Manifest) -> PlainConfig:
    """The plain model's config for a checkpoint, with S kept (`folded` gives the other form). Raises CheckpointError."""
    try:
        model = ModelConfig.model_validate(manifest.config["model"])
        attention = AttentionConfig.model_validate(manifest.config["attention"])
        assert model.vocab_size and model.num_kv_heads and model.head_dim and model.value_dim and model.ffn_hidden_size
        assert attention.d_proj
        width = query_key_width(attention.kind, model.head_dim, attention.d_proj)
        spa = attention.kind == "spa"
        config = PlainConfig(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            num_layers=model.num_layers,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim if spa else width,
            query_key_width=width,
            value_dim=model.value_dim,
            ffn_hidden_size=model.ffn_hidden_size,
            sequence_length=model.sequence_length,
            positions=model.positions,
            rope_theta=model.rope_theta,
            tie_embeddings=model.tie_embeddings,
            norm=model.norm,
            norm_eps=model.norm_eps,
            bias=model.bias,
            qk_norm=attention.qk_norm,
            logit_scale=logit_scale(attention.scale if spa else "paper", model.head_dim, width),
            num_projections=num_projections(attention.drawn_pattern, attention.per, model.num_kv_heads) if spa else 0,
            eos_id=manifest.tokenizer["eos_id"],
        )
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise CheckpointError(f"{manifest.folder}: the config in the manifest is damaged at {where}") from None
    except (KeyError, ValueError, AssertionError) as error:
        raise CheckpointError(f"{manifest.folder}: the config in the manifest does not make a model ({error})") from None
    _check_layout(manifest, config)
    return config


def folded(config: PlainConfig) -> PlainConfig:
    """The config of the same model with S multiplied into the query and key weights."""
    return replace(config, head_dim=config.query_key_width, num_projections=0)


def plain_shapes(config: PlainConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor of the plain model, in its order."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in PlainModel(config).state_dict().items()}


def plain_tensor(
    name: str,
    read: Read,
    kept: PlainConfig,
    *,
    fold: bool,
    dtype: torch.dtype = torch.float32,
    learned: LearnedParts = FIXED,
) -> Tensor:
    """Tensor `name` of the plain model, rounded to `dtype` once; it may be a view of a larger one.

    read gives a tensor of the trained model, whose config with S kept is `kept`; vocabulary padding is cut off here, masks are
    applied, and gates multiplied into the query weights whether S is folded or not.
    Raises CheckpointError for a weight that is beyond what `dtype` can hold.
    """
    prefix, _, _ = name.partition(".attention.")
    query = ".attention.query." in name
    folds = fold and kept.num_projections > 0 and (query or ".attention.key." in name)
    gate = read(f"{prefix}.attention.gate").double() if query and learned.gate else None
    if name.endswith(".attention.projection"):
        out = _rounded(learned.projection(name, read), dtype)
    elif folds or gate is not None:
        projection = learned.projection(f"{prefix}.attention.projection", read) if folds else None
        out = _by_head(read(name), kept.head_dim, gate, projection, dtype)
    else:
        tensor = read(name)
        out = (tensor[: kept.vocab_size] if name in ("embedding.weight", "head.weight") else tensor).to(dtype)
    if dtype == torch.float16 and bool(out.isinf().any()):
        raise CheckpointError(f"{name} has entries beyond 65504, the largest number in fp16: use bf16 or fp32")
    return out


def _by_head(weight: Tensor, head_dim: int, gate: Tensor | None, projection: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The gate and S multiplied in, in float64, one head at a time, so that no weight is ever held whole in float64."""
    heads = weight.shape[0] // head_dim
    width = head_dim if projection is None else projection.shape[2]
    out = weight.new_empty(heads * width, *weight.shape[1:], dtype=dtype)
    for head in range(heads):
        rows = weight[head * head_dim : (head + 1) * head_dim].double()
        if gate is not None:
            rows = fold_gate(rows, gate[head : head + 1])
        if projection is not None:
            rows = fold_projection(rows, projection[head // (heads // len(projection))][None])
        out[head * width : (head + 1) * width] = _rounded(rows, dtype)
    return out


def _rounded(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 → dtype, rounded once. torch goes to 16 bits by way of fp32, where a value just off a tie can become one."""
    near = exact.float()
    if dtype == torch.float32:
        return near
    # Rounding to odd on the way: an inexact fp32 value with its last bit set is no tie for a format two bits shorter.
    beyond = exact - near.double()
    other = torch.nextafter(near, (beyond.sign() * torch.inf).float())
    even = (near.view(torch.int32) & 1) == 0
    return torch.where((beyond != 0) & even, other, near).to(dtype)


def load_plain_model(checkpoint: Checkpoint, *, fold: bool = True) -> PlainModel:
    """The checkpoint as the plain model in memory, fp32, ready for inference."""
    kept = plain_config(checkpoint.manifest)
    config = folded(kept) if fold else kept
    with torch.device("meta"):
        model = PlainModel(config)
    learned = learned_parts(checkpoint.manifest)
    state = {name: plain_tensor(name, checkpoint.tensor, kept, fold=fold, learned=learned) for name in plain_shapes(config)}
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval()


def _check_layout(manifest: Manifest, config: PlainConfig) -> None:
    """The layout table must be the one that the config means: a second opinion on every shape."""
    expected = learned_parts(manifest).trained_shapes(plain_shapes(config), config.num_heads)
    for name in sorted(expected.keys() ^ manifest.layout.keys()):
        verb = "lacks" if name in expected else "has"
        raise CheckpointError(f"{manifest.folder}: the layout table {verb} {name}, unlike the config's model")
    for name, shape in expected.items():
        entry = manifest.layout[name]
        rows = entry.shape[0] if entry.kind == "vocabulary" and entry.shape[0] >= shape[0] else shape[0]
        if entry.shape != (rows, *shape[1:]):
            raise CheckpointError(
                f"{manifest.folder}: {name} has shape {list(entry.shape)}, the config's model {list(shape)}"
            )
