"""What the metrics say of a target of several ranks."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from gateway.codec import step_result_value
from gateway.messages import StepResult
from gateway.metrics import GatewayMetrics
from protos import target_pb2


def result_of(ranks: list[tuple[int, int]]) -> StepResult:
    return step_result_value(
        target_pb2.StepResult(
            seq=1,
            collective_ms=2.5,
            ranks=[target_pb2.RankLoad(num_tokens=tokens, attention_work=work) for tokens, work in ranks],
        )
    )


def test_ranks_are_counted_one_by_one() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry, max_draft_len=4)
    metrics.observe_step(result_of([(10, 100), (6, 300)]), 2, 0.1)
    metrics.observe_step(result_of([(10, 100), (6, 0)]), 2, 0.1)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("outrider_rank_tokens_total", rank="0") == 20
    assert value("outrider_rank_attention_work_total", rank="1") == 300
    assert value("outrider_rank_imbalance_ratio_sum", of="tokens") == pytest.approx(2 * 10 / 8)
    assert value("outrider_rank_imbalance_ratio_sum", of="attention_work") == pytest.approx(300 / 200 + 2)
    assert value("outrider_step_seconds_sum", service="target", part="collectives") == pytest.approx(0.005)


def test_a_target_of_one_rank_says_nothing_of_ranks() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry, max_draft_len=4)
    metrics.observe_step(result_of([]), 2, 0.1)
    assert registry.get_sample_value("outrider_rank_tokens_total", {"rank": "0"}) is None
    assert registry.get_sample_value("outrider_step_seconds_count", {"service": "target", "part": "collectives"}) == 0


def test_a_step_without_tokens_is_no_imbalance() -> None:
    registry = CollectorRegistry()
    GatewayMetrics(registry, max_draft_len=4).observe_step(result_of([(0, 0), (0, 0)]), 1, 0.1)
    assert registry.get_sample_value("outrider_rank_imbalance_ratio_count", {"of": "tokens"}) is None
