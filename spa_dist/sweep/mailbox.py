"""One actor per sweep, on the head node, through which trials and the driver talk.

Reports go from a trial's workers to its Tune function; answers from the driver to the workers, so that a trial that is to stop ends in
order at its report instead of being torn down.
"""

import asyncio
from collections import defaultdict
from typing import Any

import ray


class _Mailbox:
    """Reports that wait to be collected, and answers to them: None to go on, or why to stop."""

    def __init__(self) -> None:
        self._reports: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._answers: dict[tuple[str, int], str | None] = {}
        self._news = asyncio.Event()

    async def post(self, trial: str, report: dict[str, Any]) -> None:
        """A report of a trial."""
        self._reports[trial].append(report)

    async def collect(self, trial: str) -> list[dict[str, Any]]:
        """The reports of a trial since the last call."""
        return self._reports.pop(trial, [])

    async def put_answer(self, trial: str, tokens: int, answer: str | None) -> None:
        """Answer the report of a trial at these tokens."""
        self._answers[trial, tokens] = answer
        self._news.set()
        self._news = asyncio.Event()

    async def answer(self, trial: str, tokens: int) -> str | None:
        """Wait for the answer."""
        while (trial, tokens) not in self._answers:
            await self._news.wait()
        return self._answers[trial, tokens]


def start_mailbox(name: str) -> Any:
    """An actor on the head node that the sweep's processes find by its name."""
    options = {"name": name, "num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
    return ray.remote(_Mailbox).options(**options).remote()


def find_mailbox(name: str) -> Any:
    """The actor of that name."""
    return ray.get_actor(name)
