"""What every test may ask for: reserved localhost ports, and processes that never outlive their test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ports import ReservedPort
from tests.processes import ProcessGroup
from tests.sharing_out import group_of

# Before torch is first imported, and for every process a test starts: the machines that run the tests have few cores,
# and many small tensors are slower, not faster, on several threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share out the tests by `group_of`, in the order in which they are collected."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # the groups of most tests first: they are not the longest
    scheduling: Any = LoadScopeScheduling(config, log)
    scheduling._split_scope = group_of
    return scheduling


@pytest.fixture(scope="session", autouse=True)
def single_torch_thread() -> None:
    """Run torch on one thread."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def reserve_port() -> Iterator[type[ReservedPort]]:
    """`reserve_port()` gives a ReservedPort; all of them are given back when the test ends."""
    held: list[ReservedPort] = []

    class Held(ReservedPort):
        """A reservation that this fixture gives back."""

        def __init__(self) -> None:
            super().__init__()
            held.append(self)

    yield Held
    for port in held:
        port.close()


@pytest.fixture
def free_port(reserve_port: type[ReservedPort]) -> int:
    """One free localhost port, reserved until the test ends (see ReservedPort)."""
    return reserve_port().port


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[ProcessGroup]:
    """Starts processes and ends them, and whatever they started, with the test."""
    group = ProcessGroup(tmp_path)
    try:
        yield group
    finally:
        group.close()
