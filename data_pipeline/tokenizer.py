"""Sentencepiece with an exact round trip: decode(encode(text)) == text for every string that UTF-8 can hold.

Four things make it exact: identity normalisation with white space left alone; byte pieces for characters outside the
vocabulary; a newline piece that never merges with its neighbours, so that long documents are encoded in runs of lines with
the same result; and U+2581, which sentencepiece uses for the space itself, written as its three UTF-8 byte pieces.
"""

import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from spa_dist.errors import DataError

MODEL_TYPES = ("bpe", "unigram")

_SPACE_MARK = "▁".encode()
_TRAINER_SKIPS = "▅"  # the trainer drops a whole sentence that holds its own mark for an unknown character
_TRAINING_LINE = 2048  # characters, at most 4 bytes each, so that no line meets the trainer's limit
_RUN_BYTES = 2048
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
        self._cuts_at_newline = not any(
            "\n" in piece and piece != "\n" for piece in map(self._processor.id_to_piece, range(self.vocab_size))
        )
        if self.decode(self.encode(_PROBE)) != _PROBE:
            raise DataError(
                f"{name}: the tokenizer does not give text back exactly: train it with normalization_rule_name=identity, "
                "remove_extra_whitespaces=false, add_dummy_prefix=false and byte_fallback=true"
            )

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
        runs: list[bytes] = []
        plans = [list(self._plan(document, runs)) for document in documents]
        ids = self._processor.encode(runs, return_type="numpy", num_threads=num_threads) if runs else []
        empty = np.empty(0, np.int32)
        return [np.concatenate([empty, *(self._mark_ids if k is None else ids[k] for k in plan)]) for plan in plans]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; control pieces (EOS) give nothing, bytes that are not UTF-8 give U+FFFD."""
        return self._processor.decode(np.asarray(ids).tolist())

    def _plan(self, document: bytes, runs: list[bytes]) -> Iterator[int | None]:
        """Append the document's runs of lines to `runs`, and yield their places there; None stands for U+2581."""
        for number, segment in enumerate(document.split(_SPACE_MARK)):
            if number:
                yield None
            for run in _runs_of_lines(segment) if self._cuts_at_newline else [segment]:
                yield len(runs)
                runs.append(run)


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


def _runs_of_lines(text: bytes) -> Iterator[bytes]:
    """Cut after newlines into runs of at least _RUN_BYTES: short inputs keep the encoder in cache, and threads busy."""
    start = 0
    while start < len(text):
        newline = text.find(b"\n", start + _RUN_BYTES)
        end = len(text) if newline < 0 else newline + 1
        yield text[start:end]
        start = end


def _training_lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in text.replace(_TRAINER_SKIPS, "\n").replace("▁", "\n").replace("\0", "\n").split("\n"):
            for start in range(0, len(line), _TRAINING_LINE):
                yield line[start : start + _TRAINING_LINE]
