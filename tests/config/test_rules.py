"""Rules between keys, at their borders; options that do nothing are named."""

import logging

import pytest

from spa_dist.config import load_config
from spa_dist.errors import ConfigError

BROKEN = [
    (["optimizer.betas=[0.9,1.0]"], "optimizer.betas=[0.9, 1.0]: each must be in [0, 1)"),
    (["model.head_dim=63", "attention.kind=dense"], "model.head_dim=63 is odd"),
    (["attention.d_proj=33", "attention.kind=thin"], "attention.d_proj=33 is odd"),
    (["attention.d_proj=66", "attention.kind=thin"], "attention.d_proj=66 is larger than model.head_dim=64"),
    (["attention.scale=0"], "attention.scale=0"),
    (["attention.block=[0,4]", "attention.pattern=block"], "attention.block=[0, 4]"),
    (["model.num_kv_heads=1", "parallel.tensor=2"], "model.num_kv_heads=1 is not divisible by parallel.tensor=2"),
    (["model.ffn_hidden_size=511", "parallel.tensor=2"], "model.ffn_hidden_size=511 is not divisible by parallel.tensor=2"),
    (["model.vocab_multiple=1", "parallel.tensor=2"], "model.vocab_multiple=1 is not divisible by parallel.tensor=2"),
    (
        ["model.sequence_length=255", "parallel.tensor=2", "parallel.sequence=true"],
        "model.sequence_length=255 is not divisible by parallel.tensor=2, which parallel.sequence needs",
    ),
    (["model.hidden_size=126", "model.head_dim=null"], "model.hidden_size=126 is not a multiple of model.num_heads=4"),
    (["run.steps=null"], "give run.steps or run.tokens"),
]


@pytest.mark.parametrize(("overrides", "message"), BROKEN)
def test_broken_rules_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("spa_tiny", overrides)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["attention.d_proj=64"],
        ["attention.d_proj=128", "attention.kind=dense"],
        ["attention.d_proj=33", "model.positions=learned"],
        ["model.sequence_length=255", "parallel.tensor=2"],
        ["model.num_kv_heads=2", "parallel.tensor=2"],
        ["run.steps=null", "run.tokens=1000"],
        ["optimizer.betas=[0.0,0.999]"],
    ],
)
def test_what_just_fits_passes(overrides: list[str]) -> None:
    load_config("spa_tiny", overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["attention.bandwidth=8"], "attention.bandwidth has no effect: only pattern 'banded'"),
        (["attention.kind=dense", "attention.scale=unbiased"], "attention.scale has no effect: attention.kind is 'dense'"),
        (["parallel.sequence=true"], "parallel.sequence has no effect: parallel.tensor is 1"),
        (["schedule.name=constant"], "schedule.warmup_steps has no effect: schedule.name is 'constant'"),
    ],
)
def test_options_without_effect_are_warned_of(overrides: list[str], message: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="spa_dist"):
        load_config("spa_tiny", overrides)
    assert [record.getMessage()[: len(message)] for record in caplog.records] == [message]


def test_shipped_options_all_have_an_effect(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="spa_dist"):
        for name in ("spa_tiny", "spa_small", "spa_base", "spa_large", "spa_headline"):
            load_config(name)
    assert caplog.records == []
