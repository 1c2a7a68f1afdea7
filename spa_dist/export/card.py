"""The model card: what a person who finds the folder wants to know."""

from spa_dist.export.manifest import Manifest
from spa_dist.export.model import PlainConfig

_CARD = """# {name}

A causal language model with {attention}, trained with spa_dist {version}.

| | |
|---|---|
| layers × width | {layers} × {hidden} |
| heads (query / key-value) | {heads} / {kv_heads} |
| query–key width, value width | {qk}, {v} |
| vocabulary | {vocab:,} |
| training | {step:,} steps, {tokens:,} tokens, seed {seed}, {dtype} |
| validation loss | {loss} |

```python
from spa_dist.export.model import PlainModel, generate   # the file needs torch alone and can be copied
model = PlainModel.from_folder(".")
```

or `python launch/generate.py --model DIR --prompt "…"`. The text it was trained on decides what it is fit for; it was not
tuned to follow instructions or to be safe.
"""


def model_card(manifest: Manifest, config: PlainConfig) -> str:
    """Markdown with the run's facts."""
    tree = manifest.config
    attention = tree["attention"]
    kind = {
        "spa": f"Sparse Projection Attention ({attention['pattern']}, sparsity {attention['sparsity']})",
        "thin": "attention whose queries and keys are narrow (thin)",
        "dense": "dense attention",
    }[attention["kind"]]
    loss = manifest.tree.get("state", {}).get("validation_loss")
    return _CARD.format(
        name=tree["run"]["name"],
        attention=kind,
        version=manifest.tree.get("versions", {}).get("spa_dist", "?"),
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        qk=config.query_key_width,
        v=config.value_dim,
        vocab=config.vocab_size,
        step=manifest.step,
        tokens=manifest.tokens,
        seed=tree["run"]["seed"],
        dtype=tree["precision"]["dtype"],
        loss="not measured" if loss is None else f"{loss:.4f} nats per token",
    )
