"""The config: every mistake is one line that names the dotted key and the way out; sizes multiply out."""

import json
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spa_dist.config import Config, config_from_dict, load_config, plan_batches
from spa_dist.config.deepspeed_keys import NESTED, OWNED, TOP_LEVEL
from spa_dist.config.load import CONFIG_FOLDER, dotted_keys
from spa_dist.errors import ConfigError
from spa_dist.training.schedule import learning_rate

SHIPPED = sorted(path.name for path in CONFIG_FOLDER.glob("*.json") if not path.name.startswith("sweep_"))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_load_and_round_trip(name: str) -> None:
    """A saved, resolved config means the same run."""
    config = load_config(name)
    assert config_from_dict(json.loads(config.model_dump_json())) == config
    assert plan_batches(config, 8).global_size == config.batch.global_size


def test_paper_sizes() -> None:
    """Small, base and large of the paper's experiments, and its headline widths."""
    sizes = {name: load_config(name).model for name in ("spa_small", "spa_base", "spa_large", "spa_headline")}
    shapes = {name: (model.num_layers, model.hidden_size, model.num_heads) for name, model in sizes.items()}
    assert (
        shapes["spa_small"] == (12, 512, 8) and shapes["spa_base"] == (12, 768, 12) and shapes["spa_large"] == (24, 1024, 16)
    )
    headline = load_config("spa_headline")
    assert (headline.model.head_dim, headline.model.value_dim, headline.attention.d_proj) == (512, 512, 64)


@settings(deadline=None, max_examples=150)
@given(st.sampled_from([name for name in dotted_keys() if name.count(".") == 1]), st.data())
def test_any_typo_is_an_error_with_a_name(dotted: str, data: st.DataObject) -> None:
    """One character of any key dropped, doubled or swapped: refused, and the right key is named."""
    section, key = dotted.split(".")
    place = data.draw(st.integers(0, len(key) - 1))
    wrong = data.draw(st.sampled_from([key[:place] + key[place + 1 :], key[:place] + key[place] + key[place:]]))
    assume(wrong not in Config.model_fields[section].annotation.model_fields and wrong)  # type: ignore[union-attr]
    with pytest.raises(ConfigError) as error:
        config_from_dict({"run": {"steps": 1}} | {section: {wrong: 1}})
    assert f"unknown key {section}.{wrong}" in str(error.value) and "\n" not in str(error.value)
    if len(key) > 4:
        assert key in str(error.value)


WRONG: list[tuple[list[str], str]] = [
    (["attention.pattern=randm"], "attention.pattern: 'randm' is not one of random,"),
    (["attention.d_proj=128"], "attention.d_proj=128 is larger than model.head_dim=64"),
    (["attention.scale=-1"], "attention.scale=-1"),
    (["attention.sparsity=1.0"], "attention.sparsity: "),
    (["attention.d_proj=31"], "attention.d_proj=31 is odd"),
    (["model.num_kv_heads=3"], "model.num_heads=4 is not a multiple of model.num_kv_heads=3"),
    (["parallel.tensor=8"], "model.num_heads=4 is not divisible by parallel.tensor=8"),
    (["parallel.pipeline=2"], "parallel.pipeline=2: pipeline parallelism is not supported"),
    (["run.tokens=5"], "give run.steps or run.tokens"),
    (["model.hidden_size=wide"], "model.hidden_size: "),
    (["deepspeed.zero_optimisation.stage=1"], "did you mean deepspeed.zero_optimization?"),
    (["deepspeed.zero_optimization.stag=1"], "did you mean deepspeed.zero_optimization.stage?"),
    (["deepspeed.zero_optimization.stage=4"], "deepspeed.zero_optimization.stage: 4 is not one of 0, 1, 2, 3"),
    (["deepspeed.train_batch_size=4"], "deepspeed.train_batch_size is set by batch.global_size"),
    (["deepspeed.fp16.enabled=true"], "say precision.dtype=fp16"),
    (["deepspeed.zero_optimization.reduce_bucket_size=auto"], "'auto' silently means"),
    (["steps=3"], "unknown key steps; did you mean run.steps?"),
    (["model"], "write section.key=value"),
    (["model.num_layers.x=1"], "is a value, not a section"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), WRONG)
def test_mistakes_are_named(overrides: list[str], message: str) -> None:
    """Each in one line."""
    with pytest.raises(ConfigError) as error:
        load_config("spa_tiny", overrides)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    """A name that is nearly right is suggested; what is not JSON is said."""
    with pytest.raises(ConfigError, match=r"did you mean spa_tiny\.json"):
        load_config("spa_tinny.json")
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    with pytest.raises(ConfigError, match=r"bad\.json is not JSON"):
        load_config(bad)
    bad.write_text("[1]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        load_config(bad)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 64), st.integers(1, 16) | st.none(), st.sampled_from([1, 2, 4]), st.integers(1, 4))
def test_batches_multiply_out(size: int, micro: int | None, tensor: int, data: int) -> None:
    """global = micro × data-parallel × accumulation exactly, or an error whose suggestion works."""
    changes = [f"batch.global_size={size}", f"parallel.tensor={tensor}"] + ([f"batch.micro_size={micro}"] if micro else [])
    config = load_config("spa_tiny", changes)
    try:
        plan = plan_batches(config, tensor * data)
    except ConfigError as error:
        assert "batch.global_size" in str(error)
        assert size % data or (size // data) % (micro or 1)
        return
    assert plan.micro_size * plan.data_parallel_size * plan.accumulation_steps == size
    assert plan.data_parallel_size == data and plan.tokens_per_step == size * config.model.sequence_length


def test_deepspeed_tables_are_those_of_the_installed_package() -> None:
    """No key of the tables is one that DeepSpeed does not know, at the top or inside."""
    models: dict[str, Any] = {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
    }
    for section, model in models.items():
        known = set(model.model_fields) | {field.alias for field in model.model_fields.values() if field.alias}
        assert set(NESTED[section]) <= known, section
    assert not set(OWNED) & set(TOP_LEVEL)


def test_learning_rate_is_the_papers_with_its_peak() -> None:
    """Linear to the peak at step 4000, then ∝ 1/√t; at its peak η_max itself."""
    schedule = load_config("spa_small").schedule
    rates = {step: learning_rate(step, 5e-4, schedule, 100_000) for step in (1, 2000, 4000, 16_000, 64_000)}
    assert rates == pytest.approx({1: 1.25e-7, 2000: 2.5e-4, 4000: 5e-4, 16_000: 2.5e-4, 64_000: 1.25e-4})
