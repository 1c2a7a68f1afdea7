"""Loss and perplexities against float64 sums written out, and the same numbers for an export and its checkpoint."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.dataset import open_dataset
from spa_dist.export.checkpoint import open_checkpoint
from spa_dist.export.convert import load_plain_model
from spa_dist.export.evaluate import perplexities, total_loss
from spa_dist.export.write import ExportOptions, write_export
from tests.distributed import ROOT
from tests.export.reference import reference_logits
from tests.export.synthetic_run import facts, make_run
from tests.synthetic import write_dataset


def test_loss_is_the_sum_over_valid_targets(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    rng = np.random.default_rng(0)
    batches = [(rng.integers(0, 61, (3, 6)), rng.integers(0, 61, (3, 6))) for _ in range(2)]
    batches[1][1][1:, 2:] = -100
    expected, count = 0.0, 0
    for inputs, targets in batches:
        for row, wanted in zip(inputs.tolist(), targets.tolist()):
            logits = reference_logits(run.config, run.tensors, row).tolist()
            for scores, target in zip(logits, wanted):
                if target != -100:
                    expected += math.log(sum(math.exp(score) for score in scores)) - scores[target]
                    count += 1
    total, tokens = total_loss(load_plain_model(open_checkpoint(run.folder)), batches)
    assert tokens == count == 18 + 10
    assert total == pytest.approx(expected, rel=1e-6)
    result = perplexities(total, tokens, 10)
    assert result["token_perplexity"] == pytest.approx(math.exp(expected / 28), rel=1e-5)
    assert result["word_perplexity"] == pytest.approx(math.exp(expected / 10), rel=1e-5)


def test_commands_take_exports_and_checkpoints(tmp_path: Path) -> None:
    dataset = open_dataset(write_dataset(tmp_path / "data"))
    run = make_run(tmp_path / "run", {"model.vocab_size": dataset.vocab_size}, tensor=2, data=2)
    (run.folder / "tokenizer.model").write_bytes(dataset.tokenizer_path.read_bytes())
    tree = run.manifest()
    tree["tokenizer"] |= {"sha256": facts(dataset.tokenizer_path)["sha256"], "vocab_size": dataset.vocab_size}
    run.change_manifest(tree)
    write_export(open_checkpoint(run.folder), tmp_path / "export", ExportOptions("safetensors"))
    results = []
    for model in (run.folder, tmp_path / "export"):
        numbers = tmp_path / f"{model.name}.json"
        options = ["--data", str(dataset.path), "--sequences", "20", "--batch-size", "3", "--json", str(numbers)]
        done = command("launch/evaluate.py", "--model", str(model), *options)
        assert done.returncode == 0, done.stderr
        results.append(json.loads(numbers.read_text()))
        done = command("launch/generate.py", "--model", str(model), "--prompt", "the cat", "--max-new-tokens", "4")
        assert done.returncode == 0 and done.stdout.startswith("the cat"), done.stderr
    assert results[0] == results[1] and results[0]["tokens"] > 0
    done = command("launch/evaluate.py", "--model", str(run.folder), *options[:-1], str(tmp_path / "none" / "x.json"))
    assert done.returncode == 2 and "x.json cannot be written" in done.stderr
    (tmp_path / "data" / "tokenizer.model").unlink()
    write_dataset(tmp_path / "other", vocab_size=330)
    done = command("launch/evaluate.py", "--model", str(run.folder), "--data", str(tmp_path / "other"))
    assert done.returncode == 2 and "another tokenizer" in done.stderr and len(done.stderr.splitlines()) == 1


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
