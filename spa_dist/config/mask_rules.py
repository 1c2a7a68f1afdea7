"""Cross-field rules of `attention.mask`."""

from collections.abc import Iterator

from spa_dist.config.batch import total_steps
from spa_dist.config.mask import MaskConfig
from spa_dist.config.schema import Config

_SECTIONS = {
    "gumbel": "temperature 1.0 → 0.1, geometric",
    "l0": "hard concrete with beta 2/3",
    "magnitude": "cubic over three quarters of the run, no regrowth",
}


def mask_rules(config: Config) -> Iterator[str]:
    """One line for each rule of mask training that the config breaks."""
    attention, mask = config.attention, config.attention.mask
    if attention.learns_mask and mask is None:
        yield (
            f"attention.pattern={attention.pattern!r} needs attention.mask: set attention.mask.method to gumbel, l0, magnitude "
            "or none, and give that method's section"
        )
    if mask is None:
        return
    if mask.method in _SECTIONS and getattr(mask, mask.method) is None:
        yield (
            f"attention.mask.method={mask.method!r} without its section: add attention.mask.{mask.method}, "
            f"{{}} for its defaults ({_SECTIONS[mask.method]})"
        )
    for name in ("magnitude", "gumbel"):
        section = getattr(mask, name)
        if section is not None and section.last_step is not None and section.last_step <= section.first_step:
            yield (
                f"attention.mask.{name}.last_step={section.last_step} is not after first_step={section.first_step}: "
                "the schedule would end before it starts"
            )
    if mask.guard.min_density > mask.guard.max_density:
        yield (
            f"attention.mask.guard.min_density={mask.guard.min_density} is above max_density={mask.guard.max_density}: "
            "no S can satisfy both"
        )


def idle_mask_options(config: Config) -> Iterator[str]:
    """One line for each option of mask training that was set and does nothing in this run."""
    attention, mask = config.attention, config.attention.mask
    if attention.learns_mask and "trainable" in attention.model_fields_set and attention.trainable:
        yield f"attention.trainable has no effect: pattern {attention.pattern!r} is trained anyway"
    if mask is None:
        return
    if not attention.learns_mask:
        yield "attention.mask has no effect: only patterns 'learned' and 'adaptive' of kind 'spa' read it"
        return
    for name in _SECTIONS:
        if name != mask.method and getattr(mask, name) is not None:
            yield f"attention.mask.{name} has no effect: attention.mask.method is {mask.method!r}"
    yield from _idle_numbers(config, mask)


def _idle_numbers(config: Config, mask: MaskConfig) -> Iterator[str]:
    given = mask.model_fields_set
    if mask.method not in ("gumbel", "l0"):
        for option in ("l0_lambda", "l0_reduction", "l0_warmup_steps", "lr_scale", "initial_probability"):
            if option in given and getattr(mask, option) != MaskConfig.model_fields[option].default:
                yield f"attention.mask.{option} has no effect: method {mask.method!r} has no gates"
    if mask.method != "magnitude" and "sparsity" in config.attention.model_fields_set and config.attention.sparsity != 0.8:
        yield f"attention.sparsity has no effect: method {mask.method!r} finds its own (attention.mask.l0_lambda)"
    if mask.method == "magnitude" and mask.magnitude and (mask.magnitude.last_step or 0) > total_steps(config):
        yield (
            f"attention.mask.magnitude.last_step={mask.magnitude.last_step} is beyond the run's {total_steps(config)} steps: "
            f"it ends before it reaches attention.sparsity={config.attention.sparsity}"
        )
