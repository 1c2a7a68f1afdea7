"""Sentencepiece with an exact round trip: decode(encode(text)) == text for every string that UTF-8 can hold.

Four things make it exact: identity normalisation with white space left alone; byte pieces for characters outside the
vocabulary; pieces that never span a newline or the end of a word, so that long documents are encoded by words (`units.py`)
with the same result; and U+2581, which sentencepiece uses for the space itself, written as its three UTF-8 byte pieces.
"""

import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from data_pipeline.units import UnitEncoder, pieces_fit_units
from spa_dist.errors import DataError

MODEL_TYPES = ("bpe", "unigram")

_SPACE_MARK = "▁".encode()
_TRAINER_SKIPS = "▅"  # the trainer drops a whole sentence that holds its own mark for an unknown character
_TRAINING_LINE = 2048  # characters, at most 4 bytes each, so that no line meets the trainer's limit
_TRAINING_THREADS = 4  # part of the result: the model records it, and unigram sums in an order that depends on it
_PROBE = "  a\tb\n\n ▁ c \r\n\x00 é e\u0301 \u3000漢字 🙂 </s><unk> \n"


class Tokenizer:
    """A sentencepiece model that passes text through exactly; made by `from_file` or `from_bytes`.

    vocab_size counts all pieces; eos_id never comes out of `encode`; sha256 is the model file's.
    """

    def __init__(self, model: bytes, name: str):
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise DataError(f"{name}: not a sentencepiece model") from None
        self.model = model
        self.sha256 = hashlib.sha256(model).hexdigest()
        self.vocab_size: int = self._processor.get_piece_size()
        self.eos_id: int = self._processor.eos_id()
        if self.eos_id < 0:
            raise DataError(f"{name}: the tokenizer has no end-of-sentence piece: train it with eos_id set")
        self._mark_ids = np.array([self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_MARK], np.int32)
        self._units: UnitEncoder | None = None  # not before the probe: units take an exact model for granted
        if self.decode(self.encode(_PROBE)) != _PROBE:
            raise DataError(
                f"{name}: the tokenizer does not give text back exactly: train it with normalization_rule_name=identity, "
                "remove_extra_whitespaces=false, add_dummy_prefix=false and byte_fallback=true"
            )
        if pieces_fit_units(self._processor):
            self._units = UnitEncoder(self._processor)

    @classmethod
    def from_file(cls, path: str | Path) -> "Tokenizer":
        """Load a model file. Raises DataError when it is missing, no model, or does not round-trip text exactly."""
        try:
            return cls(Path(path).read_bytes(), str(path))
        except OSError as error:
            raise DataError(f"{path}: tokenizer cannot be read ({error.strerror})") from None

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, int32 [tokens], without EOS. Raises ValueError for lone surrogates, which UTF-8 cannot hold."""
        return self.encode_documents([text.encode("utf-8")])[0]

    def encode_documents(self, documents: Sequence[bytes], *, num_threads: int = 1) -> list[np.ndarray]:
        """The ids of each UTF-8 text, int32 [tokens] each; the result does not depend on num_threads."""
        segments = [document.split(_SPACE_MARK) for document in documents]
        ids = iter(self._encode_segments([segment for parts in segments for segment in parts], num_threads))
        return [_join([next(ids) for _ in parts], self._mark_ids) for parts in segments]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; control pieces (EOS) give nothing, bytes that are not UTF-8 give U+FFFD."""
        return self._processor.decode(np.asarray(ids).tolist())

    def _encode_segments(self, segments: list[bytes], num_threads: int) -> list[np.ndarray]:
        if self._units:
            return self._units.encode(segments, num_threads)
        return self._processor.encode(segments, return_type="numpy", num_threads=num_threads)


def _join(parts: list[np.ndarray], separator: np.ndarray) -> np.ndarray:
    joined = [parts[0]]
    for part in parts[1:]:
        joined += [separator, part]
    return np.concatenate(joined)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, model_type: str = "bpe") -> Tokenizer:
    """Train on `texts`; the same texts give the same model, byte for byte. Raises DataError when they are too few for it."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_training_lines(texts),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            byte_fallback=True,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n", "\t"],
            max_sentence_length=4 * _TRAINING_LINE,
            num_threads=_TRAINING_THREADS,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            minloglevel=3,
        )
    except RuntimeError as error:
        reason = str(error).rsplit("] ", maxsplit=1)[-1].strip() or "no text to learn from"
        raise DataError(
            f"no tokenizer of {vocab_size} pieces can be trained on this corpus ({reason}): change --vocab-size"
        ) from None
    return Tokenizer(model.getvalue(), "the trained tokenizer")


def _training_lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in text.replace(_TRAINER_SKIPS, "\n").replace("▁", "\n").replace("\0", "\n").split("\n"):
            for start in range(0, len(line), _TRAINING_LINE):
                yield line[start : start + _TRAINING_LINE]
