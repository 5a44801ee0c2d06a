"""The cuda_ipc channel without a GPU: both ends, the watchdog and the end of either process, on simulated devices."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.channel import cuda_ipc, watchdog
from engine.channel.control import Word, reached
from engine.channel.cuda_ipc import CudaIpcDrafterEnd, CudaIpcTargetEnd
from engine.channel.host import SHM_DIR
from engine.channel.layout import SEQ
from engine.channel.memory import PREFIX
from engine.errors import ChannelError
from tests.engine.channel.device_peer import AHEAD, HEARTBEAT_S, NUM_STEPS
from tests.engine.channel.device_steps import Counts, drafter_step, target_step, write_entry
from tests.engine.channel.entries import SPEC, decode, encode, spec_with, wrong_tensors
from tests.engine.channel.simulated import SimulatedDriver
from tests.processes import ProcessGroup, TestProcess

PEER = "tests.engine.channel.device_peer"
# Far longer than any deadline: a stream that is not released fails the test.
PATIENCE_S = 60.0
NOTICED_S = 10.0


class Ends:
    """A target's end with its device, and drafter's ends in the same process on devices of their own."""

    def __init__(self, **changes: object) -> None:
        self.device = SimulatedDriver()
        self.target = CudaIpcTargetEnd(spec_with(**changes), self.device, HEARTBEAT_S, PATIENCE_S)
        self.drafter_device = SimulatedDriver()
        self._drafters: list[CudaIpcDrafterEnd] = []

    def attach(self) -> CudaIpcDrafterEnd:
        drafter = CudaIpcDrafterEnd(self.target.describe(), self.drafter_device, HEARTBEAT_S)
        self._drafters.append(drafter)
        return drafter

    def memory_file(self) -> Path:
        return SHM_DIR / self.target.describe().regions[0].handle.decode()

    def page_file(self) -> Path:
        return SHM_DIR / self.target.describe().control.handle.decode()

    def close(self) -> None:
        for end in (*self._drafters, self.target):
            end.close()
        for end in (*self._drafters, self.target):
            assert end.wait_closed(PATIENCE_S)
        assert self.device.stream.faults == self.drafter_device.stream.faults == []


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def start_peer(processes: ProcessGroup, ends: Ends, mode: str) -> TestProcess:
    peer = processes.python("-m", PEER, "simulated", mode, encode(ends.target.describe()))
    peer.wait_for_line("^attached$")
    return peer


def hold_up(device: SimulatedDriver, until: threading.Event) -> None:
    """Enqueue work that takes until then."""

    def wait() -> None:
        until.wait(PATIENCE_S)

    device.run(wait)


def released_after_s(device: SimulatedDriver) -> float:
    start = time.monotonic()
    device.synchronize(PATIENCE_S)
    return time.monotonic() - start


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


def until(condition: object) -> None:
    assert callable(condition)
    end = time.monotonic() + NOTICED_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)  # another thread's work, which signals nothing


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


def test_numbers_that_cannot_be_are_refused(ends: Ends) -> None:
    with pytest.raises(ChannelError, match="step 1 was not published"):
        ends.target.wait_reply(1, 1.0)
    ends.target.publish(5)
    for seq in (5, 4):
        with pytest.raises(ChannelError, match="is not after step 5"):
            ends.target.publish(seq)


def test_waits_without_end_are_refused(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "MAX_WAITS", 10)
    ends.attach()
    ends.target.publish(1)
    ends.device.run(lambda: time.sleep(0.2))
    for _ in range(10):
        ends.target.wait_reply(1, 0.1)
    with pytest.raises(ChannelError, match="10 waits are under way"):
        ends.target.wait_reply(1, 0.1)


def test_every_entry_is_absent_at_first(ends: Ends) -> None:
    drafter = ends.attach()
    for seq in range(1, SPEC.depth + 1):
        assert drafter.ring(seq)[0][SEQ].item() == 0
        assert ends.target.reply(seq).header[SEQ].item() == 0


def test_entries_are_handed_out_at_full_size(ends: Ends) -> None:
    header, entry = ends.target.ring(4)
    assert header.shape == (8,)
    assert (entry.seq, entry.num_rows, entry.num_tokens) == (4, SPEC.max_rows, SPEC.max_tokens)
    assert entry.hidden is not None
    assert entry.hidden.shape == (SPEC.max_tokens, SPEC.hidden_width)
    assert entry.query_start_loc.shape == (SPEC.max_rows + 1,)
    reply = ends.target.reply(4)
    assert reply.probs is not None
    assert reply.probs.shape == (SPEC.max_rows, SPEC.max_draft_len, SPEC.vocab_size)
    assert ends.target.ring(4 + SPEC.depth)[0].data_ptr() == header.data_ptr()


def test_a_channel_of_bfloat16_without_hidden_states_or_probs_has_none() -> None:
    ends = Ends(hidden_width=0, draft_probs=False)
    assert ends.target.ring(1)[1].hidden is None
    assert ends.target.reply(1).probs is None
    assert ends.target.reply(1).has_probs is None
    ends.close()
    ends = Ends(hidden_dtype=torch.bfloat16)
    hidden = ends.attach().ring(1)[1].hidden
    assert hidden is not None
    assert hidden.dtype == torch.bfloat16
    del hidden
    ends.close()


def test_what_the_drafter_cannot_use_is_refused(ends: Ends) -> None:
    description = ends.target.describe()
    regions = description.regions
    elsewhere = tuple(replace(region, device_uuid="SIM-1") for region in regions)
    wider = (regions[0], replace(regions[1], shape=(SPEC.depth, 9)), *regions[2:])
    for wrong, message in (
        (replace(description, regions=elsewhere), "SIM-1.*out of reach"),
        (replace(description, regions=wider), r"regions\[reply.header\]"),
        (replace(description, depth=SPEC.depth + 1), "regions"),
        (replace(description, epoch=SPEC.epoch + 1), "control.epoch"),
        (replace(description, regions=(replace(regions[0], device_uuid="SIM-1"), *regions[1:])), "regions"),
    ):
        with pytest.raises(ChannelError, match=message):
            CudaIpcDrafterEnd(wrong, ends.drafter_device, HEARTBEAT_S)


def test_an_exporter_cannot_open_its_own_memory(ends: Ends) -> None:
    with pytest.raises(ChannelError, match="exported by this very process"):
        CudaIpcDrafterEnd(ends.target.describe(), ends.device, HEARTBEAT_S)
    assert not ends.target.peer_alive()


def test_a_device_without_room_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(SHM_DIR.glob(f"{PREFIX}{os.getpid()}-*"))
    device = SimulatedDriver()

    def no_room(buffer: object) -> object:
        raise ChannelError("kind: no room")

    monkeypatch.setattr(device, "register", no_room)
    with pytest.raises(ChannelError, match="no room"):
        CudaIpcTargetEnd(SPEC, device, HEARTBEAT_S, PATIENCE_S)
    gc.collect()
    assert set(SHM_DIR.glob(f"{PREFIX}{os.getpid()}-*")) <= before


def test_patience_with_the_device_is_said_once(ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: object) -> None:
    assert isinstance(caplog, pytest.LogCaptureFixture)
    monkeypatch.setattr(cuda_ipc, "PATIENCE_S", 0.05)
    go = threading.Event()
    hold_up(ends.device, go)
    target_step(ends.target, ends.device, 1, Counts(ends.device.device), PATIENCE_S)
    ends.target.close()
    assert not ends.target.wait_closed(0.3)
    go.set()
    assert ends.target.wait_closed(NOTICED_S)
    assert [record.message for record in caplog.records] == ["cpu is not past a closed channel after 0 s"]
