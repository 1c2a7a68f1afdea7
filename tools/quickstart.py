"""The main job from text to a generated continuation, as `make quickstart` runs it.

Prepares Python source as a corpus, trains `configs/spa_tiny.json` in two processes under the deepspeed launcher, exports to
plain PyTorch, evaluates the export in a process that imports neither deepspeed nor megatron, and continues a prompt. Writes
`runs/quickstart/summary.json` and `runs/quickstart/loss.png`.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN = Path("runs/quickstart")
DATA = Path("data/python")
PROMPT = "def __init__(self, "


def main() -> None:
    """Run each step; the first that fails ends the command with its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", nargs="+", default=[], metavar="section.key=value", help="override spa_tiny.json")
    args = parser.parse_args()
    began = time.monotonic()
    shutil.rmtree(RUN, ignore_errors=True)
    python = sys.executable
    step("1/6 data", [python, "data_pipeline/prepare.py", "--source", "python", "--output", str(DATA), "--force"])
    deepspeed = str(Path(python).with_name("deepspeed"))
    train = [deepspeed, "--num_accelerators", "2", "launch/pretrain.py", "--config", "spa_tiny.json"]
    overrides = [f"run.dir={RUN}", f"data.path={DATA}", *args.set]
    step("2/6 training", [*train, "--set", *overrides])
    export = RUN / "export"
    step("3/6 export", [python, "tools/convert_checkpoint.py", "--checkpoint", str(RUN), "--output", str(export)])
    evaluation = RUN / "export_evaluation.json"
    sequences = json.loads((RUN / "config.json").read_text())["evaluation"]["sequences"]
    evaluate = [python, "launch/evaluate.py", "--model", str(export), "--data", str(DATA), "--json", str(evaluation)]
    step("4/6 evaluation of the export", [*evaluate, *(["--sequences", str(sequences)] if sequences else [])])
    step(
        "5/6 generation",
        [python, "launch/generate.py", "--model", str(export), "--prompt", PROMPT, "--max-new-tokens", "48"],
    )
    step("6/6 loss curve", [python, "tools/plot_metrics.py", str(RUN / "metrics.jsonl"), "--output", str(RUN / "loss.png")])
    summary = summarise(export, json.loads(evaluation.read_text()))
    (RUN / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print_table(summary, time.monotonic() - began)


def step(title: str, command: list[str]) -> None:
    """Say what runs, and run it."""
    print(f"\n== {title}: {' '.join(Path(part).name if part.startswith('/') else part for part in command)}", flush=True)
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code:
        sys.exit(code)


def summarise(export: Path, evaluation: dict[str, float]) -> dict[str, object]:
    """The numbers of the run, from its log and the export's own evaluation."""
    lines = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    validation = [line for line in lines if "validation_loss" in line]
    rates = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line][1:]
    return {
        "validation_loss_before": validation[0]["validation_loss"],
        "validation_loss_after": validation[-1]["validation_loss"],
        "validation_loss_export": evaluation["loss"],
        "tokens_per_second": statistics.median(rates),
        "export": str(export),
        "steps": lines[-1]["step"],
        "tokens": lines[-1]["tokens"],
        "files": sorted(str(path) for path in RUN.rglob("*") if path.is_file()),
    }


def print_table(summary: dict[str, object], seconds: float) -> None:
    """The closing table."""
    rows = [
        ("validation loss before", f"{summary['validation_loss_before']:.4f} nats per token"),
        ("validation loss after", f"{summary['validation_loss_after']:.4f}"),
        ("validation loss of the export", f"{summary['validation_loss_export']:.4f}"),
        ("tokens per second", f"{summary['tokens_per_second']:,.0f} (median)"),
        ("export", f"{summary['export']}"),
        ("files", f"{len(summary['files'])} in {RUN}, among them summary.json and loss.png"),  # type: ignore[arg-type]
        ("time", f"{seconds:.0f} s"),
    ]
    print()
    for name, value in rows:
        print(f"{name:32}{value}")


if __name__ == "__main__":
    main()
