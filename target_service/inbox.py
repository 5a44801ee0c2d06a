"""What waits for the device thread?

Jobs, in a bounded queue, first come first served; and news that a step under way is done, which goes before them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Generic, TypeVar

Job = TypeVar("Job")
News = TypeVar("News")


class Inbox(Generic[Job, News]):
    """Any thread puts, one thread takes. News are not bounded here: there are no more of them than steps under way."""

    def __init__(self, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        self._jobs: deque[Job] = deque()
        self._news: deque[News] = deque()
        self._changed = threading.Condition()

    def put(self, job: Job, timeout_s: float) -> bool:
        """Queue a job, waiting for room up to timeout_s. False: there was none."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while len(self._jobs) >= self._max_jobs:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
            self._jobs.append(job)
            self._changed.notify_all()
        return True

    def tell(self, news: News) -> None:
        """Hand over news."""
        with self._changed:
            self._news.append(news)
            self._changed.notify_all()

    def take(self, timeout_s: float) -> tuple[Job | None, News | None]:
        """The oldest news, or else the oldest job; (None, None) when neither came within timeout_s."""
        with self._changed:
            if not self._news and not self._jobs:
                self._changed.wait(timeout_s)
            if self._news:
                return None, self._news.popleft()
            if self._jobs:
                job = self._jobs.popleft()
                self._changed.notify_all()
                return job, None
        return None, None
