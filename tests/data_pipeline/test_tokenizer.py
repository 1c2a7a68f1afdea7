"""The tokenizer gives every text back exactly, and is the same model each time."""

import io
import random

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.tokenizer import MODEL_TYPES, Tokenizer, train_tokenizer
from spa_dist.errors import DataError
from tests.synthetic import sentences

SETTINGS = settings(deadline=None, max_examples=150)
AWKWARD = [
    "\u2581",
    "\u2585",
    "\u2047",
    "\0",
    "\t",
    "\t\t",
    "\r\n",
    "\r",
    "\n\n",
    " ",
    "      ",
    "\u00a0",
    "\u3000",
    "\ufeff",
    "\ufffd",
]
AWKWARD += [
    "e\u0301",
    "\u00e9",
    "ﬁ",
    "Ａ",
    "🙂",
    "👩‍👩‍👧",
    "\U0010ffff",
    "</s>",
    "<unk>",
    "<s>",
    "<0x0A>",
    "the cat",
    "\x85",
    "\u2028",
]
CHARACTERS = st.characters(exclude_categories=["Cs"])
TEXTS = st.lists(st.one_of(st.sampled_from(AWKWARD), st.text(CHARACTERS, max_size=12)), max_size=20).map("".join)


@pytest.fixture(scope="module", params=MODEL_TYPES)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return train_tokenizer(sentences(0, 300), vocab_size=284, model_type=request.param)


@SETTINGS
@given(text=TEXTS)
def test_round_trip_is_exact(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.dtype == np.int32
    assert tokenizer.eos_id not in ids.tolist()
    assert all(0 <= k < tokenizer.vocab_size for k in ids.tolist())
    assert 0 not in ids.tolist(), "an unknown piece cannot be exact"


@SETTINGS
@given(texts=st.lists(TEXTS, max_size=6))
def test_documents_are_encoded_apart_and_alike(tokenizer: Tokenizer, texts: list[str]) -> None:
    encoded = tokenizer.encode_documents([text.encode() for text in texts], num_threads=2)
    assert [ids.tolist() for ids in encoded] == [tokenizer.encode(text).tolist() for text in texts]


def test_every_small_character_survives_alone(tokenizer: Tokenizer) -> None:
    for character in [*map(chr, range(0x180)), *AWKWARD, "\ud7ff", "\ue000", "\uffff"]:
        for text in (character, character * 3, f"a{character}b", f" {character} "):
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_long_documents_are_encoded_as_if_in_one_piece(tokenizer: Tokenizer) -> None:
    rng = random.Random(3)
    lines = [rng.choice(["", "  ", "\t", *sentences(5, 20)]) + rng.choice(["", " ", "\r"]) for _ in range(400)]
    for text in ("\n".join(lines) * 3, "\n" * 9000, " ".join(lines), "\n" + "x" * 5000 + "\n\n" + "y" * 5000 + " \n"):
        assert len(text.encode()) > 8000
        processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
        assert tokenizer.encode(text).tolist() == processor.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="surrogates"):
        tokenizer.encode("a\ud800b")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_training_is_deterministic(model_type: str) -> None:
    models = [train_tokenizer(iter(sentences(1, 200)), vocab_size=284, model_type=model_type).model for _ in range(2)]
    assert models[0] == models[1]
    assert train_tokenizer(sentences(2, 200), vocab_size=284, model_type=model_type).model != models[0]


def learned(texts: list[str]) -> set[str]:
    model = train_tokenizer(texts, vocab_size=300).model
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return {processor.id_to_piece(k) for k in range(processor.get_piece_size())}


@pytest.mark.parametrize(
    "late",
    [
        "quokka",
        pytest.param("quokka \u2585", id="beside the trainer's unknown mark"),
        pytest.param("quokka\0", id="beside NUL"),
    ],
)
def test_no_text_is_lost_to_training(late: str) -> None:
    """The trainer itself drops lines above its limit, and lines that hold its own marks."""
    line = "the cat sees the dog " * 5000 + f"{late} " * 5000
    assert "\n" not in line
    assert any("quokka" in piece for piece in learned([line]))
    assert not any("quokka" in piece for piece in learned(["the cat sees the dog " * 5000, *sentences(0, 100)]))


def test_vocabulary_size_is_as_asked_or_refused() -> None:
    assert train_tokenizer(sentences(0, 300), vocab_size=310).vocab_size == 310
    for size in (10, 100_000):
        with pytest.raises(DataError, match="--vocab-size"):
            train_tokenizer(sentences(0, 20), vocab_size=size)
    with pytest.raises(DataError, match="--vocab-size"):
        train_tokenizer([], vocab_size=300)


def foreign_model(**options: object) -> bytes:
    exact = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False}
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences(0, 300)),
        model_writer=model,
        model_type="bpe",
        minloglevel=3,
        **{
            **exact,
            "vocab_size": 300,
            "byte_fallback": True,
            "eos_id": 1,
            "bos_id": -1,
            "pad_id": -1,
            "unk_id": 0,
            **options,
        },
    )
    return model.getvalue()


def test_a_foreign_exact_model_is_taken(tmp_path) -> None:
    (tmp_path / "m.model").write_bytes(foreign_model())
    loaded = Tokenizer.from_file(tmp_path / "m.model")
    assert loaded.decode(loaded.encode("a \u2581  b\r\n\n")) == "a \u2581  b\r\n\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalization_rule_name": "nmt_nfkc"}, "exactly"),
        ({"remove_extra_whitespaces": True}, "exactly"),
        ({"byte_fallback": False, "vocab_size": 60}, "exactly"),
        ({"eos_id": -1}, "end-of-sentence"),
    ],
)
def test_models_that_lose_text_are_refused(tmp_path, options: dict[str, object], message: str) -> None:
    path = tmp_path / "foreign.model"
    path.write_bytes(foreign_model(**options))
    with pytest.raises(DataError, match=rf"foreign\.model.*{message}"):
        Tokenizer.from_file(path)


def test_missing_and_broken_model_files_are_named(tmp_path) -> None:
    with pytest.raises(DataError, match=r"absent\.model"):
        Tokenizer.from_file(tmp_path / "absent.model")
    for content in (b"", b"not a model" * 100, foreign_model()[:-700]):
        (tmp_path / "broken.model").write_bytes(content)
        with pytest.raises(DataError, match=r"broken\.model"):
            Tokenizer.from_file(tmp_path / "broken.model")
