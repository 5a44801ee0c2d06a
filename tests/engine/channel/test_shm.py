"""The shm channel within one process: every byte, tags and epochs, bounds, deadlines, closing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
import torch

from engine.channel import ChannelSpec, attach_drafter_channel, describe, open_target_channel
from engine.channel.host import SHM_DIR
from engine.channel.layout import plan_layout
from engine.channel.shm import ShmDrafterChannel, ShmTargetChannel
from engine.errors import ChannelError
from tests.engine.channel.entries import (
    SPEC,
    fill,
    reply_probs,
    reply_tokens,
    spec_with,
    tensors_of,
    wrong_tensors,
)

NO_WAIT = 0.0
HEARTBEAT_S = 0.4


@contextmanager
def channel_pair(
    spec: ChannelSpec = SPEC, poison: bool = False, heartbeat_s: float = 30.0
) -> Iterator[tuple[ShmTargetChannel, ShmDrafterChannel]]:
    with ExitStack() as stack:
        target = open_target_channel(spec, "shm", heartbeat_s, poison=poison)
        stack.callback(target.close)
        drafter = attach_drafter_channel(describe(target), heartbeat_s)
        stack.callback(drafter.close)
        assert isinstance(target, ShmTargetChannel)
        assert isinstance(drafter, ShmDrafterChannel)
        yield target, drafter


def own_objects() -> set[str]:
    """Memory objects of this process: others may be running beside the tests."""
    return {path.name for path in SHM_DIR.glob(f"outrider-{os.getpid()}-*")}


def publish(target: ShmTargetChannel, seq: int, num_rows: int = 2, num_tokens: int = 5) -> None:
    fill(target.begin(seq, num_rows, num_tokens))
    target.publish(seq)


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        spec_with(hidden_width=0),
        spec_with(hidden_dtype=torch.bfloat16, hidden_width=3),
        spec_with(hidden_dtype=torch.float16, depth=1),
        spec_with(max_rows=1, max_tokens=1, max_draft_len=1, vocab_size=1, max_blocks_per_row=1, draft_probs=False),
    ],
    ids=["odd", "no hidden", "bf16", "fp16 depth 1", "ones"],
)
def test_every_byte_of_every_entry_arrives(spec: ChannelSpec) -> None:
    """On poisoned memory: what an entry claims to hold was written in this step, by either end."""
    with channel_pair(spec, poison=True) as (target, drafter):
        sizes = [(spec.max_rows, spec.max_tokens), (0, 0), (1, 1), (spec.max_rows, 1), (1, spec.max_tokens)]
        for seq, (rows, tokens) in enumerate(sizes, start=1):
            target._regions["reply.tokens"].fill_(99)
            publish(target, seq, rows, tokens)
            entry = drafter.take_entry(seq, NO_WAIT)
            assert entry is not None
            assert (entry.num_rows, entry.num_tokens) == (rows, tokens)
            assert (entry.hidden is None) == (spec.hidden_width == 0)
            assert wrong_tensors(entry) == []
            for drafts in {0, 1, spec.max_draft_len}:
                answered = seq * 10 + drafts
                proposed = reply_tokens(answered, rows, drafts, spec.vocab_size)
                probs = reply_probs(answered, rows, drafts, spec.vocab_size) if spec.draft_probs else None
                drafter.publish_reply(answered, proposed, probs, None)
                reply = target.take_reply(answered, NO_WAIT)
                assert reply is not None
                assert reply.tokens.shape == (rows, spec.max_draft_len)
                assert torch.equal(reply.tokens[:, :drafts], proposed)
                assert (reply.tokens[:, drafts:] == -1).all()
                if probs is None:
                    assert reply.probs is None
                    assert reply.has_probs is None
                else:
                    assert reply.probs is not None
                    assert reply.has_probs is not None
                    assert reply.has_probs.all()
                    assert torch.equal(reply.probs[:, :drafts], probs)
                    assert (reply.probs[:, drafts:] == 0).all()


def test_torch_inference_mode_of_either_thread_does_not_matter() -> None:
    """Services open in one thread and step in another; inference mode belongs to a thread."""
    with ExitStack() as stack:
        with torch.inference_mode():
            target, drafter = stack.enter_context(channel_pair())
            publish(target, 1)
            drafter.publish_reply(1, reply_tokens(1, 2, 3, 11), None, None)
            assert target.take_reply(1, NO_WAIT) is not None
        publish(target, 2)
        drafter.publish_reply(2, reply_tokens(2, 2, 3, 11), None, None)
        assert target.take_reply(2, NO_WAIT) is not None


def test_poison_shows_what_a_writer_left_out() -> None:
    with channel_pair(poison=True) as (target, drafter):
        publish(target, 1)
        seq = 1 + SPEC.depth
        entry = target.begin(seq, 2, 5)
        for tensor in tensors_of(entry).values():
            if tensor is not entry.seats:
                tensor.zero_()
        target.publish(seq)
        taken = drafter.take_entry(seq, NO_WAIT)
        assert taken is not None
        assert (taken.seats.view(torch.uint8) == 0xA5).all()


def test_probs_only_of_rows_that_have_them() -> None:
    with channel_pair() as (target, drafter):
        tokens, probs = reply_tokens(1, 3, 2, 11), reply_probs(1, 3, 2, 11)
        drafter.publish_reply(1, tokens, probs, torch.tensor([True, False, True]))
        reply = target.take_reply(1, NO_WAIT)
        assert reply is not None
        assert reply.has_probs is not None
        assert reply.probs is not None
        assert reply.has_probs.tolist() == [True, False, True]
        assert torch.equal(reply.probs[[0, 2], :2], probs[[0, 2]])
        drafter.publish_reply(4, tokens, None, None)
        again = target.take_reply(4, NO_WAIT)
        assert again is not None
        assert again.has_probs is not None
        assert not again.has_probs.any()


def test_ids_outside_the_vocabulary_never_reach_the_target() -> None:
    with channel_pair() as (target, drafter):
        drafter.publish_reply(1, torch.tensor([[10, 11, -5], [2**62, 0, -1]]), None, None)
        reply = target.take_reply(1, NO_WAIT)
        assert reply is not None
        assert reply.tokens.tolist() == [[10, -1, -1], [-1, 0, -1]]


def test_an_overwritten_entry_is_absent() -> None:
    with channel_pair() as (target, drafter):
        publish(target, 1)
        held = drafter.take_entry(1, NO_WAIT)
        assert held is not None
        assert drafter.entry_intact(1)
        for seq in range(2, 1 + SPEC.depth):
            publish(target, seq)
        assert drafter.entry_intact(1)
        target.begin(1 + SPEC.depth, 2, 5)
        assert not drafter.entry_intact(1)
        assert drafter.take_entry(1, NO_WAIT) is None
        fill(target.begin(1 + SPEC.depth, 2, 5))
        target.publish(1 + SPEC.depth)
        assert drafter.take_entry(1, NO_WAIT) is None
        assert drafter.take_entry(1 + SPEC.depth, NO_WAIT) is not None


def test_an_entry_begun_and_not_published_is_absent() -> None:
    with channel_pair() as (target, drafter):
        fill(target.begin(1, 2, 5))
        publish(target, 2)
        assert drafter.take_entry(1, NO_WAIT) is None
        assert drafter.take_entry(2, NO_WAIT) is not None


def test_a_reply_overtaken_or_skipped_is_absent() -> None:
    with channel_pair() as (target, drafter):
        drafter.publish_reply(1, reply_tokens(1, 2, 3, 11), None, None)
        drafter.publish_reply(1 + SPEC.depth, reply_tokens(2, 2, 3, 11), None, None)
        assert target.take_reply(1, NO_WAIT) is None
        assert target.take_reply(2, NO_WAIT) is None
        assert target.take_reply(1 + SPEC.depth, NO_WAIT) is not None


def test_another_epoch_is_absent() -> None:
    """Tags carry the epoch too: memory that somehow holds another placement's entry is not believed."""
    with channel_pair() as (target, drafter):
        publish(target, 1)
        drafter.publish_reply(1, reply_tokens(1, 2, 3, 11), None, None)
        target._regions["ring.header"][1, 1] = SPEC.epoch - 1
        target._regions["reply.header"][1, 1] = SPEC.epoch - 1
        assert drafter.take_entry(1, NO_WAIT) is None
        assert not drafter.entry_intact(1)
        assert target.take_reply(1, NO_WAIT) is None


@pytest.mark.parametrize(("word", "value"), [(2, SPEC.max_rows + 1), (2, -1), (3, SPEC.max_tokens + 1), (3, 2**40)])
def test_an_entry_of_impossible_size_is_absent(word: int, value: int) -> None:
    """Nobody allocates by what a peer wrote."""
    with channel_pair() as (target, drafter):
        publish(target, 1)
        target._regions["ring.header"][1 % SPEC.depth, word] = value
        assert drafter.take_entry(1, NO_WAIT) is None


def test_bounds_name_what_was_exceeded() -> None:
    with channel_pair() as (target, drafter):
        with pytest.raises(ChannelError, match="^max_rows: "):
            target.begin(1, SPEC.max_rows + 1, 1)
        with pytest.raises(ChannelError, match="^max_tokens: "):
            target.begin(1, 1, SPEC.max_tokens + 1)
        with pytest.raises(ChannelError, match="^max_rows: "):
            drafter.publish_reply(1, torch.zeros(SPEC.max_rows + 1, 1, dtype=torch.int64), None, None)
        with pytest.raises(ChannelError, match="^max_draft_len: "):
            drafter.publish_reply(1, torch.zeros(1, SPEC.max_draft_len + 1, dtype=torch.int64), None, None)
        with pytest.raises(ChannelError, match="^tokens: "):
            drafter.publish_reply(1, torch.zeros(1, 1, dtype=torch.int32), None, None)
        with pytest.raises(ChannelError, match="^probs: "):
            drafter.publish_reply(1, torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, 12), None)
        with pytest.raises(ChannelError, match="^has_probs: "):
            drafter.publish_reply(1, torch.zeros(1, 1, dtype=torch.int64), None, torch.ones(1, dtype=torch.bool))
        assert target.take_reply(1, NO_WAIT) is None
    with channel_pair(spec_with(draft_probs=False)) as (_, drafter), pytest.raises(ChannelError, match="^probs: "):
        drafter.publish_reply(1, torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, 11), None)


def test_steps_only_go_forward() -> None:
    with channel_pair() as (target, drafter):
        publish(target, 5)
        for seq in (5, 4, 0, -1):
            with pytest.raises(ChannelError, match="^seq: "):
                target.begin(seq, 1, 1)
        with pytest.raises(ChannelError, match="^seq: step 6 was not begun"):
            target.publish(6)
        drafter.publish_reply(5, reply_tokens(1, 1, 1, 11), None, None)
        with pytest.raises(ChannelError, match="^seq: "):
            drafter.publish_reply(5, reply_tokens(1, 1, 1, 11), None, None)


def test_waits_end_at_their_deadline() -> None:
    with channel_pair() as (target, drafter):
        for wait in (lambda: target.take_reply(1, 0.1), lambda: drafter.take_entry(1, 0.1)):
            start = time.monotonic()
            assert wait() is None
            assert 0.09 < time.monotonic() - start < 5


def in_thread(wait: object) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []
    assert callable(wait)
    thread = threading.Thread(target=lambda: results.append(wait()))
    thread.start()
    return thread, results


@pytest.mark.parametrize("closer", ["target", "drafter"])
@pytest.mark.parametrize("waiter", ["target", "drafter"])
def test_closing_either_end_releases_waiters_on_both(closer: str, waiter: str) -> None:
    with channel_pair() as (target, drafter):
        wait = (lambda: target.take_reply(1, 60)) if waiter == "target" else (lambda: drafter.take_entry(1, 60))
        thread, results = in_thread(wait)
        (target if closer == "target" else drafter).close()
        thread.join(10)
        assert not thread.is_alive()
        assert results == [None]


def test_after_closing() -> None:
    before = own_objects()
    with channel_pair() as (target, drafter):
        description = describe(target)
        publish(target, 1)
        entry = drafter.take_entry(1, NO_WAIT)
        assert entry is not None
        target.close()
        target.close()
        assert own_objects() == before
        assert wrong_tensors(entry) == []  # readable still: another thread may be in the middle of it
        assert drafter.take_entry(1, 10) is None
        assert not drafter.entry_intact(1)
        assert not drafter.peer_alive()
        assert not target.peer_alive()
        assert target.take_reply(1, 10) is None
        with pytest.raises(ChannelError, match="closed"):
            target.begin(2, 1, 1)
        with pytest.raises(ChannelError, match="closed"):
            drafter.publish_reply(1, reply_tokens(1, 1, 1, 11), None, None)
        with pytest.raises(ChannelError, match="^handle: "):
            attach_drafter_channel(description)


def test_a_detached_drafter_is_gone_at_once_and_nobody_else_may_take_its_place() -> None:
    with channel_pair() as (target, drafter):
        assert target.peer_alive()
        with pytest.raises(ChannelError, match=r"^control\.drafter_state: "):
            attach_drafter_channel(describe(target))
        drafter.close()
        drafter.close()
        assert not target.peer_alive()
        assert target.take_reply(1, 30) is None
        with pytest.raises(ChannelError, match=r"^control\.drafter_state: "):
            attach_drafter_channel(describe(target))
        publish(target, 1)  # the target goes on by itself


@pytest.mark.parametrize(
    ("field", "value", "word"), [("channel_id", "another", "channel_hash"), ("epoch", SPEC.epoch + 1, "epoch")]
)
def test_memory_of_another_channel_is_refused(field: str, value: object, word: str) -> None:
    target = open_target_channel(SPEC, "shm")
    wrong = describe(open_target_channel(spec_with(**{field: value}), "bytes"))
    described = describe(target)
    changed = replace(described, channel_id=wrong.channel_id, epoch=wrong.epoch)
    with pytest.raises(ChannelError, match=rf"^control\.{word}: "):
        attach_drafter_channel(changed)
    attach_drafter_channel(described).close()
    target.close()


def test_heartbeats_keep_an_idle_pair_alive_and_their_end_is_noticed() -> None:
    with channel_pair(heartbeat_s=HEARTBEAT_S) as (target, drafter):
        idle = threading.Event()
        assert not idle.wait(2 * HEARTBEAT_S)
        assert target.peer_alive()
        assert drafter.peer_alive()
        target._heartbeat.stop()
        drafter._heartbeat.stop()
        start = time.monotonic()
        assert target.take_reply(1, 60) is None
        assert drafter.take_entry(1, 60) is None
        assert time.monotonic() - start < HEARTBEAT_S + 5
        assert not target.peer_alive()
        assert not drafter.peer_alive()


def test_a_drafter_that_never_comes_counts_as_alive_for_a_while() -> None:
    target = open_target_channel(SPEC, "shm", attach_deadline_s=60)
    assert target.peer_alive()
    target.close()
    target = open_target_channel(SPEC, "shm", attach_deadline_s=0.05)
    assert target.take_reply(1, 60) is None
    assert not target.peer_alive()
    target.close()


def test_spec_errors_leave_nothing_behind() -> None:
    before = own_objects()
    with pytest.raises(ChannelError, match="^max_rows: "):
        open_target_channel(spec_with(max_rows=0), "shm")
    assert own_objects() == before


def test_the_memory_is_as_large_as_the_layout_says() -> None:
    with channel_pair() as (target, _):
        name = describe(target).control.handle.decode()
        assert (SHM_DIR / name).stat().st_size == plan_layout(SPEC).num_bytes
