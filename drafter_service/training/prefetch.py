"""How are batches made while the device is busy with others?"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")
_POLL_S = 0.1


class Prefetch(Generic[Item]):
    """Runs an iterator in a thread of its own, at most `depth` items ahead. A context manager that is iterated over.

    An error of the iterator is raised where its item would have been. The thread ends with the context.
    """

    def __init__(self, source: Iterator[Item], depth: int) -> None:
        self._source = source
        self._queue: queue.Queue[Item | _End] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)

    def __enter__(self) -> Prefetch[Item]:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join()

    def __iter__(self) -> Iterator[Item]:
        while True:
            item = self._queue.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item

    def _work(self) -> None:
        error: Exception | None = None
        try:
            for item in self._source:
                if not self._put(item):
                    return
        except Exception as raised:  # whatever it is, the consumer gets it
            error = raised
        self._put(_End(error))

    def _put(self, item: Item | _End) -> bool:
        """False once the context is closed."""
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False


class _End:
    def __init__(self, error: Exception | None) -> None:
        self.error = error
