"""Do two ranks over NCCL that replay captured steps, collectives included, tell what one rank tells, and what they tell
without graphs? And does a lost rank end a target whose stream stands in a captured collective?

OUTRIDER_TEST_DEVICE=cpu tries the tests themselves over gloo, where nothing is captured.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.variants import Models
from tests.gpu.fleet import DEVICE, NEEDS_GPU
from tests.processes import ProcessGroup, TestProcess
from tests.target_service.conftest import EXECUTIONS, write_config
from tests.target_service.gateway_client import Driver, Gateway, Running
from tests.target_service.pcp.test_launched_faults import lose_a_rank
from tests.target_service.scripted_drafter import ScriptedDrafter

ENOUGH = DEVICE == "cpu" or torch.cuda.device_count() > 1
pytestmark = [
    NEEDS_GPU,
    pytest.mark.skipif(not ENOUGH, reason="ranks over NCCL need two GPUs"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

READY_S = 300.0  # kernels may have to be compiled
DRAFT_LEN = 3
SAMPLING: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 5, "seeded": True}, {}, {}, {}]
CASES: dict[str, dict[str, Any]] = {
    "graphs": {"pcp_size": 2},
    "eager": {"pcp_size": 2, "cuda_graphs": False},
    "one": {},
}


def start(processes: ProcessGroup, directory: Path, model: Path, **settings: Any) -> tuple[str, int, TestProcess]:
    """A target's address, how many graphs it captured while warming up, and its process."""
    section = (
        EXECUTIONS["device"]
        if DEVICE == "cpu"
        else {
            "device": DEVICE,
            "attention": "triton",
            "execution": "device",
        }
    )
    own = {"num_blocks": 256, "max_verify_len": DRAFT_LEN, "drain_s": 1, "graph_rows": [1, 4, 8], "dtype": "float32"}
    config = write_config(directory / "target.yaml", model, **{**section, **own, **settings})
    process = processes.python("-m", "target_service", "--config", str(config))
    address = process.wait_for_line(r"target ready on (\S+) .*execution=device", READY_S).group(1)
    if DEVICE == "cpu":
        return address, 0, process
    return address, int(process.wait_for_line(r"warm: (\d+) graphs captured", 1.0).group(1)), process


def run(address: str, known: Sequence[Sequence[int]] | None) -> list[list[int]]:
    """Five requests at a time that end one by one. known: what drafts are taken from; every fourth is wrong."""

    def script(row: int, position: int, drafts: list[int]) -> list[int]:
        return [(draft + 1) % 512 if (position + index) % 4 == 0 else draft for index, draft in enumerate(drafts)]

    with ExitStack() as stack:
        drafter = None
        if known is not None:
            drafter = stack.enter_context(ScriptedDrafter(address, "shm", script, hidden_layers=(0, 2)))
        gateway = stack.enter_context(Gateway(address))
        driver = Driver(gateway, drafter)
        requests: list[Running] = []
        for index, sampling in enumerate(SAMPLING):
            prompt = [(31 * index + 7 * step) % 500 + 3 for step in range(5 + 17 * index)]
            running = driver.request(prompt, 8 + 5 * index, sampling=sampling)
            if known is not None:
                running.full, running.draft_len = [*prompt, *known[index], *[9] * 12], DRAFT_LEN
            requests.append(running)
        driver.run(requests)
        if known is not None:
            assert sum(running.from_draft for running in requests) > 10
        return [running.generated for running in requests]


@dataclass(frozen=True)
class Told:
    """Tokens of each request, without drafts and with them; graphs captured at the start."""

    plain: list[list[int]]
    drafted: list[list[int]]
    captured: int


@pytest.fixture(scope="module")
def told(models: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    """By case. One target after the other: ranks that wait for each other on shared GPUs would take turns."""
    found: dict[str, Told] = {}
    known: list[list[int]] = []
    for name, settings in reversed(CASES.items()):
        directory = tmp_path_factory.mktemp(name)
        processes = ProcessGroup(directory)
        try:
            address, captured, process = start(processes, directory, models.target, **settings)
            plain = run(address, None)
            known = known or plain
            found[name] = Told(plain, run(address, known), captured)
            process.terminate()
            assert process.wait(30) == 0, process.output  # graphs went before the group they have collectives of
        finally:
            processes.close()
    return found


@pytest.mark.parametrize("name", ["graphs", "eager"])
def test_ranks_tell_what_one_rank_tells(told: dict[str, Told], name: str) -> None:
    one, many = told["one"], told[name]
    assert [len(tokens) for tokens in one.plain] == [8, 13, 18, 23, 28]
    assert many.plain == one.plain
    assert one.drafted == one.plain
    assert many.drafted == one.plain


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing is captured without a GPU")
def test_steps_are_captured(told: dict[str, Told]) -> None:
    """As many as on one rank, whose tables have one width as well."""
    assert told["graphs"].captured == told["one"].captured > 0
    assert told["eager"].captured == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_rank_lost_under_captured_load_ends_the_target(
    tmp_path: Path, models: Models, processes: ProcessGroup, number: signal.Signals
) -> None:
    address, captured, process = start(processes, tmp_path, models.target, pcp_size=2)
    assert captured or DEVICE == "cpu"
    lose_a_rank(process, address, number)
