"""What do users see when a service on the GPU is killed or stands still under load, and what stays behind?

`kill -9` and SIGSTOP of real processes whose streams wait for each other on the device. The tokens must be those of an
undisturbed run, no stream may hang, and the GPU's memory must come back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from benchmarks.floor import BusySampler
from tests.end_to_end.stack import Stack, running_stack
from tests.end_to_end.test_faults import Reader
from tests.end_to_end.variants import prompts
from tests.gpu.fleet import DEVICE, DRAFTER_DEVICE, GPU_INDEX, NEEDS_GPU, device_section
from tests.tiny_models import make_tiny_model

pytestmark = [NEEDS_GPU, pytest.mark.slow, pytest.mark.timeout(90)]

NUM_TOKENS = 600 if DEVICE != "cpu" else 300
NUM_STREAMS = 6
DRAFT_LEN = 4
KILLS = 2
DEADLINE_S = 30  # of an answer that is disturbed
LEAK_BYTES = 32 << 20  # less than the least that a process holds on a GPU
DRAFTED = "outrider_draft_tokens_total"


@pytest.fixture(scope="module")
def stack(mps: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = make_tiny_model(tmp_path_factory.mktemp("long"), max_position_embeddings=4096)
    drafter = {
        "method": "eagle3",
        "random_head": {"seed": 3},
        "max_draft_len": DRAFT_LEN,
        **device_section(DRAFTER_DEVICE),
    }
    gateway = {"depth": 3, "target_wait_s": 120, "step_deadline_ms": 300, "reconnect_max_s": 0.05}
    target = {**device_section(), "num_blocks": 2048}
    with running_stack(tmp_path_factory.mktemp("faults"), model, target, drafter, gateway) as running:
        yield running


@pytest.fixture(scope="module")
def expected(stack: Stack) -> list[list[int]]:
    """What the target alone answers; that it is transformers' answer is shown elsewhere."""
    chosen = prompts()[:NUM_STREAMS]
    answers = [stack.complete(list(prompt), NUM_TOKENS, draft_len=0, ignore_eos=True) for prompt in chosen]
    return [answer["choices"][0]["outrider"]["token_ids"] for answer in answers]


def _under_load(stack: Stack) -> list[Reader]:
    readers = [Reader(stack, prompt, NUM_TOKENS, draft_len=DRAFT_LEN) for prompt in prompts()[:NUM_STREAMS]]
    for reader in readers:
        reader.wait_tokens(20)
    return readers


def _all_as_expected(readers: list[Reader], expected: list[list[int]], deadline_s: float = DEADLINE_S) -> None:
    for reader, tokens in zip(readers, expected, strict=True):
        reader.finish(deadline_s)
        assert reader.token_ids == tokens  # none twice, none missing


def _wait_drafting(stack: Stack) -> None:
    before = stack.metrics()[DRAFTED]

    def drafted() -> bool:
        stack.complete([5, 6, 7], 8, draft_len=DRAFT_LEN, ignore_eos=True)
        return stack.metrics()[DRAFTED] > before

    stack.wait_until("drafting is back", drafted, DEADLINE_S)


def test_drafter_killed_under_load_again_and_again(stack: Stack, expected: list[list[int]]) -> None:
    gpu = BusySampler(GPU_INDEX)
    used: list[int] = []
    for _ in range(KILLS):
        _wait_drafting(stack)
        readers = _under_load(stack)
        start = time.monotonic()
        stack.kill("drafter")
        _all_as_expected(readers, expected)
        print(f"all answers {time.monotonic() - start:.2f} s after the kill")
        stack.start("drafter")
        stack.wait_serving("target", "drafter")
        _wait_drafting(stack)
        print(f"drafting again {time.monotonic() - start:.2f} s after the kill")
        used.append(gpu.memory_used() or 0)
    # From the first kill on: what the target keeps for steps under load, it has by then.
    grown = [after - used[0] for after in used[1:]]
    assert max(grown) < LEAK_BYTES, grown


def test_drafter_stands_still(stack: Stack, expected: list[list[int]]) -> None:
    _wait_drafting(stack)
    readers = _under_load(stack)
    start = time.monotonic()
    with stack.paused("drafter"):
        _all_as_expected(readers, expected)
    print(f"all answers {time.monotonic() - start:.2f} s after the stop")
    _wait_drafting(stack)


def test_target_killed_under_load(stack: Stack, expected: list[list[int]]) -> None:
    readers = _under_load(stack)
    stack.kill("target")
    assert stack.processes["drafter"].poll() is None
    start = time.monotonic()
    stack.start("target")
    _all_as_expected(readers, expected, 2 * DEADLINE_S)  # a target must load first
    print(f"all answers {time.monotonic() - start:.2f} s after the kill")
    assert stack.processes["drafter"].poll() is None, stack.log("drafter")
    _wait_drafting(stack)


def test_clean_stop(stack: Stack) -> None:
    assert [stack.stop(name) for name in ("gateway", "drafter", "target")] == [0, 0, 0]
