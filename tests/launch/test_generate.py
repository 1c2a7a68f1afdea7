"""`launch/generate.py` as a user calls it: each option does what it says, and each mistake is one line and exit code 2."""

import io
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.tokenizer import Tokenizer, train_tokenizer
from spa_dist.export.checkpoint import open_checkpoint
from spa_dist.export.model import PlainModel, generate
from spa_dist.export.write import ExportOptions, write_export
from tests.distributed import ROOT
from tests.export.synthetic_run import facts, make_run
from tests.synthetic import sentences

PROMPT = "the cat sees"
Answer = tuple[int, str, str]
"""Exit code, standard output, standard error."""


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export with random weights and a real tokenizer."""
    folder = tmp_path_factory.mktemp("generate")
    tokenizer = train_tokenizer(sentences(0, 300), vocab_size=320)
    run = make_run(folder / "run", {"model.vocab_size": 320, "model.sequence_length": 24, "model.positions": "learned"})
    file = run.folder / "tokenizer.model"
    file.write_bytes(tokenizer.model)
    tree = run.manifest()
    tree["tokenizer"] |= {"sha256": facts(file)["sha256"], "vocab_size": 320}
    run.change_manifest(tree)
    write_export(open_checkpoint(run.folder), folder / "export", ExportOptions())
    return folder / "export"


@pytest.fixture
def command(export: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Runs the command in this process."""

    def run(*arguments: str, model: Path = export, stdin: bytes = b"") -> Answer:
        monkeypatch.setattr(sys, "argv", ["generate.py", "--model", str(model), *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "launch" / "generate.py"), run_name="__main__")
        return int(ended.value.code or 0), *capfd.readouterr()

    return run


def expected(export: Path, *texts: str, **options: Any) -> list[str]:
    """What the library gives."""
    tokenizer = Tokenizer.from_file(export / "tokenizer.model")
    prompts = [[tokenizer.eos_id, *tokenizer.encode(text).tolist()] for text in texts]
    new = generate(PlainModel.from_folder(export), prompts, max_new_tokens=8, **options)
    return [text + tokenizer.decode(tokens) for text, tokens in zip(texts, new)]


def test_each_option_reaches_the_model(export: Path, command: Callable[..., Answer]) -> None:
    drawn: dict[str, Any] = {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "seed": 3}
    seen = set()
    for used in ([], ["temperature"], ["temperature", "seed"], ["temperature", "top_k"], ["temperature", "top_p"], [*drawn]):
        options = [part for name in used for part in (f"--{name.replace('_', '-')}", str(drawn[name]))]
        code, out, err = command("--prompt", PROMPT, "--max-new-tokens", "8", *options)
        wanted = expected(export, PROMPT, **{name: drawn[name] for name in used})[0]
        assert (code, out, err) == (0, wanted + "\n", ""), used
        seen.add(out)
    assert len(seen) > 3, "options that change nothing"


def test_a_batch_and_standard_input(export: Path, command: Callable[..., Answer]) -> None:
    texts = ("the dog", "", "漢字 é")
    code, out, _ = command("--prompt", *texts, "--max-new-tokens", "8")
    assert code == 0 and out == "".join(text + "\n---\n" for text in expected(export, *texts))
    code, out, _ = command("--prompt", "-", "--max-new-tokens", "8", stdin="the\nriver é".encode())
    assert code == 0 and out == expected(export, "the\nriver é")[0] + "\n"


MISTAKES: dict[str, tuple[list[str], str]] = {
    "temperature": (["--temperature", "nan"], "temperature"),
    "top_k": (["--temperature", "1", "--top-k", "-1"], "top_k"),
    "top_p": (["--temperature", "1", "--top-p", "1.1"], "top_p"),
    "seed": (["--temperature", "1", "--seed", str(2**64)], "64 bits"),
    "idle": (["--top-k", "5"], "no effect"),
    "none": (["--max-new-tokens", "0"], "max_new_tokens"),
    "too long": (["--max-new-tokens", "25"], "learned positions"),
    "device": (["--device", "abacus"], "device 'abacus'"),
    "bytes": (["--prompt", "\udcff"], "not UTF-8"),
    "standard input": (["--prompt", "-"], "standard input is not UTF-8"),
    "nowhere": (["--model", "nowhere"], "nowhere"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(command: Callable[..., Answer], mistake: str) -> None:
    options, word = MISTAKES[mistake]
    code, out, err = command("--prompt", PROMPT, *options, stdin=b"\xff")
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]  # argparse puts its usage before
    assert word in last and last.startswith("generate.py: error: ") and "Traceback" not in err


def test_another_tokenizer_is_refused(export: Path, command: Callable[..., Answer], tmp_path: Path) -> None:
    """Of another size, with the export's own file name; and none at all."""
    folder = tmp_path / "export"
    folder.mkdir()
    for file in export.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "tokenizer.model").write_bytes(train_tokenizer(sentences(0, 300), vocab_size=330).model)
    code, _, err = command("--prompt", PROMPT, model=folder)
    assert code == 2 and "not the tokenizer" in err and len(err.splitlines()) == 1
    (folder / "tokenizer.model").unlink()
    code, _, err = command("--prompt", PROMPT, model=folder)
    assert code == 2 and "has no tokenizer.model" in err
