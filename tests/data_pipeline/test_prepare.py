"""prepare.py from corpus folder to dataset: what it keeps, what it refuses, and that nothing half-written stays."""

import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline import prepare
from data_pipeline.dataset import open_dataset
from data_pipeline.sources import open_source
from data_pipeline.tokenizer import Tokenizer
from spa_dist.cli import run_command
from spa_dist.errors import DataError
from tests.data_pipeline.support import read_json, read_tar
from tests.synthetic import sentences

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Run the command in this process: (exit code, stdout, last lines of stderr without progress bars)."""

    def call(*arguments: object, vocab: int = 290) -> tuple[int, str, str]:
        fixed = ["--output", tmp_path / "out", "--vocab-size", vocab, "--streams", 4]
        monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, [*fixed, *arguments])])
        handler = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit) as stopped:
            run_command(prepare.main)
        signal.signal(signal.SIGTERM, handler)
        output = capsys.readouterr()
        errors = [line for line in output.err.splitlines() if "error:" in line]
        return int(stopped.value.code or 0), output.out, "\n".join(errors)

    return call


def books(seed: int, count: int) -> list[str]:
    return ["\n".join(part) + f"\nbook {seed} {k}\n" for k, part in enumerate(zip(*[iter(sentences(seed, 8 * count))] * 8))]


def write_files(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def text_corpus(root: Path, count: int = 80) -> Path:
    return write_files(root, {f"a{k % 3}/{k}.txt": text for k, text in enumerate(books(1, count))})


def manifest(folder: Path) -> dict[str, dict]:
    entries = [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]
    assert len({entry["id"] for entry in entries}) == len(entries)
    return {entry["id"]: entry for entry in entries}


def texts(folder: Path) -> dict[str, str]:
    """Every document's text, from the tars."""
    tokenizer = Tokenizer.from_file(folder / "tokenizer.model")
    shards = [shard["file"] for split in read_json(folder)["splits"].values() for shard in split["shards"]]
    return {meta["id"]: tokenizer.decode(ids) for file in shards for _, meta, ids in read_tar(folder / file)}


def only(tmp_path: Path, *names: str) -> bool:
    return sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_text_folder_becomes_its_dataset(run, tmp_path: Path) -> None:
    corpus = text_corpus(tmp_path / "in")
    odd = {
        "copy.txt": (corpus / "a0/0.txt").read_bytes(),
        "latin.txt": "caf\xe9 cr\xe8me\n".encode("latin-1"),
        "empty.txt": b" \n\t ",
        "binary.bin": b"\x00\x01\x02",
        ".hidden/x.txt": b"hidden",
        "odd.txt": "\u2581 tab\t\r\n  é🙂\n",
    }
    write_files(corpus, odd)
    code, out, _ = run("--source", "text", "--input", corpus, "--validation-fraction", 0.2, "--test-fraction", 0.1)
    assert code == 0
    assert "1 duplicate, 1 empty, 1 latin-1, 1 skipped: binary, 1 skipped: hidden" in out
    assert only(tmp_path, "in", "out")
    found, entries = texts(tmp_path / "out"), manifest(tmp_path / "out")
    names = {path.relative_to(corpus).as_posix(): path.read_bytes() for path in corpus.rglob("*.*") if path.is_file()}
    expected = {name: data.decode("latin-1" if name == "latin.txt" else "utf-8") for name, data in names.items()}
    for name in ("empty.txt", "binary.bin", ".hidden/x.txt"):
        del expected[name]
    assert len({"copy.txt", "a0/0.txt"} & found.keys()) == 1
    del expected["copy.txt" if "a0/0.txt" in found else "a0/0.txt"]
    assert found == expected
    dropped = {name: entries.pop(name)["dropped"] for name in entries.keys() - found.keys()}
    assert sorted(dropped.values()) == ["duplicate", "empty"]
    assert dropped["empty.txt"] == "empty"
    assert entries.keys() == found.keys()
    index = read_json(tmp_path / "out")
    counts = {"duplicate": 1, "empty": 1, "latin-1": 1, "skipped: binary": 1, "skipped: hidden": 1}
    assert index["source"]["counts"] == counts
    digest = hashlib.sha256((tmp_path / "out/manifest.jsonl").read_bytes()).hexdigest()
    assert index["source"]["manifest_sha256"] == digest
    for split, content in index["splits"].items():
        own = [entry for entry in entries.values() if entry["split"] == split]
        for key in ("tokens", "words", "bytes"):
            assert content[key] == sum(entry[key] for entry in own)
    for name, entry in entries.items():
        assert entry["split"] == split_by_hash(name, 0)
        assert entry["sha256"] == hashlib.sha256(found[name].encode()).hexdigest()
    assert entries["latin.txt"]["encoding"] == "latin-1"


def split_by_hash(name: str, seed: int) -> str:
    place = int(hashlib.sha256(f"split/{seed}/{name}".encode()).hexdigest()[:12], 16) / 2**48
    return "validation" if place < 0.2 else "test" if place < 0.2 + 0.1 else "train"


def test_splits_stay_when_the_corpus_grows(run, tmp_path: Path) -> None:
    corpus = text_corpus(tmp_path / "in")
    fixed = ["--source", "text", "--input", corpus, "--validation-fraction", 0.2, "--test-fraction", 0.1]
    assert run(*fixed)[0] == 0
    before = {name: entry["split"] for name, entry in manifest(tmp_path / "out").items()}
    assert set(before.values()) == {"train", "validation", "test"}
    write_files(corpus, {f"new/{k}.txt": text for k, text in enumerate(books(2, 30))})
    assert run(*fixed, "--force")[0] == 0
    after = manifest(tmp_path / "out")
    assert len(after) == len(before) + 30
    assert {name: after[name]["split"] for name in before} == before
    assert run(*fixed, "--force", "--seed", 7)[0] == 0
    assert {name: entry["split"] for name, entry in manifest(tmp_path / "out").items() if name in before} != before


def test_one_file_is_cut_into_parts_that_add_up(run, tmp_path: Path) -> None:
    rng = random.Random(0)
    content = "".join(text + rng.choice(["", "\r\n", "é" * 50]) for text in books(1, 300))
    content += "".join(f"🙂x{k}" for k in range(9000))  # no newline or space to cut at
    write_files(tmp_path, {"book.txt": content})
    assert run("--source", "text", "--input", tmp_path / "book.txt", "--validation-fraction", 0.2, vocab=320)[0] == 0
    found = texts(tmp_path / "out")
    assert len(found) > 5
    assert "".join(found[f"book.txt#{k}"] for k in range(len(found))) == content
    assert not any("encoding" in entry for entry in manifest(tmp_path / "out").values())


def test_pg19_keeps_its_official_splits(run, tmp_path: Path) -> None:
    train, held = books(1, 60), books(2, 6)
    files = {f"train/{k}.txt": text for k, text in enumerate(train)}
    files |= {f"validation/v{k}.txt": text for k, text in enumerate(held[:3])}
    files |= {f"test/t{k}.txt": text for k, text in enumerate(held[3:])}
    files |= {"train/again.txt": held[4], "metadata.csv": "1,title,1900,url\n"}
    write_files(tmp_path / "in", files)
    code, out, _ = run("--source", "pg19", "--input", tmp_path / "in", "--validation-fraction", 0.5)
    assert code == 0
    assert "1 duplicate" in out
    entries = manifest(tmp_path / "out")
    assert entries.pop("train/again.txt")["dropped"] == "duplicate"
    assert {name: entry["split"] for name, entry in entries.items()} == {
        name: name.split("/")[0] for name in files if name not in ("train/again.txt", "metadata.csv")
    }
    assert texts(tmp_path / "out") == {name: files[name] for name in entries}


def arxiv_lines(count: int) -> list[dict]:
    lines: list[dict] = [{"text": text, "meta": {"arxiv_id": f"2001.{k}"}} for k, text in enumerate(books(1, count))]
    lines.append({"article_id": "sp1", "abstract_text": ["<S> An abstract . </S>"], "article_text": ["One .", "Two ."]})
    return [*lines, {"article_id": "none", "abstract_text": [], "article_text": []}]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_arxiv_lines_are_papers(run, tmp_path: Path, suffix: str) -> None:
    lines = arxiv_lines(60)
    data = "\n\n".join(map(json.dumps, lines)).encode()
    write_files(tmp_path / "in", {f"papers{suffix}": gzip.compress(data) if suffix.endswith("gz") else data})
    code, out, _ = run("--source", "arxiv", "--input", tmp_path / "in")
    assert code == 0
    assert "1 empty" in out
    expected = {line["meta"]["arxiv_id"]: line["text"] for line in lines if "meta" in line}
    assert texts(tmp_path / "out") == expected | {"sp1": "An abstract .\n\nOne .\nTwo ."}


def test_broken_arxiv_input_names_file_and_line(run, tmp_path: Path) -> None:
    good = "\n".join(map(json.dumps, arxiv_lines(60)))
    whole = gzip.compress(good.encode())
    for name, data, message in (
        ("a.jsonl", good + '\n{"text": ', "a.jsonl: line 63"),
        ("b.jsonl", good + "\n[1]", "b.jsonl: line 63"),
        ("c.jsonl.gz", good, "c.jsonl.gz"),
        ("d.jsonl.gz", whole[:-100], "d.jsonl.gz"),
        ("e.jsonl.gz", whole[:200] + b"\xff" * 200 + whole[400:], "e.jsonl.gz"),
    ):
        write_files(tmp_path / "in", {name: data})
        code, _, error = run("--source", "arxiv", "--input", tmp_path / "in" / name)
        assert (code, error.count("\n")) == (2, 0)
        assert message in error
        assert only(tmp_path, "in")


def test_damage_anywhere_in_a_gzip_file_is_named(tmp_path: Path) -> None:
    whole = gzip.compress("\n".join(map(json.dumps, arxiv_lines(60))).encode())
    for place in range(0, len(whole) - 50, 41):
        path = tmp_path / "damaged.jsonl.gz"
        path.write_bytes(whole[:place] + b"\xff" * 50 + whole[place + 50 :])
        with pytest.raises(DataError, match=r"damaged\.jsonl\.gz"):
            list(open_source("arxiv", str(path)).documents())


def test_python_source_in_its_own_process(tmp_path: Path) -> None:
    command = [sys.executable, "data_pipeline/prepare.py", "--source", "python", "--output", str(tmp_path / "out")]
    command += ["--vocab-size", "700", "--limit-bytes", "400000", "--tokenizer-bytes", "100000"]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert first.returncode == 0, first.stderr
    total = sum(split["bytes"] for split in read_json(tmp_path / "out")["splits"].values())
    assert 0 < total <= 400000
    assert open_dataset(tmp_path / "out").vocab_size == 700
    found = texts(tmp_path / "out")
    name = next(name for name in found if name.startswith("stdlib/"))
    assert found[name] == (Path(os.__file__).parent / name.removeprefix("stdlib/")).read_bytes().decode()


def test_prepared_again_is_left_alone(run, tmp_path: Path) -> None:
    corpus = text_corpus(tmp_path / "in")
    assert run("--source", "text", "--input", corpus)[0] == 0
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in (tmp_path / "out").iterdir()}
    code, out, _ = run("--source", "text", "--input", corpus)
    assert code == 0
    assert "already prepared" in out
    assert {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "out").iterdir()} == before
    code, _, error = run("--source", "text", "--input", corpus, vocab=285)
    assert code == 2
    assert "--force" in error
    assert read_json(tmp_path / "out")["tokenizer"]["vocab_size"] == 290
    assert run("--source", "text", "--input", corpus, "--force")[0] == 0
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == {n: data for n, (_, data) in before.items()}


def test_folder_in_the_way_is_kept(run, tmp_path: Path) -> None:
    corpus = text_corpus(tmp_path / "in")
    write_files(tmp_path / "out", {"mine.txt": "precious"})
    for force in ([], ["--force"]):
        code, _, error = run("--source", "text", "--input", corpus, *force)
        assert (code, error.count("\n")) == (2, 0)
        assert "not a dataset" in error
    assert (tmp_path / "out/mine.txt").read_text() == "precious"
    assert only(tmp_path, "in", "out")


def test_failed_replacement_keeps_the_dataset(run, tmp_path: Path) -> None:
    assert run("--source", "text", "--input", text_corpus(tmp_path / "in"))[0] == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    lines = "\n".join(map(json.dumps, arxiv_lines(60)))
    write_files(tmp_path, {"bad.jsonl": lines + "\n{", "blank.txt": " "})
    assert run("--source", "arxiv", "--input", tmp_path / "bad.jsonl", "--force")[0] == 2
    assert run("--source", "text", "--input", tmp_path / "blank.txt", "--force")[0] == 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert only(tmp_path, "in", "out", "bad.jsonl", "blank.txt")
    (tmp_path / "out2").mkdir()
    assert run("--source", "text", "--input", tmp_path / "in", "--output", tmp_path / "out2")[0] == 0, "empty: free to use"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source", "text", "--input", "{}/empty"], "no text"),
        (["--source", "text", "--input", "{}/absent"], "absent"),
        (["--source", "arxiv", "--input", "{}/absent"], "absent"),
        (["--source", "arxiv", "--input", "{}/empty/none"], "none"),
        (["--source", "pg19", "--input", "{}/empty"], "train/"),
        (["--source", "text"], "--input"),
        (["--source", "python", "--input", "{}/empty"], "--input"),
        (["--source", "text", "--input", "{}/in", "--vocab-size", "999999"], "--vocab-size"),
        (["--source", "text", "--input", "{}/in", "--streams", "0"], "--streams"),
        (["--source", "text", "--input", "{}/in", "--validation-fraction", "1"], "--validation-fraction"),
        (["--source", "text", "--input", "{}/in", "--tokenizer", "{}/absent.model"], "absent.model"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(run, tmp_path: Path, arguments: list[str], message: str) -> None:
    text_corpus(tmp_path / "in", 10)
    write_files(tmp_path / "empty", {"blank.txt": "\n \n", "none/.keep": ""})
    code, out, error = run(*(argument.replace("{}", str(tmp_path)) for argument in arguments))
    assert (code, out) == (2, "")
    assert error.count("\n") == 0
    assert message in error
    assert only(tmp_path, "in", "empty")
