"""Encoding by units gives what sentencepiece gives for the whole text, whatever was encoded before."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline import units
from data_pipeline.tokenizer import Tokenizer, train_tokenizer
from tests.data_pipeline.test_tokenizer import foreign_model
from tests.synthetic import sentences

WORDS = [
    "the",
    "cat",
    " ",
    "  ",
    "       ",
    "\n",
    "\n\n",
    "\t",
    "\r\n",
    "the cat",
    "river.",
    "é",
    "🙂",
    "\u3000",
    "\0",
    "</s>",
    "x" * 80,
]
TEXTS = st.lists(
    st.one_of(st.sampled_from(WORDS), st.text(st.characters(exclude_categories=["Cs"]), max_size=4)), max_size=25
)


def reference(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer._processor.encode(text)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([*sentences(0, 200), *(" " * k + "the\tcat" for k in range(60))], vocab_size=310)


@settings(deadline=None, max_examples=200)
@given(texts=st.lists(TEXTS.map("".join).map(lambda text: text.replace("\u2581", "")), max_size=4))
def test_units_are_exact_and_the_cache_changes_nothing(tokenizer: Tokenizer, texts: list[str]) -> None:
    expected = [reference(tokenizer, text) for text in texts]
    data = [text.encode() for text in texts]
    fresh = Tokenizer(tokenizer.model, "fresh")
    assert fresh._units is not None
    for encoder in (tokenizer, fresh, fresh):
        assert [ids.tolist() for ids in encoder.encode_documents(data)] == expected


def test_a_full_cache_is_emptied(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "_CACHE_BYTES", 2000)
    encoder = units.UnitEncoder(tokenizer._processor)
    for start in range(0, 20000, 50):
        text = " ".join(f"word{k}" for k in range(start, start + 50))
        (ids,) = encoder.encode([text.encode()], 1)
        assert ids.tolist() == reference(tokenizer, text)
        assert sum(map(len, encoder._ids)) < 2000 + 2 * len(text)


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        ({}, True),
        ({"user_defined_symbols": ["the\u2581cat"]}, False),
        ({"user_defined_symbols": ["the cat"]}, True),  # never found: the text's spaces have become U+2581
        ({"user_defined_symbols": [".\n"]}, False),
        ({"user_defined_symbols": ["\n\n"]}, False),
        ({"user_defined_symbols": [" see"]}, True),
        ({"split_by_whitespace": False}, False),
        ({"treat_whitespace_as_suffix": True}, False),
    ],
)
def test_pieces_that_span_units_are_noticed(options: dict[str, object], fits: bool) -> None:
    tokenizer = Tokenizer(foreign_model(**options), "foreign")
    assert units.pieces_fit_units(tokenizer._processor) is fits
    text = "the cat sees the dog.\n\nthe cat.\n  the  cat finds   \n the tree. " * 30
    assert tokenizer.encode(text).tolist() == reference(tokenizer, text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
