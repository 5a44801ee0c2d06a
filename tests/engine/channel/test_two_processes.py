"""The shm channel between two real processes, either of which may be killed at any moment."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from engine.channel import attach_drafter_channel, describe, open_target_channel, reap
from engine.channel.host import SHM_DIR
from engine.channel.shm import ShmTargetChannel
from tests.engine.channel.entries import SPEC, decode, encode, fill, reply_probs, reply_tokens, wrong_tensors
from tests.processes import ProcessGroup, TestProcess

PEER = "tests.engine.channel.peer"
NUM_STEPS = 50
# Far longer than the heartbeat deadline: whoever returns only at the deadline fails the test.
PATIENCE_S = 60.0
NOTICED_S = 10.0
OVERRUN_S = 1.5


@pytest.fixture
def target() -> Iterator[ShmTargetChannel]:
    channel = open_target_channel(SPEC, "shm", heartbeat_deadline_s=1.0, attach_deadline_s=60.0)
    assert isinstance(channel, ShmTargetChannel)
    yield channel
    channel.close()


def start_drafter(processes: ProcessGroup, target: ShmTargetChannel, mode: str = "answer") -> TestProcess:
    drafter = processes.python("-m", PEER, mode, encode(describe(target)))
    drafter.wait_for_line("^attached$")
    return drafter


def test_steps_and_replies_cross_processes_unharmed(processes: ProcessGroup, target: ShmTargetChannel) -> None:
    drafter = start_drafter(processes, target)
    for seq in range(1, NUM_STEPS + 1):
        rows = seq % (SPEC.max_rows + 1)
        fill(target.begin(seq, rows, (seq * 7) % (SPEC.max_tokens + 1)))
        target.publish(seq)
        reply = target.take_reply(seq, PATIENCE_S)
        assert reply is not None, drafter.output
        assert torch.equal(reply.tokens, reply_tokens(seq, rows, SPEC.max_draft_len, SPEC.vocab_size))
        assert reply.probs is not None
        assert torch.equal(reply.probs, reply_probs(seq, rows, SPEC.max_draft_len, SPEC.vocab_size))
    target.close()
    drafter.wait_for_line("^ended closed=True peer_alive=False$")
    assert drafter.wait() == 0
    assert "wrong" not in drafter.output


def test_a_target_that_never_waits_tears_no_entry(processes: ProcessGroup, target: ShmTargetChannel) -> None:
    """The ring is overrun on purpose: whatever the drafter then trusts must still be whole."""
    drafter = start_drafter(processes, target, "chase")
    end = time.monotonic() + OVERRUN_S
    seq = 0
    while time.monotonic() < end:
        seq += 1
        fill(target.begin(seq, SPEC.max_rows, SPEC.max_tokens))
        target.publish(seq)
    assert seq > SPEC.depth
    target.close()
    ended = drafter.wait_for_line(r"^ended whole=(\d+) torn=(\d+)$")
    assert "wrong" not in drafter.output
    assert int(ended[1]) + int(ended[2]) > 0, "the drafter never got to read an entry"


def test_a_killed_drafter_is_noticed_by_the_waiter(processes: ProcessGroup, target: ShmTargetChannel) -> None:
    drafter = start_drafter(processes, target)
    assert target.peer_alive()
    drafter.kill()
    start = time.monotonic()
    assert target.take_reply(1, PATIENCE_S) is None
    assert time.monotonic() - start < NOTICED_S
    assert not target.peer_alive()
    name = describe(target).control.handle.decode()
    assert (SHM_DIR / name).exists()
    target.close()
    assert not (SHM_DIR / name).exists()


def test_a_killed_target_is_noticed_and_its_memory_reaped(processes: ProcessGroup) -> None:
    target = processes.python("-m", PEER, "target")
    description = decode(target.wait_for_line("^channel (.*)$")[1])
    name = description.control.handle.decode()
    drafter = attach_drafter_channel(description, heartbeat_deadline_s=1.0)
    entry = drafter.take_entry(1, PATIENCE_S)
    assert entry is not None
    assert name not in reap()
    target.kill()
    start = time.monotonic()
    assert drafter.take_entry(2, PATIENCE_S) is None
    assert time.monotonic() - start < NOTICED_S
    assert not drafter.peer_alive()
    assert wrong_tensors(entry) == []  # the mapping outlives its exporter
    assert name in reap()
    assert not (SHM_DIR / name).exists()
    drafter.close()


def test_opening_a_channel_reaps(processes: ProcessGroup) -> None:
    dead = processes.python("-m", PEER, "target")
    name = decode(dead.wait_for_line("^channel (.*)$")[1]).control.handle.decode()
    dead.kill()
    assert (SHM_DIR / name).exists()
    open_target_channel(SPEC, "shm").close()
    assert not (SHM_DIR / name).exists()
