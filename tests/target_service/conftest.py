"""A tiny model, transformers' own copy of it, and targets that serve it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PreTrainedModel

from target_service.assembly import Target, build_target
from target_service.config import TargetConfig
from target_service.server import TargetServer
from tests.processes import ProcessGroup, TestProcess
from tests.tiny_models import load_reference, make_tiny_model

READY_S = 90.0
EXECUTIONS: dict[str, dict[str, Any]] = {
    "host": {"execution": "host"},
    # Without a GPU: the same code on tensors of the CPU, with an attention that asks the host for no lengths.
    "device": {"execution": "device", "attention": "reference", "graph_rows": [1, 3, 8]},
}


@pytest.fixture(scope="session", params=EXECUTIONS)
def execution(request: pytest.FixtureRequest) -> str:
    """How the targets under test run their steps. Both must do the same."""
    return str(request.param)


def write_config(path: Path, model: Path, **target: Any) -> Path:
    settings = {"listen": "127.0.0.1:0", "threads": 1, "num_blocks": 64, "check_integrity": True, **target}
    path.write_text(yaml.safe_dump({"model": str(model), "target": settings}))
    return path


def start_target(group: ProcessGroup, config: Path) -> tuple[str, TestProcess]:
    """Start a target process; its address, once it is ready."""
    process = group.python("-m", "target_service", "--config", str(config))
    return process.wait_for_line(r"target ready on (\S+) ", READY_S).group(1), process


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def reference(tiny_dir: Path) -> PreTrainedModel:
    return load_reference(tiny_dir)


@pytest.fixture(scope="session")
def target_address(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path, execution: str) -> Iterator[str]:
    """A target in a process of its own, shared by the tests: 64 blocks of 16, 32 seats, integrity always checked."""
    directory = tmp_path_factory.mktemp("target")
    group = ProcessGroup(directory)
    try:
        yield start_target(group, write_config(directory / "target.yaml", tiny_dir, **EXECUTIONS[execution]))[0]
    finally:
        group.close()


LocalTarget = tuple[str, Target]


@pytest.fixture
def local_target(tiny_dir: Path, execution: str) -> Iterator[Callable[..., LocalTarget]]:
    """`local_target(num_blocks=8, ...)` serves in this process: the address, and the target to look into."""
    with ExitStack() as stack:

        def start(**settings: Any) -> LocalTarget:
            config = TargetConfig.model_validate(
                {
                    "listen": "127.0.0.1:0",
                    "num_blocks": 64,
                    "check_integrity": True,
                    "drain_s": 0,
                    **EXECUTIONS[execution],
                    **settings,
                }
            )
            target = build_target(config, "tiny", tiny_dir)
            server = TargetServer(config, target)
            server.start()
            stack.callback(server.stop)
            return server.address, target

        yield start
