"""The bytes channel: the same two interfaces, with a message carried by hand where the RPC would."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from engine.channel import (
    BytesDrafterEnd,
    BytesTargetEnd,
    ChannelSpec,
    EntryMessage,
    attach_drafter_channel,
    describe,
    open_target_channel,
)
from engine.channel.bytes import from_bytes, to_bytes
from engine.errors import ChannelError
from tests.engine.channel.entries import SPEC, fill, reply_probs, reply_tokens, spec_with, wrong_tensors

NO_WAIT = 0.0


def channel_pair(spec: ChannelSpec = SPEC, linked: bool = True) -> tuple[BytesTargetEnd, BytesDrafterEnd]:
    target = open_target_channel(spec, "bytes", attach_deadline_s=60)
    drafter = attach_drafter_channel(describe(target), attach_deadline_s=60)
    assert isinstance(target, BytesTargetEnd)
    assert isinstance(drafter, BytesDrafterEnd)
    if linked:
        target.link_up()
        drafter.link_up()
    return target, drafter


def publish(target: BytesTargetEnd, seq: int, num_rows: int = 2, num_tokens: int = 5) -> EntryMessage:
    fill(target.begin(seq, num_rows, num_tokens))
    target.publish(seq)
    message = target.outgoing(NO_WAIT)
    assert message is not None
    return message


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        spec_with(hidden_width=0, draft_probs=False),
        spec_with(hidden_dtype=torch.bfloat16, hidden_width=3),
    ],
    ids=["odd", "no hidden", "bf16"],
)
def test_every_byte_arrives_both_ways(spec: ChannelSpec) -> None:
    target, drafter = channel_pair(spec)
    for seq, (rows, tokens) in enumerate([(spec.max_rows, spec.max_tokens), (0, 0), (1, 1)], start=1):
        assert drafter.deliver(publish(target, seq, rows, tokens))
        entry = drafter.take_entry(seq, NO_WAIT)
        assert entry is not None
        assert (entry.num_rows, entry.num_tokens) == (rows, tokens)
        assert wrong_tensors(entry) == []
        assert drafter.entry_intact(seq)
        proposed = reply_tokens(seq, rows, 2, spec.vocab_size)
        probs = reply_probs(seq, rows, 2, spec.vocab_size) if spec.draft_probs else None
        drafter.publish_reply(seq, proposed, probs, None)
        message = drafter.outgoing(NO_WAIT)
        assert message is not None
        assert target.deliver(message)
        reply = target.take_reply(seq, NO_WAIT)
        assert reply is not None
        assert torch.equal(reply.tokens[:, :2], proposed)
        assert (reply.tokens[:, 2:] == -1).all()
        assert (reply.probs is None) == (probs is None)
        if probs is not None and reply.probs is not None:
            assert torch.equal(reply.probs[:, :2], probs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.int32, torch.bool])
def test_bytes_of_every_dtype_and_of_views(dtype: torch.dtype) -> None:
    tensor = (torch.arange(24).view(4, 6) % 2).to(dtype)
    for view in (tensor, tensor.T, tensor[1:3, ::2], tensor[:0]):
        assert torch.equal(from_bytes(to_bytes(view), dtype, tuple(view.shape)), view)


def test_messages_of_another_channel_or_epoch_or_time_are_dropped() -> None:
    target, drafter = channel_pair()
    message = publish(target, 1)
    assert not drafter.deliver(replace(message, channel_id="another"))
    assert not drafter.deliver(replace(message, epoch=SPEC.epoch - 1))
    assert drafter.take_entry(1, NO_WAIT) is None
    assert drafter.deliver(message)
    assert not drafter.deliver(message)


def test_malformed_messages_name_what_is_wrong() -> None:
    target, drafter = channel_pair()
    message = publish(target, 1)
    short = dict(message.tensors) | {"ring.seats": b"123"}
    missing = {name: data for name, data in message.tensors.items() if name != "ring.hidden"}
    for broken, match in (
        (replace(message, num_rows=SPEC.max_rows + 1), "^max_rows: "),
        (replace(message, num_tokens=SPEC.max_tokens + 1), "^max_tokens: "),
        (replace(message, num_rows=1), r"^tensors\[ring\."),
        (replace(message, tensors=short), r"^tensors\[ring\.seats\]: "),
        (replace(message, tensors=missing), r"^tensors\[ring\.hidden\]: missing"),
    ):
        with pytest.raises(ChannelError, match=match):
            drafter.deliver(broken)
    with pytest.raises(ChannelError, match="^max_rows: "):
        target.deliver(replace(message, num_rows=SPEC.max_rows + 1))
    with pytest.raises(ChannelError, match=r"^tensors\[reply\.tokens\]: missing"):
        target.deliver(message)


def test_stores_are_bounded_and_keep_the_newest() -> None:
    target, drafter = channel_pair()
    for seq in range(1, 8):
        fill(target.begin(seq, 1, 1))
        target.publish(seq)
    sent = []
    while (message := target.outgoing(NO_WAIT)) is not None:
        sent.append(message)
    assert [message.seq for message in sent] == [5, 6, 7]
    for message in sent:
        assert drafter.deliver(message)
    assert drafter.deliver(replace(sent[0], seq=9))
    assert [seq for seq in range(1, 10) if drafter.take_entry(seq, NO_WAIT) is not None] == [7, 9]


def test_only_what_belongs_to_an_entry_is_kept() -> None:
    target, drafter = channel_pair()
    message = publish(target, 1)
    assert drafter.deliver(replace(message, tensors={**message.tensors, "ring.more": bytes(1 << 20)}))
    assert drafter._incoming[1].tensors == message.tensors


def test_steps_only_go_forward_within_bounds() -> None:
    target, drafter = channel_pair()
    publish(target, 3)
    with pytest.raises(ChannelError, match="^seq: "):
        target.begin(3, 1, 1)
    with pytest.raises(ChannelError, match="^seq: "):
        target.publish(4)
    with pytest.raises(ChannelError, match="^max_tokens: "):
        target.begin(4, 1, SPEC.max_tokens + 1)
    drafter.publish_reply(3, reply_tokens(1, 1, 1, 11), None, None)
    with pytest.raises(ChannelError, match="^seq: "):
        drafter.publish_reply(2, reply_tokens(1, 1, 1, 11), None, None)


def test_waits_end_with_delivery_deadline_and_a_broken_stream() -> None:
    target, drafter = channel_pair()
    assert drafter.take_entry(1, 0.05) is None
    results: list[object] = []
    waiters = [
        threading.Thread(target=lambda: results.append(drafter.take_entry(1, 60))),
        threading.Thread(target=lambda: results.append(target.take_reply(1, 60))),
        threading.Thread(target=lambda: results.append(drafter.outgoing(60))),
    ]
    for waiter in waiters:
        waiter.start()
    drafter.deliver(publish(target, 1))
    waiters[0].join(10)
    assert len(results) == 1
    assert results[0] is not None
    target.link_down()
    drafter.link_down()
    for waiter in waiters:
        waiter.join(10)
        assert not waiter.is_alive()
    assert results[1:] == [None, None]
    assert target.closed
    with pytest.raises(ChannelError, match="closed"):
        target.begin(2, 1, 1)
    with pytest.raises(ChannelError, match="one Exchange stream"):
        drafter.link_up()


def test_the_stream_is_the_heartbeat() -> None:
    target, drafter = channel_pair(linked=False)
    assert target.peer_alive()
    target.link_up()
    assert target.peer_alive()
    with pytest.raises(ChannelError, match="one Exchange stream"):
        target.link_up()
    target.link_down()
    assert not target.peer_alive()
    assert drafter.peer_alive()
    never = open_target_channel(SPEC, "bytes", attach_deadline_s=0.05)
    assert never.peer_alive()
    assert never.take_reply(1, 60) is None
    assert not never.peer_alive()
