"""The tables of DeepSpeed's keys: what they leave out is left out on purpose, and what they refuse is refused."""

import re
from pathlib import Path
from typing import Any

import deepspeed
import pytest
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from pydantic import BaseModel

from spa_dist.config.deepspeed_keys import NESTED, OWNED, TOP_LEVEL, check_deepspeed_section
from spa_dist.errors import ConfigError

MODELS: dict[str, type[BaseModel]] = {
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
}
LEFT_OUT = {
    "zero_optimization": {
        "cpu_offload": "deprecated: offload_optimizer",
        "cpu_offload_param": "deprecated: offload_param",
        "cpu_offload_use_pin_memory": "deprecated: offload_*.pin_memory",
        "stage3_gather_fp16_weights_on_model_save": "deprecated: the name with 16bit",
        "legacy_stage1": "another implementation of stage 1",
        "pipeline_loading_checkpoint": "of pipeline parallelism",
        "override_module_apply": "of model construction under zero.Init",
        "compute_grad_norm": "clipping needs the norm",
        "zenflow": "another optimizer loop",
        "leaf_module": "of mixtures of experts",
        "save_muon_momentum_buffer_in_memory": "of the Muon optimizer",
    },
    "zero_optimization.offload_optimizer": {
        "super_offload": "another optimizer loop",
        "cpuadam_cores_perc": "of super_offload",
    },
    "zero_optimization.offload_param": {},
    "fp16": {
        "enabled": "precision.dtype says it",
        "auto_cast": "the model's inputs are token ids",
        "fp16_master_weights_and_grads": "master weights are fp32",
    },
    "bf16": {
        "enabled": "precision.dtype says it",
        "bf16_master_weights_and_grads": "master weights are fp32",
        "bf16_optimizer_states": "optimizer state is fp32",
    },
}
"""Keys of the installed DeepSpeed that the config does not take, and why."""


def nested(dotted: str, value: Any) -> dict[str, Any]:
    """`{"a": {"b": value}}` for "a.b"."""
    for part in reversed(dotted.split(".")):
        value = {part: value}
    return value


@pytest.mark.parametrize("section", MODELS)
def test_tables_hold_each_field_but_those_left_out(section: str) -> None:
    """A new release's new fields show up here."""
    fields = MODELS[section].model_fields.items()
    known = {name for name, _ in fields} | {field.alias for _, field in fields if field.alias}
    assert set(NESTED[section]) == known - set(LEFT_OUT[section])
    assert set(LEFT_OUT[section]) <= known
    assert len(NESTED[section]) == len(set(NESTED[section]))


def test_top_level_keys_are_deepspeeds() -> None:
    """Each is written as a string in DeepSpeed's own sources."""
    sources = Path(deepspeed.__file__).parent.rglob("*.py")
    written = set(re.findall(r"""["']([a-z0-9_]+)["']""", "\n".join(path.read_text(encoding="utf-8") for path in sources)))
    assert set(TOP_LEVEL) | set(OWNED) <= written


@pytest.mark.parametrize("key", OWNED)
def test_owned_keys_are_refused(key: str) -> None:
    """Each says where the config says it."""
    with pytest.raises(ConfigError) as error:
        check_deepspeed_section({key: 1})
    assert str(error.value) == f"deepspeed.{key} is set by {OWNED[key]}: say it there"


@pytest.mark.parametrize(
    "dotted", ["communication_data_type", *(f"{section}.{keys[-1]}" for section, keys in NESTED.items()), "aio.block_size"]
)
def test_auto_is_refused_at_each_depth(dotted: str) -> None:
    """DeepSpeed would read its default."""
    with pytest.raises(ConfigError) as error:
        check_deepspeed_section(nested(dotted, "auto"))
    assert str(error.value).startswith(f"deepspeed.{dotted}: 'auto' silently means")


@pytest.mark.parametrize("section", NESTED)
def test_sections_are_objects_of_known_keys(section: str) -> None:
    """Each known key passes, a letter less is refused with its name, and a value is no section."""
    for key in NESTED[section]:
        check_deepspeed_section(nested(f"{section}.{key}", {} if f"{section}.{key}" in NESTED else 1))
        with pytest.raises(ConfigError) as error:
            check_deepspeed_section(nested(f"{section}.{key}x", 1))
        assert str(error.value).startswith(
            f"unknown key deepspeed.{section}.{key}x; did you mean deepspeed.{section}.{key}?"
        )
    with pytest.raises(ConfigError, match=rf"^deepspeed\.{section} must be an object, not 3$"):
        check_deepspeed_section(nested(section, 3))


@pytest.mark.parametrize("stage", [4, -1, "1", True, 1.5, None])
def test_stage_is_one_of_four(stage: Any) -> None:
    """Neither a word nor a truth value."""
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage: .* is not one of 0, 1, 2, 3"):
        check_deepspeed_section({"zero_optimization": {"stage": stage}})
