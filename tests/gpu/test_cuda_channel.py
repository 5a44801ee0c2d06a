"""The cuda_ipc channel between two processes on a real GPU: data, order, and either of them killed.

With OUTRIDER_TEST_DEVICE=cpu the same runs on simulated devices. OUTRIDER_TEST_PEER_DEVICE: a GPU of the drafter's own.
"""

from __future__ import annotations

import os

import pytest

from tests.gpu.fleet import DEVICE, NEEDS_GPU
from tests.processes import ProcessGroup, TestProcess

pytestmark = NEEDS_GPU

PEER = "tests.engine.channel.device_peer"
OURS = "simulated" if DEVICE == "cpu" else "cuda:0"
THEIRS = os.environ.get("OUTRIDER_TEST_PEER_DEVICE", OURS)
START_S = 120.0
NOTICED_S = 10.0
# Others may use the device meanwhile, and the driver keeps some for itself; a channel that leaked is larger.
SLACK_BYTES = 1 << 20


@pytest.fixture(params=["alone", "mps"])
def environment(request: pytest.FixtureRequest) -> dict[str, str]:
    """Of both processes: each with the GPU in turn, or at once under MPS."""
    if request.param == "alone":
        return {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}
    if DEVICE == "cpu":
        pytest.skip("MPS is for GPUs")
    env: dict[str, str] = request.getfixturevalue("mps")
    if not env:
        pytest.skip("no MPS daemon could be started")
    return env


def start(processes: ProcessGroup, env: dict[str, str], device: str, *arguments: str) -> TestProcess:
    return processes.python("-m", PEER, device, *arguments, env=env)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_byte_crosses_both_ways_in_order(
    processes: ProcessGroup, environment: dict[str, str], dtype: str
) -> None:
    target = start(processes, environment, OURS, "lead", dtype)
    word = target.wait_for_line("^next channel (.*)$", START_S)[1]
    drafter = start(processes, environment, THEIRS, "answer", word)
    assert drafter.wait_for_line("^read absent=.*$", START_S)[0] == "read absent=0 wrong=0"
    assert target.wait_for_line("^read absent=.*$", START_S)[0] == "read absent=0 wrong=0"
    drafter.wait_for_line("^ended True$")
    target.wait_for_line("^ended True$")
    assert int(target.wait_for_line(r"^leaked (\d+)$")[1]) < SLACK_BYTES
    assert (target.wait(), drafter.wait()) == (0, 0)


def test_a_killed_drafter_hangs_nothing_and_leaks_nothing(processes: ProcessGroup, environment: dict[str, str]) -> None:
    target = start(processes, environment, OURS, "lead-twice", "bfloat16")
    word = target.wait_for_line("^channel (.*)$", START_S)[1]
    first = start(processes, environment, THEIRS, "mute", word)
    first.wait_for_line("^attached$", START_S)
    target.wait_for_line("^waiting$")
    first.kill()
    released = target.wait_for_line(r"^released after ([\d.]+) s absent=(\d)$", START_S)
    print(f"released {released[1]} s after the kill")
    assert float(released[1]) < NOTICED_S
    assert released[2] == "1"
    target.wait_for_line("^first ended True$")
    word = target.wait_for_line("^next channel (.*)$")[1]
    second = start(processes, environment, THEIRS, "answer", word)
    assert second.wait_for_line("^read absent=.*$", START_S)[0] == "read absent=0 wrong=0"
    assert target.wait_for_line("^read absent=.*$", START_S)[0] == "read absent=0 wrong=0"
    second.wait_for_line("^ended True$")
    second.wait()
    assert int(target.wait_for_line(r"^leaked (\d+)$", START_S)[1]) < SLACK_BYTES
    assert target.wait() == 0


def test_a_killed_target_hangs_nothing(processes: ProcessGroup, environment: dict[str, str]) -> None:
    target = start(processes, environment, OURS, "target")
    word = target.wait_for_line("^channel (.*)$", START_S)[1]
    drafter = start(processes, environment, THEIRS, "follow", word)
    assert drafter.wait_for_line("^followed .*$", START_S)[0] == "followed absent=0 wrong=0"
    target.kill()
    released = drafter.wait_for_line(r"^released after ([\d.]+) s absent=(\d)$", START_S)
    print(f"released {released[1]} s after the kill")
    assert float(released[1]) < NOTICED_S
    # The memory of the dead is still mapped: reading it must harm nobody.
    drafter.wait_for_line(r"^again absent=\d wrong=0$", START_S)
    drafter.wait_for_line("^ended True$")
    assert drafter.wait() == 0
