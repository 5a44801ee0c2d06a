"""What does one verdict change in a request, and what does its client get?

Applies a verdict to the request's record: trims it, counts it, and makes the delta. Does no I/O and moves nothing
between queues; the target loop does that with what comes back.
"""

from __future__ import annotations

from gateway.generation import Delta
from gateway.messages import BadEvent, RowPlan, Verdict
from gateway.metrics import GatewayMetrics
from gateway.requests import ActiveRequest


def apply_verdict(
    request: ActiveRequest, row: RowPlan, verdict: Verdict, metrics: GatewayMetrics, now: float
) -> Delta | None:
    """Take the verdict of a row that ran. Returns the delta, or None where the row sampled nothing.

    A delta with a finish_reason is the last. Raises BadEvent, with the request's record unchanged.
    """
    _check(row, verdict, len(request.token_ids))
    request.context_len = verdict.context_len
    request.faults = 0
    request.starved_since = None
    if not row.samples:
        return None
    commit = request.trimmer.apply(verdict.token_ids, verdict.num_accepted, verdict.num_drafted, verdict.logprobs)
    request.token_ids.extend(commit.token_ids)
    request.num_drafted += commit.num_drafted
    request.num_accepted += commit.num_accepted
    num_tokens = len(commit.token_ids)
    if commit.num_drafted:
        request.bond_failures = 0
        metrics.count_row(commit.num_drafted, commit.num_accepted)
    metrics.generated_tokens.inc(num_tokens)
    if request.first_token_at is None:
        request.first_token_at = now
        metrics.time_to_first_token.observe(now - request.submitted_at)
    from_draft = (True,) * commit.num_accepted + (False,) * (num_tokens - commit.num_accepted)
    last = commit.finish_reason is not None
    return Delta(
        commit.token_ids,
        from_draft,
        commit.text,
        commit.logprobs,
        commit.finish_reason,
        commit.stop_reason,
        request.usage() if last else None,
    )


def _check(row: RowPlan, verdict: Verdict, num_known: int) -> None:
    num_tokens = len(verdict.token_ids)
    if not row.samples:
        if num_tokens or verdict.context_len != row.context_len + row.query_len:
            raise BadEvent("a prompt chunk that does not sample must end at context_len + query_len without tokens")
        return
    if not 1 <= num_tokens <= row.verify_len + 1:
        raise BadEvent(f"{num_tokens} tokens for a row that verifies {row.verify_len} drafts")
    if verdict.num_accepted != num_tokens - 1 or not verdict.num_accepted <= verdict.num_drafted <= row.verify_len:
        raise BadEvent(
            f"{verdict.num_accepted} of {verdict.num_drafted} drafts accepted, but {num_tokens} tokens for a row that "
            f"verifies {row.verify_len} drafts"
        )
    if verdict.context_len != num_known + num_tokens - 1:
        raise BadEvent(f"context_len {verdict.context_len} with {num_known + num_tokens} tokens known")
    if verdict.logprobs and len(verdict.logprobs) != num_tokens:
        raise BadEvent(f"{len(verdict.logprobs)} logprobs for {num_tokens} tokens")
