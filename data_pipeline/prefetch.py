"""Run a function over 0, 1, 2, … in background threads and hand its results out in order."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Prefetcher(Iterator[Result], Generic[Result]):
    """An endless iterator over make(0), make(1), …, computed ahead by `workers` threads (0: in the caller, on demand).

    The order of results does not depend on `workers`. What `make` raises is raised by `next` in its place. `close`, or the
    end of a `with` block, stops the threads.
    """

    def __init__(self, make: Callable[[int], Result], *, workers: int, ahead: int):
        self._make = make
        self._next = 0
        self._ahead = ahead
        self._pending: deque[Future[Result]] = deque()
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="data") if workers else None
        self._closed = False

    def __next__(self) -> Result:
        if self._closed:
            raise StopIteration
        if self._executor is None:
            self._next += 1
            return self._make(self._next - 1)
        while len(self._pending) < self._ahead:
            self._pending.append(self._executor.submit(self._make, self._next))
            self._next += 1
        future = self._pending.popleft()
        self._pending.append(self._executor.submit(self._make, self._next))
        self._next += 1
        return future.result()

    def close(self) -> None:
        """Stop the threads; further `next` calls end the iteration."""
        self._closed = True
        self._pending.clear()
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Prefetcher[Result]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
