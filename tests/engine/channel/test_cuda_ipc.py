"""The cuda_ipc channel without a GPU: both ends, the watchdog and the end of either process, on simulated devices."""

from __future__ import annotations

import gc
import threading
import time
from functools import partial

import pytest

from engine.channel import watchdog
from engine.channel.control import Word, reached
from engine.channel.cuda_ipc import CudaIpcDrafterEnd
from engine.errors import ChannelError
from tests.engine.channel.device_ends import NOTICED_S, PATIENCE_S, Ends, hold_up, released_after_s, until
from tests.engine.channel.device_peer import AHEAD, HEARTBEAT_S, NUM_STEPS
from tests.engine.channel.device_steps import Counts, drafter_step, target_step, write_entry
from tests.engine.channel.entries import SPEC, decode, encode, wrong_tensors
from tests.engine.channel.simulated import SimulatedDriver
from tests.processes import ProcessGroup, TestProcess

PEER = "tests.engine.channel.device_peer"


def start_peer(processes: ProcessGroup, ends: Ends, mode: str) -> TestProcess:
    peer = processes.python("-m", PEER, "simulated", mode, encode(ends.target.describe()))
    peer.wait_for_line("^attached$")
    return peer


def test_steps_cross_processes_with_plans_running_ahead(processes: ProcessGroup, ends: Ends) -> None:
    peer = start_peer(processes, ends, "answer")
    counts = Counts(ends.device.device)
    for seq in range(1, NUM_STEPS + 1):
        target_step(ends.target, ends.device, seq, counts, PATIENCE_S)
        if seq % AHEAD == 0:
            ends.device.synchronize()
    ends.device.synchronize()
    assert peer.wait_for_line("^read absent=(.*)$")[0] == "read absent=0 wrong=0"
    assert (counts.absent.item(), counts.wrong.item()) == (0, 0)
    peer.wait_for_line("^ended True$")
    assert peer.wait() == 0


def test_ends_in_one_process_see_each_others_writes(ends: Ends) -> None:
    drafter = ends.attach()
    counts, drafter_counts = Counts(ends.device.device), Counts(ends.device.device)
    for seq in range(1, 20):
        target_step(ends.target, ends.device, seq, counts, PATIENCE_S)
        drafter_step(drafter, ends.drafter_device, seq, drafter_counts, PATIENCE_S)
    ends.device.synchronize()
    ends.drafter_device.synchronize()
    assert [int(count) for count in (counts.absent, counts.wrong)] == [0, 0]
    assert [int(count) for count in (drafter_counts.absent, drafter_counts.wrong)] == [0, 0]


def test_without_time_nothing_is_waited_for(ends: Ends) -> None:
    drafter = ends.attach()
    counts = Counts(ends.device.device)
    drafter_step(drafter, ends.drafter_device, 1, counts, 0.0)
    assert not ends.target._watchdog._waits
    assert released_after_s(ends.drafter_device) < 1.0
    assert counts.absent.item() == 1


def test_an_overwritten_entry_is_absent(ends: Ends) -> None:
    drafter = ends.attach()
    counts = Counts(ends.device.device)
    for seq in range(1, SPEC.depth + 2):
        header, entry = ends.target.ring(seq)
        ends.device.run(partial(write_entry, header, entry, SPEC, seq))
        ends.target.publish(seq)
    ends.device.synchronize()
    drafter_step(drafter, ends.drafter_device, 1, counts, PATIENCE_S)
    drafter_step(drafter, ends.drafter_device, 2, counts, PATIENCE_S)
    ends.drafter_device.synchronize()
    assert (counts.absent.item(), counts.wrong.item()) == (1, 0)


def test_the_time_of_a_wait_for_a_reply_begins_with_the_publication(processes: ProcessGroup, ends: Ends) -> None:
    peer = start_peer(processes, ends, "mute")
    counts = Counts(ends.device.device)
    ends.device.run(lambda: time.sleep(0.5))  # a long step: its drafter can do nothing yet
    target_step(ends.target, ends.device, 1, counts, 0.3)
    target_step(ends.target, ends.device, 2, counts, 0.3)
    assert 0.7 < released_after_s(ends.device) < NOTICED_S
    assert counts.absent.item() == 1
    assert ends.target.peer_alive()
    peer.kill()  # or the end of the channel would wait for it to unmap


def test_waits_enqueued_so_far_are_released_at_once_and_later_ones_are_not(ends: Ends) -> None:
    ends.attach()
    for seq in (1, 2, 3):
        ends.target.publish(seq)
        ends.target.wait_reply(seq, PATIENCE_S)
    ends.target.release_waits()
    assert released_after_s(ends.device) < NOTICED_S
    ends.target.publish(4)
    ends.target.wait_reply(4, 0.3)
    assert released_after_s(ends.device) > 0.25
    ends.target.close()
    ends.target.release_waits()


def test_the_time_of_a_wait_for_a_step_begins_at_once(ends: Ends) -> None:
    drafter = ends.attach()
    counts = Counts(ends.device.device)
    for seq in (1, 2, 3):  # waits run at the same time, though one stands behind the other
        drafter_step(drafter, ends.drafter_device, seq, counts, 0.4)
    assert 0.3 < released_after_s(ends.drafter_device) < 1.1
    assert counts.absent.item() == 3


def test_a_killed_drafter_releases_the_targets_stream(processes: ProcessGroup, ends: Ends) -> None:
    peer = start_peer(processes, ends, "mute")
    counts = Counts(ends.device.device)
    target_step(ends.target, ends.device, 1, counts, PATIENCE_S)
    target_step(ends.target, ends.device, 2, counts, PATIENCE_S)
    peer.kill()
    assert released_after_s(ends.device) < NOTICED_S
    assert not ends.target.peer_alive()
    start = time.monotonic()
    for seq in range(3, 103):  # nobody waits for the dead any more
        target_step(ends.target, ends.device, seq, counts, PATIENCE_S)
    ends.device.synchronize()
    assert time.monotonic() - start < NOTICED_S
    assert counts.absent.item() == 101
    memory = ends.memory_file()
    ends.target.close()
    assert ends.target.wait_closed(NOTICED_S)
    gc.collect()
    assert not memory.exists()


def test_the_streams_of_the_dead_are_released_too(processes: ProcessGroup, ends: Ends) -> None:
    peer = start_peer(processes, ends, "mute")
    counts = Counts(ends.device.device)
    for seq in (1, 2):
        target_step(ends.target, ends.device, seq, counts, PATIENCE_S)
    peer.kill()
    ends.device.synchronize()
    # The release let step 2 be published, which lowered the word again.
    until(lambda: reached(ends.target._control.low(Word.TARGET_SEQ), 100))


def test_a_drafter_that_comes_again_attaches_to_a_new_channel(processes: ProcessGroup, ends: Ends) -> None:
    start_peer(processes, ends, "mute").kill()
    with pytest.raises(ChannelError, match="drafter_state"):
        ends.attach()
    ends.target.close()
    again = Ends(epoch=SPEC.epoch + 1)
    peer = start_peer(processes, again, "answer")
    counts = Counts(again.device.device)
    for seq in range(1, NUM_STEPS + 1):
        target_step(again.target, again.device, seq, counts, PATIENCE_S)
    again.device.synchronize()
    assert peer.wait_for_line("^read absent=(.*)$")[0] == "read absent=0 wrong=0"
    assert (counts.absent.item(), counts.wrong.item()) == (0, 0)
    again.close()


def test_a_killed_target_releases_the_drafters_stream(processes: ProcessGroup) -> None:
    target = processes.python("-m", PEER, "simulated", "target")
    description = decode(target.wait_for_line("^channel (.*)$")[1])
    device = SimulatedDriver()
    drafter = CudaIpcDrafterEnd(description, device, HEARTBEAT_S)
    counts = Counts(device.device)
    drafter_step(drafter, device, 1, counts, PATIENCE_S)
    drafter_step(drafter, device, 2, counts, PATIENCE_S)
    target.kill()
    assert released_after_s(device) < NOTICED_S
    assert not drafter.peer_alive()
    assert not drafter.closed
    assert (counts.absent.item(), counts.wrong.item()) == (1, 0)
    drafter.close()
    assert drafter.wait_closed(NOTICED_S)
    assert device.stream.faults == []


def test_closing_releases_both_ends_and_frees_everything(ends: Ends) -> None:
    drafter = ends.attach()
    counts = Counts(ends.device.device)
    files = ends.page_file(), ends.memory_file()
    target_step(ends.target, ends.device, 1, counts, PATIENCE_S)
    target_step(ends.target, ends.device, 2, counts, PATIENCE_S)
    for seq in (3, 4):
        drafter_step(drafter, ends.drafter_device, seq, counts, PATIENCE_S)
    closer = threading.Thread(target=ends.target.close)
    closer.start()
    assert released_after_s(ends.device) < NOTICED_S
    assert released_after_s(ends.drafter_device) < NOTICED_S
    closer.join()
    assert ends.target.closed
    assert drafter.closed
    assert not files[0].exists()
    assert not ends.target.wait_closed(0.1)  # the drafter lives and may still read
    assert files[1].exists()
    drafter.close()
    assert drafter.wait_closed(NOTICED_S)
    assert ends.target.wait_closed(NOTICED_S)
    gc.collect()
    assert not files[1].exists()
    for use in (lambda: ends.target.ring(3), lambda: ends.target.publish(3), lambda: ends.target.wait_reply(1, 1.0)):
        with pytest.raises(ChannelError, match="is closed"):
            use()
    with pytest.raises(ChannelError, match="is closed"):
        drafter.publish_reply(9)


def test_views_outlive_a_closed_channel(ends: Ends) -> None:
    drafter = ends.attach()
    memory = ends.memory_file()
    target_step(ends.target, ends.device, 1, Counts(ends.device.device), PATIENCE_S)
    ends.device.synchronize()
    entry = drafter.ring(1)[1]
    drafter.close()
    ends.target.close()
    assert not ends.target.wait_closed(0.2)
    assert wrong_tensors(entry) == []
    assert memory.exists()
    del entry
    gc.collect()
    assert ends.target.wait_closed(NOTICED_S)


def test_closing_waits_for_the_device_and_holds_nobody_up(ends: Ends) -> None:
    go = threading.Event()
    hold_up(ends.device, go)
    target_step(ends.target, ends.device, 1, Counts(ends.device.device), PATIENCE_S)
    start = time.monotonic()
    ends.target.close()
    assert time.monotonic() - start < 1.0
    assert not ends.target.wait_closed(0.2)
    go.set()
    assert ends.target.wait_closed(NOTICED_S)
    ends.device.synchronize()  # and no work found its page gone


def test_an_abandoned_end_releases_its_peer() -> None:
    ends = Ends()
    drafter = ends.attach()
    drafter_step(drafter, ends.drafter_device, 1, Counts(ends.device.device), PATIENCE_S)
    del ends.target
    gc.collect()
    assert released_after_s(ends.drafter_device) < NOTICED_S
    assert drafter.closed
    drafter.close()


def test_a_late_publication_does_not_catch_a_released_wait_again(ends: Ends) -> None:
    """The peer's device may store a smaller number after ours was raised, before our stream comes to the wait."""
    ends.attach()
    control = ends.target._control
    counts = Counts(ends.device.device)
    for seq in (1, 2, 3):
        target_step(ends.target, ends.device, seq, counts, 0.05)
    ends.device.synchronize()
    go = threading.Event()
    hold_up(ends.device, go)
    target_step(ends.target, ends.device, 4, counts, 0.05)
    until(lambda: reached(control.low(Word.DRAFTER_SEQ), 3))
    for late in (1, 2):
        control._halves[Word.DRAFTER_SEQ].value = late
        until(lambda: reached(control.low(Word.DRAFTER_SEQ), 3))
    control._halves[Word.DRAFTER_SEQ].value = 1
    go.set()
    ends.device.synchronize(PATIENCE_S)
    until(lambda: not ends.target._watchdog._waits)
    control._halves[Word.DRAFTER_SEQ].value = 2  # and once the stream is past it, nobody raises the word any more
    time.sleep(4 * watchdog.LOOK_EVERY_S)  # what must not happen has no event to wait for
    assert control.low(Word.DRAFTER_SEQ) == 2


@pytest.mark.parametrize(
    ("low", "number", "is_reached"),
    [
        (0, 0, True),
        (0, 1, False),
        (7, 7, True),
        (8, 7, True),
        (0xFFFFFFFF, 1 << 32, False),
        (0, 1 << 32, True),
        (5, (1 << 32) - 3, True),
        ((1 << 32) - 3, (1 << 32) + 5, False),
        (0x7FFFFFFF, 0, True),
        (0x80000000, 0, False),
    ],
)
def test_counters_are_compared_cyclically(low: int, number: int, is_reached: bool) -> None:
    assert reached(low, number) is is_reached


def test_steps_go_on_where_the_counters_wrap(ends: Ends) -> None:
    drafter = ends.attach()
    first = (1 << 32) - 3
    for word in (Word.TARGET_SEQ, Word.DRAFTER_SEQ):
        ends.target._control._halves[word].value = first - 1
    counts, drafter_counts = Counts(ends.device.device), Counts(ends.device.device)
    ends.target._published = first - 1
    for seq in range(first, first + 8):
        target_step(ends.target, ends.device, seq, counts, PATIENCE_S)
        drafter_step(drafter, ends.drafter_device, seq, drafter_counts, PATIENCE_S)
    ends.device.synchronize()
    ends.drafter_device.synchronize()
    assert counts.absent.item() == 1  # step first - 1 was never written
    assert drafter_counts.absent.item() == 0
    assert ends.target._control.low(Word.TARGET_SEQ) == (first + 7) & 0xFFFFFFFF
