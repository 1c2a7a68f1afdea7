"""Run a function in N real processes over gloo, and get what rank 0 returns."""

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a launcher would set for one process."""
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def run_in_processes(target: str, world_size: int, argument: Any = None, timeout: float = 240.0) -> Any:
    """Call `module:function` with `argument` on `world_size` ranks; rank 0's return value goes through JSON.

    When a rank fails the others are ended, and the assertion carries the output of all.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "tests.distributed", target, json.dumps(argument), str(result)]
        logs = [(Path(folder) / f"rank{rank}.log").open("w+") for rank in range(world_size)]
        processes = [
            subprocess.Popen(
                command, env=rank_environment(rank, world_size, port), cwd=ROOT, stdout=logs[rank], stderr=subprocess.STDOUT
            )
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.wait(timeout)
                if process.returncode:
                    break
        finally:
            for process in processes:
                process.kill()
                process.wait()
        output = []
        for rank, log in enumerate(logs):
            log.seek(0)
            output.append(f"--- rank {rank}, exit {processes[rank].returncode}\n{log.read()[-4000:]}")
            log.close()
        assert result.exists(), "\n".join(output)
        return json.loads(result.read_text())


def _main() -> None:
    target, argument, result = sys.argv[1:]
    module, function = target.split(":")
    value = getattr(importlib.import_module(module), function)(json.loads(argument))
    if os.environ["RANK"] == "0":
        temporary = Path(result + ".tmp")
        temporary.write_text(json.dumps(value))
        temporary.replace(result)
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.barrier()  # no rank leaves while another still talks to it
    os._exit(0)


if __name__ == "__main__":
    _main()
