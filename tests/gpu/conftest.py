"""One MPS daemon, the tiny models, the fleet of stacks and both sets of kernels, for all GPU tests of a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.shared_gpu import shared_gpu
from kernels.kernel_set import KernelSet, kernel_set
from tests.end_to_end.stack import Stack
from tests.end_to_end.variants import Models
from tests.gpu.fleet import DEVICE, Fleet


@pytest.fixture(scope="session")
def mps() -> Iterator[dict[str, str]]:
    """The environment that makes processes share the GPU; it is in ours too."""
    with shared_gpu(torch.device(DEVICE)) as env:
        yield env


@pytest.fixture(scope="session")
def triton() -> KernelSet:
    """The kernels under test."""
    return kernel_set("triton")


@pytest.fixture(scope="session")
def plain() -> KernelSet:
    """Their references."""
    return kernel_set("reference")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The session's tiny models."""
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def fleet(
    request: pytest.FixtureRequest, mps: dict[str, str], models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """Every stack that a selected test names, starting."""
    names: dict[str, None] = {}
    for item in request.session.items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and "stack_name" in callspec.params:
            names[callspec.params["stack_name"]] = None
    running = Fleet(list(names), models, Path(tmp_path_factory.mktemp("fleet")))
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def stack(fleet: Fleet, stack_name: str) -> Stack:
    """The stack that the test names."""
    return fleet[stack_name]
