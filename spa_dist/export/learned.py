"""What was learned beside the weights: masks of S and gates of heads, as they go into an export."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from spa_dist.attention.masks import MaskMethod
from spa_dist.config import AttentionConfig
from spa_dist.export.manifest import Manifest

Read = Callable[[str], Tensor]
_PROJECTION = ".attention.projection"


@dataclass(frozen=True)
class LearnedParts:
    """How a trained model's S and queries are put together."""

    method: MaskMethod | None
    """How the mask of S was trained; None for a fixed pattern, whose S is stored as it is."""
    gate: bool
    """Whether each head has a temperature."""

    def projection(self, name: str, read: Read) -> Tensor:
        """S of a layer, with its deterministic mask, float64."""
        if self.method is None:
            return read(name).double()
        return self.method.final_projection({key: read(f"{name}.{key}").double() for key in self.method.tensor_names})

    def trained_shapes(self, plain: dict[str, tuple[int, ...]], num_heads: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the trained model's tensors, from those of the plain model that keeps S."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in plain.items():
            if name.endswith(_PROJECTION) and self.method is not None:
                shapes |= {f"{name}.{key}": shape for key in self.method.tensor_names}
            else:
                shapes[name] = shape
            if self.gate and name.endswith(".attention.query.weight"):
                shapes[name.replace("query.weight", "gate")] = (num_heads,)
        return shapes


FIXED = LearnedParts(None, gate=False)


def learned_parts(manifest: Manifest) -> LearnedParts:
    """From the config in the manifest, which must be one that `plain_config` accepts."""
    attention = AttentionConfig.model_validate(manifest.config["attention"])
    if not attention.learns_mask:
        return LearnedParts(None, bool(attention.gate))
    assert attention.mask
    constants = attention.mask.l0.model_dump() if attention.mask.l0 else {}
    return LearnedParts(MaskMethod(attention.mask.method, **constants), bool(attention.gate))
