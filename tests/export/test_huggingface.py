"""The export as transformers loads it: the same logits, the same greedy text, its cache, and a round trip."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spa_dist.export.checkpoint import open_checkpoint
from spa_dist.export.write import ExportOptions, write_export
from tests.distributed import ROOT
from tests.export.synthetic_run import make_run

pytest.importorskip("transformers", reason="an optional dependency: pip install .[hf]")

PROGRAM = """
import sys, torch
from transformers import AutoModelForCausalLM
from spa_dist.export.model import PlainModel, generate
folder, again = sys.argv[1:]
theirs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
ours = PlainModel.from_folder(folder)
tokens = torch.randint(2, 61, (2, 7), generator=torch.Generator().manual_seed(3))
whole = torch.ones_like(tokens)
assert torch.equal(theirs(tokens).logits, ours(tokens))

def continued(model, ids, mask, **options):
    out = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, **options)[:, ids.shape[1]:].tolist()
    return [row[: row.index(1)] if 1 in row else row for row in out]

expected = generate(ours, tokens.tolist(), max_new_tokens=20)
assert any(len(row) > 3 for row in expected)
assert continued(theirs, tokens, whole) == expected
assert continued(theirs, tokens, whole, use_cache=False) == expected
padded = whole.clone()
padded[0, :3] = 0
rows = [tokens[0, 3:].tolist(), tokens[1].tolist()]
assert continued(theirs, tokens, padded) == generate(ours, rows, max_new_tokens=20)

outputs = theirs(tokens, use_cache=True)
cache = outputs["cache"] if "cache" in outputs else outputs["past_key_values"]
assert [tuple(t.shape) for t in (cache.layers[0].keys, cache.layers[0].values)] == [(2, 4, 7, 4), (2, 4, 7, 6)]
loss = theirs(tokens, labels=tokens).loss
assert torch.allclose(loss, -ours(tokens)[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None]).mean())

theirs.save_pretrained(again)
back = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True, attn_implementation="sdpa").eval()
assert torch.equal(back(tokens).logits, theirs(tokens).logits)
assert torch.equal(PlainModel.from_folder(again)(tokens), ours(tokens))
print("all equal")
"""


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_transformers_agrees(tmp_path: Path, fold: bool, positions: str) -> None:
    tied = positions == "rope"
    run = make_run(tmp_path / "run", {"model.positions": positions, "model.tie_embeddings": tied}, tensor=2)
    options = ExportOptions("huggingface", fold=fold, max_shard_bytes=10_000)
    write_export(open_checkpoint(run.folder), tmp_path / "export", options)
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "export"), str(tmp_path / "again")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.endswith("all equal\n"), done.stderr[-2000:]
