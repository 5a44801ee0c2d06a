"""A kernel that never ends costs users time and nothing else: the service ends, and requests go on without it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.stack import ROOT, Stack, running_stack
from tests.end_to_end.test_faults import Reader
from tests.end_to_end.variants import prompts
from tests.gpu.fleet import DEVICE, DRAFTER_DEVICE, NEEDS_GPU, device_section
from tests.tiny_models import make_tiny_model

pytestmark = [
    NEEDS_GPU,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(DEVICE == "cpu", reason="a CPU has no kernels that hang"),
]

NUM_TOKENS = 600
DEVICE_DEADLINE_S = 8.0
# The most that a step may wait for besides: 5 * 0.2 s in the target, 2 s in the drafter; then a look, and the end.
ENDED_AFTER_S = DEVICE_DEADLINE_S + 6.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    root = tmp_path_factory.mktemp("hung")
    model = make_tiny_model(root / "model", max_position_embeddings=4096)
    target = {**device_section(), "num_blocks": 2048, "device_deadline_s": DEVICE_DEADLINE_S, "max_wait_ms": 200}
    drafter = {
        "method": "eagle3",
        "random_head": {"seed": 3},
        "device_deadline_s": DEVICE_DEADLINE_S,
        "max_entry_wait_s": 2.0,
        **device_section(DRAFTER_DEVICE),
    }
    gateway = {"depth": 3, "target_wait_s": 200, "step_deadline_ms": 200, "reconnect_max_s": 0.05}
    with running_stack(root, model, target, drafter, gateway) as running:
        yield running


def _reader(stack: Stack) -> Reader:
    return Reader(stack, prompts()[0], NUM_TOKENS)


def _expected(stack: Stack) -> list[int]:
    reader = _reader(stack)
    reader.finish()
    assert len(reader.token_ids) == NUM_TOKENS
    return reader.token_ids


def _replace(stack: Stack, name: str) -> Path:
    """Start the service anew, to hang when the file returned is there."""
    stack.stop(name)
    flag = stack.log_dir / f"{name}-hangs"
    with open(stack.log_path(name), "ab") as log:
        arguments = ["-m", "tests.gpu.hung_service", name, str(flag), "--config", str(stack.config_path)]
        stack.processes[name] = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=log, stderr=log)
    stack.wait_serving("target", "drafter")
    return flag


def _wait_end(stack: Stack, name: str) -> int:
    started = time.monotonic()
    try:
        status = stack.processes[name].wait(ENDED_AFTER_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{name} still runs:\n{stack.log(name)}") from None
    print(f"{name} ended with {status} after {time.monotonic() - started:.1f} s")
    assert "the GPU hangs" in stack.log(name)
    assert "is not done after" in stack.log(name)
    return status


def test_a_drafter_that_hangs_ends_and_nobody_waits_for_it(stack: Stack) -> None:
    expected = _expected(stack)
    flag = _replace(stack, "drafter")
    reader = _reader(stack)
    reader.wait_tokens(20)
    flag.touch()
    reader.finish()
    assert reader.token_ids == expected
    if flag.exists():  # it was faster than the test: another one
        reader = _reader(stack)
        reader.finish()
        assert reader.token_ids == expected
    assert _wait_end(stack, "drafter") == 1
    stack.start("drafter")
    stack.wait_serving("target", "drafter")


def test_a_target_that_hangs_ends_and_its_requests_go_on(stack: Stack) -> None:
    expected = _expected(stack)
    flag = _replace(stack, "target")
    reader = _reader(stack)
    reader.wait_tokens(20)
    flag.touch()
    assert _wait_end(stack, "target") == 3
    assert 0 < len(reader.token_ids) < NUM_TOKENS
    stack.start("target")
    reader.finish()
    assert reader.token_ids == expected
