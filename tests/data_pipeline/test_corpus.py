"""What the corpus keeps, samples and holds out; and that a folder appears whole or not at all."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.build import Options, prepare_dataset
from data_pipeline.corpus import SCAN_FACTOR, Corpus, Kept
from data_pipeline.dataset import open_dataset
from data_pipeline.order import unit_interval
from data_pipeline.output import complete_folder
from data_pipeline.sources import Document, Source
from data_pipeline.sources.base import make_document
from spa_dist.errors import DataError
from tests.synthetic import sentences

ROOT = Path(__file__).parents[2]


class ListSource(Source):
    def __init__(self, texts: list[str]):
        self.texts, self.skipped, self.total_bytes = texts, Counter(), sum(map(len, texts))
        self.given = 0

    def documents(self) -> Iterator[Document]:
        for k, text in enumerate(self.texts):
            self.given += 1
            yield make_document(f"doc{k}", text.encode(), group=f"doc{k}")

    def identity(self) -> list[tuple[str, int, int]]:
        return []


def corpus_of(texts: list[str], *, limit: int | None = None, validation: float = 0.1, seed: int = 0) -> Corpus:
    return Corpus(ListSource(texts), limit_bytes=limit, validation=validation, test=0.0, seed=seed)


def kept(corpus: Corpus) -> list[Kept]:
    return [item for item in corpus.documents() if isinstance(item, Kept)]


@settings(deadline=None, max_examples=80)
@given(count=st.integers(0, 12), seed=st.integers(0, 50), validation=st.sampled_from([0.0, 0.02, 0.5]))
def test_a_small_corpus_still_has_something_held_out(count: int, seed: int, validation: float) -> None:
    corpus = corpus_of([f"text {k}" for k in range(count)], validation=validation, seed=seed)
    corpus.scan(10_000)
    splits = {item.document.id: item.split for item in kept(corpus)}
    assert len(splits) == count
    place = {name: unit_interval("split", seed, name) for name in splits}
    held = {name for name, split in splits.items() if split == "validation"}
    by_hash = {name for name in splits if place[name] < validation}
    if by_hash or not validation or count < 2:
        assert held == by_hash
    else:
        assert held == {min(place, key=place.__getitem__)}


@pytest.mark.parametrize("limit", [1, 100, 1000, 10**6])
def test_the_limit_is_a_prefix_that_fits(limit: int) -> None:
    texts = [f"{k} " * (k % 7 + 1) for k in range(60)]
    found = [item.document.text for item in kept(corpus_of(texts, limit=limit))]
    expected, size = [], 0
    for text in texts:
        if expected and size + len(text) > limit:
            break
        expected.append(text)
        size += len(text)
    assert found == expected


def test_the_tokenizer_s_sample_is_the_lowest_hashes_of_train() -> None:
    texts = [f"document {k} " * 20 for k in range(200)]
    corpus = corpus_of(texts, validation=0.3)
    sample = corpus.scan(5000)
    train = [item for item in kept(corpus) if item.split == "train"]
    order = sorted(train, key=lambda item: unit_interval("slice", 0, item.sha256))
    expected, size = [], 0
    for item in order:
        if size >= 5000:
            break
        expected.append(item.document.text)
        size += len(item.document.data)
    assert sample == expected


def test_the_scan_of_a_large_corpus_stops() -> None:
    source = ListSource([f"document {k} " * 20 for k in range(5000)])
    corpus = Corpus(source, limit_bytes=None, validation=0.1, test=0, seed=0)
    sample = corpus.scan(1000)
    assert 1000 <= sum(map(len, sample)) < 1000 + 20 * len("document 5000 ")
    assert source.given * 220 < SCAN_FACTOR * 1000 * 2


def test_long_documents_give_the_sample_a_slice() -> None:
    text = "".join(f"{k:07d} " for k in range(100_000))
    corpus = corpus_of([text, "short"], validation=0.0)
    sample = sorted(corpus.scan(10**6), key=len)
    assert sample[0] == "short"
    assert len(sample[1]) == 65536
    assert sample[1] in text


def test_file_names_that_are_not_utf8_are_names(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for k in range(70):  # as many as make each file a document
        (folder / os.fsdecode(b"caf\xe9 %d" % k)).write_text("\n".join(sentences(k, 20)))
    result = prepare_dataset(
        Options(source="text", input=str(folder), output=tmp_path / "out", vocab_size=280, streams=2, progress=False)
    )
    assert sum(split.documents for split in result.dataset.splits.values()) == 70


def test_one_writer_at_a_time_and_debris_of_a_killed_one_is_cleared(tmp_path: Path) -> None:
    target = tmp_path / "out"
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "left").write_text("by a run that was killed")
    with complete_folder(target, replace=False) as folder:
        assert not (folder / "left").exists()
        (folder / "file").write_text("content")
        with pytest.raises(DataError, match=r"another prepare\.py"), complete_folder(target, replace=False):
            pass
        assert not target.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (target / "file").read_text() == "content"


def start(corpus: Path, output: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "data_pipeline.prepare", "--source", "text", "--input", str(corpus)]
    command += ["--output", str(output), "--vocab-size", "300", "--num-threads", "1", "--tokenizer-bytes", "50000", *more]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def await_shards(partial: Path, process: subprocess.Popen[bytes]) -> None:
    while not (partial / "manifest.jsonl").exists():
        assert process.poll() is None, "ended before it was stopped"
        time.sleep(0.005)


def test_a_stopped_or_killed_run_leaves_the_old_dataset(tmp_path: Path) -> None:
    small, large, output = tmp_path / "small", tmp_path / "large", tmp_path / "data" / "out"
    small.mkdir(), large.mkdir()
    (small / "a.txt").write_text("\n".join(sentences(0, 400)))
    for k in range(20):
        (large / f"{k}.txt").write_text(f"file {k} {'x' * k}" + "\n".join(sentences(k, 12000)))
    assert start(small, output).wait() == 0
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    partial = output.with_name(".out.partial")
    for stop, code in ((signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)):
        process = start(large, output, "--force")
        await_shards(partial, process)
        process.send_signal(stop)
        assert process.wait() == code
        assert {path.name: path.read_bytes() for path in output.iterdir()} == before
        open_dataset(output)
        if stop == signal.SIGTERM:
            assert [path.name for path in output.parent.iterdir()] == ["out"]
    shutil.rmtree(large)
    assert start(small, output, "--force").wait() == 0
    assert [path.name for path in output.parent.iterdir()] == ["out"], "the next run clears up"
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before
