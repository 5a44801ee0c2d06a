"""Is what a service sends taken for what it is, and refused when it makes no sense?"""

from __future__ import annotations

import pytest

from gateway.codec import drafter_event_value, fill_plan, placement_message, target_event_value
from gateway.generation import SamplingOptions, TokenLogprob
from gateway.messages import BadEvent, Placement, RowPlan, StepPlan, StepResult
from protos import common_pb2, drafter_pb2, target_pb2


def test_a_plan_and_a_placement_arrive_whole() -> None:
    rows = (RowPlan("a", 1, 5, 3, 2, 4, True), RowPlan("b", 2, 0, 7, 0, 0, False))
    message = common_pb2.StepPlan()
    fill_plan(message, StepPlan(9, "ch", 3, rows, 8, 250))
    again = common_pb2.StepPlan.FromString(message.SerializeToString())
    assert (again.seq, again.channel_id, again.channel_epoch, again.drafts_from_seq, again.deadline_ms) == (
        9,
        "ch",
        3,
        8,
        250,
    )
    assert [(row.request_id, row.epoch, row.context_len, row.query_len) for row in again.rows] == [
        ("a", 1, 5, 3),
        ("b", 2, 0, 7),
    ]
    assert [(row.verify_len, row.draft_len, row.samples) for row in again.rows] == [(2, 4, True), (0, 0, False)]

    options = SamplingOptions(0.5, 0.75, 3, 0.25, 4, 2.0, 0.5, -0.5, {7: -1.5}, 2)
    admit = placement_message(Placement("r", 2, (1, 2, 3), 2, 10, options, 2**64 - 1, True, "ch", True))
    sampling = admit.sampling
    assert (admit.request_id, admit.epoch, list(admit.token_ids), admit.prompt_len, admit.max_total_len) == (
        "r",
        2,
        [1, 2, 3],
        2,
        10,
    )
    assert (admit.channel_id, admit.mid_stream) == ("ch", True)
    assert (sampling.seed, sampling.seeded, sampling.num_logprobs) == (2**64 - 1, True, 2)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.75, 3, 0.25)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (2.0, 0.5, -0.5)
    assert dict(sampling.logit_bias) == {7: -1.5}


def result(**row: object) -> target_pb2.TargetEvent:
    return target_pb2.TargetEvent(
        result=target_pb2.StepResult(seq=1, rows=[target_pb2.RowResult(request_id="a", **row)])  # type: ignore[arg-type]
    )


def test_logprobs_are_paired_with_their_tokens() -> None:
    logprobs = [target_pb2.TokenLogprobs(logprob=-0.5, top_ids=[4, 9], top_logprobs=[-0.5, -2.0])]
    event = target_event_value(result(status=target_pb2.ROW_STATUS_OK, token_ids=[4], logprobs=logprobs))
    assert isinstance(event, StepResult)
    assert event.verdicts[0].logprobs == (TokenLogprob(4, -0.5, ((4, -0.5), (9, -2.0))),)


@pytest.mark.parametrize(
    "event",
    [
        target_pb2.TargetEvent(),
        target_pb2.TargetEvent(info=target_pb2.TargetInfo(vocab_size=3)),
        target_pb2.TargetEvent(admitted=common_pb2.Admitted(request_id="a")),
        result(),
        result(status=target_pb2.ROW_STATUS_OK, token_ids=[1, 2], logprobs=[target_pb2.TokenLogprobs()]),
    ],
)
def test_nonsense_of_a_target_is_refused(event: target_pb2.TargetEvent) -> None:
    with pytest.raises(BadEvent):
        target_event_value(event)


@pytest.mark.parametrize(
    "event",
    [drafter_pb2.DrafterEvent(), drafter_pb2.DrafterEvent(admitted=common_pb2.Admitted(request_id="a"))],
)
def test_nonsense_of_a_drafter_is_refused(event: drafter_pb2.DrafterEvent) -> None:
    with pytest.raises(BadEvent):
        drafter_event_value(event)
