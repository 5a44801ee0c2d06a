"""What would the same target and drafter cost in one process?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.plan_driver import Load, Timeline


class OneProcess:
    """A worker process that holds both services' code."""

    def __init__(
        self, directory: Path, model: str, target: Mapping[str, Any], drafter: Mapping[str, Any], env: Mapping[str, str]
    ) -> None: ...
    def __enter__(self) -> OneProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def wait_ready(self) -> None: ...
    def run(self, load: Load, warm: int, steps: int, depth: int) -> tuple[Timeline, dict[str, float]]:
        raise NotImplementedError
