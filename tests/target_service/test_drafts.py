"""Which drafts a step takes: it waits only for those that a row can use, and trusts no probability it is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.channel import ReplyEntry
from target_service.channels import OpenChannel
from target_service.drafts import StepDrafts, take_drafts
from target_service.messages import RowRequest, SamplingSettings, StepRequest
from target_service.sessions import Session

VOCAB = 8


class Answering:
    """A channel's end that has a reply to every step, and counts who asks."""

    kind = "shm"

    def __init__(self) -> None:
        self.num_asked = 0

    def take_reply(self, seq: int, deadline_s: float) -> ReplyEntry:
        self.num_asked += 1
        return ReplyEntry(seq, 1, torch.tensor([[3, 4, 5]]), None, None)


def session(**fields: Any) -> Session:
    whole: dict[str, Any] = {
        "request_id": "a",
        "epoch": 1,
        "stream_id": 1,
        "seat": 0,
        "tokens": [1, 2, 3],
        "num_admitted": 2,
        "prompt_len": 2,
        "max_total_len": 9,
        "sampling": SamplingSettings(),
        "context_len": 2,
        "started": True,
        "last_step": ("c", 1, 4),
        **fields,
    }
    return Session(**whole)


@pytest.mark.parametrize(
    ("fields", "num_drafts"),
    [
        ({}, 3),
        ({"max_total_len": 5}, 1),
        ({"max_total_len": 4}, 0),  # no room for a draft
        ({"last_step": ("c", 1, 3)}, 0),  # the row had no part in step 4
        ({"last_step": None}, 0),
    ],
)
def test_waits_only_where_a_row_can_use_the_drafts(fields: dict[str, Any], num_drafts: int) -> None:
    end = Answering()
    channel = OpenChannel(end, "d", (), shares_blocks=False, last_alive=0.0)  # type: ignore[arg-type]
    channel._places[4] = {("a", 1): 0}
    step = StepRequest(5, "c", 1, (RowRequest("a", 1, 2, 4, 3, 0, True),), 4, 1000)
    drafts = take_drafts(step, [session(**fields)], channel, VOCAB, 1.0)
    assert drafts.tokens == ((3, 4, 5)[:num_drafts],)
    assert end.num_asked == (1 if num_drafts else 0)
    assert not drafts.missed


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -0.5])
def test_probabilities_that_are_none_are_not_used(wrong: float) -> None:
    """Otherwise whoever writes them could make the target say a token that its own filters leave out."""
    probs = torch.full((2, 3, VOCAB), 1 / VOCAB)
    probs[1, 1, 7] = wrong
    reply = ReplyEntry(4, 2, torch.zeros(2, 3, dtype=torch.int64), probs, torch.tensor([True, True]))
    drafts = StepDrafts(((1,), (1,)), (0, 1), reply, missed=False)
    taken, has_probs = drafts.probs_of([0, 1], 2)
    assert taken is not None
    assert has_probs is not None
    assert has_probs.tolist() == [True, False]
    assert drafts.probs_of([1], 2) == (None, None)
    assert drafts.probs_of([1], 1)[1] is not None  # what is not read does no harm
