"""Does the split change a single bit? bf16, two processes over the channel against the same code in one process.

The same plans go to both; tokens and logprobs (floats, compared as they are) must be equal, in run-ahead and in
lockstep. With `synthetic` acceptance drafts are accepted whatever they are, so that the tokens show the drafter's bits
too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.one_process import OneProcess
from benchmarks.plan_driver import Load, PlanDriver, Timeline
from benchmarks.services import Services
from tests.end_to_end.variants import prompts
from tests.gpu.fleet import DEVICE, NEEDS_GPU, device_section
from tests.tiny_models import make_tiny_model

pytestmark = [NEEDS_GPU, pytest.mark.slow, pytest.mark.timeout(200)]

DRAFT_LEN = 3
NUM_STEPS = 40
DEADLINE_MS = 20_000
ACCEPTS = ("exact", "synthetic:2.5")


@dataclass(frozen=True, slots=True)
class Pair:
    """The same settings, split and not."""

    split: Services
    one: OneProcess


def _sections(accept: str) -> tuple[dict[str, Any], dict[str, Any]]:
    both = {
        **device_section(),
        "dtype": "bfloat16" if DEVICE != "cpu" else "float32",
        "num_seats": 8,
        "num_blocks": 512,
        "prefix_caching": False,  # a prompt run in other pieces may differ in its last bits
        "heartbeat_deadline_s": 10.0,
    }
    if DEVICE == "cpu":  # to try the test
        both |= {"threads": 1, "attention": "reference"}
    target = {**both, "execution": "device", "accept": accept, "max_verify_len": DRAFT_LEN, "max_wait_ms": DEADLINE_MS}
    return target, {**both, "method": "eagle3", "random_head": {"seed": 5}, "max_draft_len": DRAFT_LEN}


@pytest.fixture(scope="module")
def pairs(mps: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    root: Path = tmp_path_factory.mktemp("pairs")
    model = str(make_tiny_model(root / "model"))
    with ExitStack() as stack:
        found = {}
        for index, accept in enumerate(ACCEPTS):
            target, drafter = _sections(accept)
            split = stack.enter_context(Services(root / f"split{index}", model, target, drafter))
            one = stack.enter_context(OneProcess(root / f"one{index}", model, target, drafter))
            found[accept] = Pair(split, one)
        for pair in found.values():
            pair.split.wait_ready()
            pair.one.wait_ready()
        yield found


def _load() -> Load:
    chosen = [list(prompts()[index]) for index in (3, 5, 6, 9, 14)]
    return Load(chosen, DRAFT_LEN, NUM_STEPS * (DRAFT_LEN + 1) + 32, logprobs=True)


def _run_split(services: Services, depth: int) -> Timeline:
    async def run() -> Timeline:
        async with PlanDriver(services.target_address, services.drafter_address, "split", DEADLINE_MS) as driver:
            await driver.place(_load())
            timeline = await driver.decode(NUM_STEPS, depth)
            await driver.release()
            return timeline

    return asyncio.run(run())


def _outcome(timeline: Timeline) -> list[list[tuple[list[int], int, list[float]]]]:
    """Tokens, accepted drafts and logprobs of every row of every step."""
    return [
        [(list(row.token_ids), row.num_accepted, [entry.logprob for entry in row.logprobs]) for row in result.rows]
        for result in timeline.results
    ]


@pytest.mark.parametrize("accept", ACCEPTS)
def test_split_equals_one_process_bit_for_bit(pairs: dict[str, Pair], accept: str) -> None:
    pair = pairs[accept]
    one, *_ = pair.one.run(_load(), 0, NUM_STEPS, 3)
    for depth in (3, 1):
        split = _run_split(pair.split, depth)
        assert split.missed == 0
        assert _outcome(split) == _outcome(one)
    assert all(logprobs for row in _outcome(one) for _, _, logprobs in row)
    if accept != "exact":
        assert one.mean_accepted_len > 1.5
