"""Any single-character typo and any wrong type is one line with the dotted key."""

import json
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from spa_dist.config import Config, apply_override, config_from_dict
from spa_dist.config.load import dotted_keys, section_of
from spa_dist.errors import ConfigError

KEYS = [key for key in dotted_keys() if key not in ("deepspeed", "provenance")]
SECTIONS = [name for name in Config.model_fields if name not in ("deepspeed", "provenance")]
WORDS = {"run.name", "run.dir", "data.path", "evaluation.split"}


def model_of(section: str) -> type[BaseModel]:
    """The section of that dotted name."""
    model: type[BaseModel] = Config
    for name in filter(None, section.split(".")):
        found = section_of(model.model_fields[name])
        assert found is not None
        model = found
    return model


def tree_with(dotted: str, value: Any) -> dict[str, Any]:
    """A config tree that holds one value, and what the sections on the way to it need."""
    tree: dict[str, Any] = {}
    *path, key = dotted.split(".")
    node = tree
    for depth, name in enumerate(path):
        node = node.setdefault(name, {"method": "none"} if path[: depth + 1] == ["attention", "mask"] else {})
    node[key] = value
    return tree


def misspelt(key: str) -> st.SearchStrategy[str]:
    """`key` with one character replaced, inserted, dropped, or two neighbours swapped."""
    place = st.integers(0, len(key) - 1)
    letter = st.sampled_from(string.ascii_lowercase + string.digits + "_-")
    return st.one_of(
        st.builds(lambda at, new: key[:at] + new + key[at + 1 :], place, letter),
        st.builds(lambda at, new: key[:at] + new + key[at:], place, letter),
        st.builds(lambda at: key[:at] + key[at + 1 :], place),
        st.builds(lambda at: key[:at] + key[at : at + 2][::-1] + key[at + 2 :], place),
    )


@settings(deadline=None, max_examples=300)
@given(st.sampled_from([*KEYS, *Config.model_fields]), st.data())
def test_any_typo_names_a_dotted_key(dotted: str, data: st.DataObject) -> None:
    """In a section or of a section: refused, in one line, before anything else is looked at."""
    section, _, key = dotted.rpartition(".")
    wrong = data.draw(misspelt(key).filter(lambda name: name not in model_of(section).model_fields))
    tree = tree_with(f"{section}.{wrong}", 1) if section else {wrong: {}}
    with pytest.raises(ConfigError) as error:
        config_from_dict(tree)
    full = f"{section}.{wrong}" if section else wrong
    assert str(error.value).startswith(f"unknown key {full}; ") and "\n" not in str(error.value)


@pytest.mark.parametrize("dotted", KEYS)
@pytest.mark.parametrize("value", [{"a": 1}, [], "12", True, None])
def test_wrong_types_name_the_key(dotted: str, value: Any) -> None:
    """Each key refuses an object and an empty list; numbers refuse words and truth values: nothing is converted."""
    section, _, key = dotted.rpartition(".")
    default = model_of(section).model_fields[key].default
    if isinstance(value, str) and dotted in WORDS:
        return
    if value is None and (default is None or dotted == "evaluation.patience"):
        return
    if value is True and (isinstance(default, bool) or dotted == "attention.gate"):
        return
    with pytest.raises(ConfigError) as error:
        config_from_dict({"run": {"steps": 1}} | tree_with(dotted, value))
    assert str(error.value).startswith(f"{dotted}: ") and "\n" not in str(error.value)


@pytest.mark.parametrize("section", [*SECTIONS, "deepspeed"])
def test_a_section_is_an_object(section: str) -> None:
    """A value in a section's place is named."""
    with pytest.raises(ConfigError, match=rf"^{section}: "):
        config_from_dict({section: 3})


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists, max_leaves=5
)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(KEYS), JSON_VALUES)
def test_overrides_take_json_and_touch_nothing_else(dotted: str, value: Any) -> None:
    """`--set key=<JSON>` puts that value there."""
    tree: dict[str, Any] = {"kept": {}} | tree_with(dotted, 1)
    apply_override(tree, f"{dotted}={json.dumps(value)}")
    assert tree == {"kept": {}} | tree_with(dotted, value)


def test_overrides_that_are_not_json_are_words() -> None:
    """A path with an equals sign needs no quotes."""
    tree: dict[str, Any] = {}
    apply_override(tree, "data.path=runs/a=b")
    assert tree == {"data": {"path": "runs/a=b"}}
