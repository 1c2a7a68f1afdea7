"""The model card: what a person who finds the folder wants to know."""

import math
from typing import Any

from spa_dist.export.convert import plain_shapes
from spa_dist.export.manifest import Manifest
from spa_dist.export.model import PlainConfig

_CARD = """# {name}

A causal language model with {attention}, trained with spa_dist {version}.

| | |
|---|---|
| parameters | {parameters:,} |
| layers × width | {c.num_layers} × {c.hidden_size} |
| heads (query / key-value) | {c.num_heads} / {c.num_kv_heads} |
| query–key width, value width | {c.query_key_width}, {c.value_dim} |
| cache | {cache:,} numbers per token |
| vocabulary | {c.vocab_size:,} |
| sequence length | {c.sequence_length:,} tokens ({c.positions} positions) |
| training | {step:,} steps, {tokens:,} tokens, seed {seed}, {dtype}, data {data} |
| validation loss | {loss} |
| projection S | {projection} |

{usage}

On the command line: `python launch/generate.py --model DIR --prompt "…"`. The text it was trained on decides what it is fit
for; it was not tuned to follow instructions or to be safe.
"""
_PLAIN_USAGE = """```python
from spa_dist.export.model import PlainModel, generate   # the file needs torch alone and can be copied
model = PlainModel.from_folder("DIR")
```"""
_HUGGING_FACE_USAGE = """```python
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("DIR", trust_remote_code=True)
```

`tokenizer.model` is a sentencepiece model; a document starts with its end-of-sentence piece."""


def model_card(manifest: Manifest, config: PlainConfig, file_format: str) -> str:
    """Markdown with the facts of the run and of the export."""
    attention = manifest.config["attention"]
    kind = {
        "spa": f"Sparse Projection Attention ({_projection(attention)})",
        "thin": "attention whose queries and keys are narrow (thin)",
        "dense": "dense attention",
    }[attention["kind"]]
    loss = _entry(manifest.tree, "state", "validation_loss", None)
    kept = "kept beside the weights" if config.num_projections else "folded into the query and key weights"
    return _CARD.format(
        name=_entry(manifest.config, "run", "name"),
        attention=kind,
        version=_entry(manifest.tree, "versions", "spa_dist"),
        parameters=sum(math.prod(shape) for shape in plain_shapes(config).values()),
        c=config,
        cache=config.num_layers * config.num_kv_heads * (config.query_key_width + config.value_dim),
        step=manifest.step,
        tokens=manifest.tokens,
        seed=_entry(manifest.config, "run", "seed"),
        dtype=_entry(manifest.config, "precision", "dtype"),
        data=_entry(manifest.config, "data", "path"),
        loss=f"{loss:.4f} nats per token" if isinstance(loss, float) else "not measured",
        projection=kept if attention["kind"] == "spa" else "none",
        usage=_HUGGING_FACE_USAGE if file_format == "huggingface" else _PLAIN_USAGE,
    )


def _projection(attention: dict[str, Any]) -> str:
    mask = attention.get("mask")
    if attention.get("pattern") not in ("learned", "adaptive") or not isinstance(mask, dict):
        return f"{attention.get('pattern')}, sparsity {attention.get('sparsity')}"
    return f"{attention.get('pattern')}, mask by {mask.get('method')}"


def _entry(tree: dict[str, Any], section: str, key: str, default: Any = "unknown") -> Any:
    """tree[section][key], or the default: these facts are for people, and a checkpoint without one still converts."""
    found = tree.get(section)
    return found.get(key, default) if isinstance(found, dict) else default
