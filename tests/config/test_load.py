"""Any single-character typo and any wrong type is one line with the dotted key."""

import json
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from spa_dist.config import Config, apply_override, config_from_dict
from spa_dist.errors import ConfigError

SECTIONS: dict[str, type[BaseModel]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}
KEYS = [f"{section}.{key}" for section, model in SECTIONS.items() for key in model.model_fields]
WORDS = {"run.name", "run.dir", "data.path", "evaluation.split"}


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
    known = SECTIONS[section].model_fields if section else Config.model_fields
    wrong = data.draw(misspelt(key).filter(lambda name: name not in known))
    tree: dict[str, Any] = {section: {wrong: 1}} if section else {wrong: {}}
    with pytest.raises(ConfigError) as error:
        config_from_dict(tree)
    full = f"{section}.{wrong}" if section else wrong
    assert str(error.value).startswith(f"unknown key {full}; ") and "\n" not in str(error.value)


@pytest.mark.parametrize("dotted", KEYS)
@pytest.mark.parametrize("value", [{"a": 1}, [], "12", True, None])
def test_wrong_types_name_the_key(dotted: str, value: Any) -> None:
    """Each key refuses an object and an empty list; numbers refuse words and truth values: nothing is converted."""
    section, key = dotted.split(".")
    default = SECTIONS[section].model_fields[key].default
    if isinstance(value, str) and dotted in WORDS:
        return
    if value is None and (default is None or dotted == "evaluation.patience"):
        return
    if value is True and isinstance(default, bool):
        return
    with pytest.raises(ConfigError) as error:
        config_from_dict({"run": {"steps": 1}} | {section: {key: value}})
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
    section, key = dotted.split(".")
    tree: dict[str, Any] = {section: {"other": 1}, "kept": {}}
    apply_override(tree, f"{dotted}={json.dumps(value)}")
    assert tree == {section: {"other": 1, key: value}, "kept": {}}


def test_overrides_that_are_not_json_are_words() -> None:
    """A path with an equals sign needs no quotes."""
    tree: dict[str, Any] = {}
    apply_override(tree, "data.path=runs/a=b")
    assert tree == {"data": {"path": "runs/a=b"}}
