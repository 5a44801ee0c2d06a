"""What a cuda_ipc channel refuses, and what its entries look like; on simulated devices."""

from __future__ import annotations

import gc
import os
import threading
import time
from dataclasses import replace

import pytest
import torch

from engine.channel import cuda_ipc, watchdog
from engine.channel.cuda_ipc import CudaIpcDrafterEnd, CudaIpcTargetEnd
from engine.channel.host import SHM_DIR
from engine.channel.layout import SEQ
from engine.channel.memory import PREFIX
from engine.errors import ChannelError
from tests.engine.channel.device_ends import NOTICED_S, PATIENCE_S, Ends, hold_up
from tests.engine.channel.device_peer import HEARTBEAT_S
from tests.engine.channel.device_steps import Counts, target_step
from tests.engine.channel.entries import SPEC
from tests.engine.channel.simulated import SimulatedDriver


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
