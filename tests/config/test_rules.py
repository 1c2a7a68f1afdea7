"""Rules between keys, at their borders; options that do nothing are named."""

import logging

import pytest

from spa_dist.config import load_config
from spa_dist.errors import ConfigError

LEARNED = ["attention.pattern=learned"]
PRUNED = [*LEARNED, "attention.mask.method=magnitude", "attention.mask.magnitude={}"]
GUMBEL = [*LEARNED, "attention.mask.method=gumbel", "attention.mask.gumbel={}"]
BROKEN = [
    (["optimizer.betas=[0.9,1.0]"], "optimizer.betas=[0.9, 1.0]: each must be in [0, 1)"),
    (["model.head_dim=63", "attention.kind=dense"], "model.head_dim=63 is odd"),
    (["attention.d_proj=33", "attention.kind=thin"], "attention.d_proj=33 is odd"),
    (["attention.d_proj=66", "attention.kind=thin"], "attention.d_proj=66 is larger than model.head_dim=64"),
    (["attention.scale=0"], "attention.scale=0"),
    (["attention.lr_scale=0"], "attention.lr_scale=0.0 must be above 0, or 'matched'"),
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
    (["attention.pattern=learned"], "attention.pattern='learned' needs attention.mask: set attention.mask.method"),
    (
        [*LEARNED, "attention.mask.method=gumbel"],
        "attention.mask.method='gumbel' without its section: add attention.mask.gumbel",
    ),
    ([*LEARNED, "attention.mask.method=l0"], "attention.mask.method='l0' without its section: add attention.mask.l0"),
    (
        [*PRUNED, "attention.mask.magnitude.first_step=50", "attention.mask.magnitude.last_step=50"],
        "attention.mask.magnitude.last_step=50 is not after first_step=50: the schedule would end before it starts",
    ),
    (
        [*GUMBEL, "attention.mask.gumbel.first_step=9", "attention.mask.gumbel.last_step=5"],
        "attention.mask.gumbel.last_step=5 is not after first_step=9: the schedule would end before it starts",
    ),
    ([*GUMBEL, "attention.mask.gumbel.temperature=0"], "attention.mask.gumbel.temperature: input should be greater than 0"),
    (
        [*GUMBEL, "attention.mask.gumbel.final_temperature=-1"],
        "attention.mask.gumbel.final_temperature: input should be greater",
    ),
    ([*GUMBEL, "attention.mask.l0_lambda=-1e-5"], "attention.mask.l0_lambda: input should be greater than or equal to 0"),
    ([*PRUNED, "attention.mask.start_sparsity=1.0"], "attention.mask.start_sparsity: input should be less than 1"),
    ([*PRUNED, "attention.sparsity=1.0"], "attention.sparsity: input should be less than 1"),
    (
        [*PRUNED, "attention.mask.guard.min_density=0.5", "attention.mask.guard.max_density=0.4"],
        "attention.mask.guard.min_density=0.5 is above max_density=0.4",
    ),
    (["attention.gate=true", "attention.qk_norm=true"], "attention.gate (pattern 'adaptive' has it) cannot be had with"),
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
        (
            ["attention.kind=thin", "attention.lr_scale=matched"],
            "attention.lr_scale='matched' has no effect: attention.kind is 'thin'",
        ),
        (["parallel.sequence=true"], "parallel.sequence has no effect: parallel.tensor is 1"),
        (["attention.mask.method=none"], "attention.mask has no effect: only patterns 'learned' and 'adaptive'"),
        ([*PRUNED, "attention.mask.gumbel={}"], "attention.mask.gumbel has no effect: attention.mask.method is 'magnitude'"),
        (
            [*PRUNED, "attention.mask.l0_lambda=0.1"],
            "attention.mask.l0_lambda has no effect: method 'magnitude' has no gates",
        ),
        ([*GUMBEL, "attention.trainable=true"], "attention.trainable has no effect: pattern 'learned' is trained anyway"),
        ([*GUMBEL, "attention.sparsity=0.9"], "attention.sparsity has no effect: method 'gumbel' finds its own"),
        (
            [*PRUNED, "attention.mask.magnitude.last_step=100000"],
            "attention.mask.magnitude.last_step=100000 is beyond the run's",
        ),
        (["schedule.name=constant"], "schedule.warmup_steps has no effect: schedule.name is 'constant'"),
    ],
)
def test_options_without_effect_are_warned_of(overrides: list[str], message: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="spa_dist"):
        load_config("spa_tiny", overrides)
    assert [record.getMessage()[: len(message)] for record in caplog.records] == [message]


def test_shipped_options_all_have_an_effect(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="spa_dist"):
        for name in ("spa_tiny", "spa_small", "spa_base", "spa_large", "spa_headline", "spa_learned", "spa_adaptive"):
            load_config(name)
    assert caplog.records == []
