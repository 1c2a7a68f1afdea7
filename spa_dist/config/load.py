"""From a file and `--set key=value` to a `Config`; every mistake is one line with the dotted key and the way out."""

import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from spa_dist.config.deepspeed_keys import check_deepspeed_section
from spa_dist.config.resolve import resolve
from spa_dist.config.rules import check_config
from spa_dist.config.schema import Config
from spa_dist.errors import ConfigError

CONFIG_FOLDER = Path(__file__).resolve().parents[2] / "configs"


def load_config(name: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config, apply `key=value` overrides, check it, and fill in what is derived.

    Args:
        name: a path, or the name of a file in `configs/`, with or without `.json`.
        overrides: `section.key=value`; the value is JSON, or a plain string where it is not.

    Raises:
        ConfigError: one line naming the file or the dotted key, and the way out.
    """
    path = find_config(name)
    tree = read_json(path)
    for override in overrides:
        apply_override(tree, override)
    return config_from_dict(tree)


def config_from_dict(tree: dict[str, Any]) -> Config:
    """Check a nested dict and return the resolved `Config`; it takes what `Config.model_dump()` gives."""
    unknown = next(unknown_keys(tree, Config), None)
    if unknown is not None:
        raise ConfigError(unknown)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_describe(error)) from None
    check_deepspeed_section(config.deepspeed)
    config = resolve(config)
    check_config(config)
    return config


def find_config(name: str | Path) -> Path:
    """The file that `name` means: a path, or a name in `configs/`."""
    for candidate in (Path(name), CONFIG_FOLDER / name, CONFIG_FOLDER / f"{name}.json"):
        if candidate.is_file():
            return candidate
    known = sorted(path.name for path in CONFIG_FOLDER.glob("*.json"))
    hint = _nearest(str(name), known)
    raise ConfigError(f"config {str(name)!r} not found: no such file, and configs/ has {', '.join(known) or 'none'}{hint}")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path} is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"config {path} must hold a JSON object with sections, not {type(tree).__name__}")
    return tree


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Put `section.key=value` into `tree`."""
    dotted, separator, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not separator or not all(keys):
        raise ConfigError(f"--set {override!r}: write section.key=value")
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    node = tree
    for depth, key in enumerate(keys[:-1]):
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override!r}: {'.'.join(keys[: depth + 1])} is a value, not a section")
    node[keys[-1]] = value


def unknown_keys(tree: dict[str, Any], model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """One line for each key of `tree` that `model` does not have, with the nearest name that it has."""
    for key, value in tree.items():
        field = model.model_fields.get(key)
        if field is None:
            yield f"unknown key {prefix}{key}{_hint_for(key, prefix, model)}"
            continue
        section = section_of(field)
        if section is not None and isinstance(value, dict):
            yield from unknown_keys(value, section, f"{prefix}{key}.")


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds, an optional one included; None for a value."""
    parts = get_args(field.annotation)
    kinds = [part for part in parts if part is not type(None)] if type(None) in parts else [field.annotation]
    kind = kinds[0] if len(kinds) == 1 else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def dotted_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """The dotted name of every value of the config."""
    for name, field in model.model_fields.items():
        section = section_of(field)
        if section is None:
            yield f"{prefix}{name}"
        else:
            yield from dotted_keys(section, f"{prefix}{name}.")


def _hint_for(key: str, prefix: str, model: type[BaseModel]) -> str:
    near = difflib.get_close_matches(key, model.model_fields, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {prefix}{near[0]}?"
    everywhere = {dotted: dotted.rpartition(".")[2] for dotted in dotted_keys()}
    elsewhere = difflib.get_close_matches(key, everywhere.values(), n=1, cutoff=0.75)
    if elsewhere:
        dotted = next(full for full, name in everywhere.items() if name == elsewhere[0])
        return f"; did you mean {dotted}?"
    return f"; {prefix.rstrip('.') or 'a config'} has {', '.join(model.model_fields)}"


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _key_at(location: tuple[int | str, ...]) -> str:
    """The dotted key of an error's place, which for a value also names the alternative of its type that was tried."""
    keys: list[str] = []
    model: type[BaseModel] | None = Config
    for part in location:
        field = model.model_fields.get(str(part)) if model is not None else None
        if field is None:
            break
        keys.append(str(part))
        model = section_of(field)
    return ".".join(keys)


def _describe(error: ValidationError) -> str:
    """The first mistake of a pydantic report in one line."""
    first = error.errors()[0]
    key = _key_at(first["loc"])
    value = first.get("input")
    message = first["msg"][0].lower() + first["msg"][1:]
    if first["type"] == "literal_error":
        allowed = [part.strip(" '") for part in str(first["ctx"]["expected"]).replace(" or ", ", ").split(",")]
        return f"{key}: {value!r} is not one of {', '.join(allowed)}{_nearest(str(value), allowed)}"
    return f"{key}: {message}, not {value!r}"
