"""Does a command make sense, before any state is looked at?

Everything a gateway sends is outside input. Each check raises InvalidRequest naming the field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import InvalidRequest
from target_service.messages import Admission, RowRequest, SamplingSettings, StepRequest

MAX_REQUEST_ID_LEN = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """What this target can take at most. num_blocks: blocks that requests can hold at once."""

    vocab_size: int
    max_model_len: int
    max_step_tokens: int
    max_verify_len: int
    num_seats: int
    num_blocks: int
    block_size: int


def check_admission(admission: Admission, limits: Limits) -> None:
    """InvalidRequest unless the request could run here, alone."""
    _check_request_id("request_id", admission.request_id)
    num_tokens = len(admission.token_ids)
    if num_tokens == 0:
        raise InvalidRequest("token_ids", "must hold at least one token")
    for token in admission.token_ids:
        if token >= limits.vocab_size:
            raise InvalidRequest("token_ids", f"token {token} is not below the vocabulary size {limits.vocab_size}")
    if not 1 <= admission.prompt_len <= num_tokens:
        raise InvalidRequest("prompt_len", f"must be in 1..{num_tokens}, got {admission.prompt_len}")
    if admission.max_total_len > limits.max_model_len:
        raise InvalidRequest("max_total_len", f"{admission.max_total_len} is above {limits.max_model_len}")
    if admission.max_total_len <= num_tokens:
        raise InvalidRequest("max_total_len", f"leaves no token to generate after {num_tokens} given ones")
    if num_tokens > limits.num_blocks * limits.block_size:
        raise InvalidRequest(
            "token_ids", f"{num_tokens} tokens need more than the {limits.num_blocks} blocks of {limits.block_size}"
        )
    _check_sampling(admission.sampling, limits.vocab_size)


def check_step(step: StepRequest, limits: Limits) -> None:
    """InvalidRequest unless the plan's numbers fit together and under the limits."""
    if step.drafts_from_seq >= step.seq:
        raise InvalidRequest("drafts_from_seq", f"{step.drafts_from_seq} is not before seq {step.seq}")
    if len(step.rows) > limits.num_seats:
        raise InvalidRequest("rows", f"{len(step.rows)} rows, but there are {limits.num_seats} seats")
    seen: set[str] = set()
    num_tokens = 0
    for index, row in enumerate(step.rows):
        _check_row(index, row, limits)
        if row.request_id in seen:
            raise InvalidRequest(f"rows[{index}].request_id", f"{row.request_id!r} has a row already")
        seen.add(row.request_id)
        num_tokens += row.query_len
    if num_tokens > limits.max_step_tokens:
        raise InvalidRequest("rows.query_len", f"sum {num_tokens} is above max_step_tokens {limits.max_step_tokens}")


def _check_row(index: int, row: RowRequest, limits: Limits) -> None:
    # Names are only made where one is needed: this is done for every row of every step.
    if not 1 <= len(row.request_id) <= MAX_REQUEST_ID_LEN:
        _check_request_id(f"rows[{index}].request_id", row.request_id)
    if row.query_len == 0:
        raise InvalidRequest(f"rows[{index}].query_len", "must be at least 1")
    if row.verify_len > limits.max_verify_len:
        raise InvalidRequest(
            f"rows[{index}].verify_len", f"{row.verify_len} is above max_verify_len {limits.max_verify_len}"
        )
    if row.verify_len > 0 and row.query_len != 1 + row.verify_len:
        raise InvalidRequest(f"rows[{index}].query_len", f"{row.query_len} is not 1 + verify_len ({row.verify_len})")
    if row.context_len + row.query_len > limits.max_model_len + limits.max_verify_len:
        raise InvalidRequest(
            f"rows[{index}].context_len", f"{row.context_len} is past the model's {limits.max_model_len}"
        )


def _check_request_id(name: str, request_id: str) -> None:
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_LEN:
        raise InvalidRequest(name, f"must have 1..{MAX_REQUEST_ID_LEN} characters, has {len(request_id)}")


def _check_sampling(sampling: SamplingSettings, vocab_size: int) -> None:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidRequest("sampling.temperature", f"must be finite and at least 0, got {sampling.temperature}")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest("sampling.top_p", f"must be in (0, 1], got {sampling.top_p}")
    if not 0 <= sampling.min_p <= 1:
        raise InvalidRequest("sampling.min_p", f"must be in [0, 1], got {sampling.min_p}")
    if not (math.isfinite(sampling.repetition_penalty) and sampling.repetition_penalty > 0):
        raise InvalidRequest("sampling.repetition_penalty", f"must be above 0, got {sampling.repetition_penalty}")
    for name, value in (
        ("presence_penalty", sampling.presence_penalty),
        ("frequency_penalty", sampling.frequency_penalty),
    ):
        if not math.isfinite(value):
            raise InvalidRequest(f"sampling.{name}", f"must be finite, got {value}")
    for token, bias in sampling.logit_bias:
        if token >= vocab_size:
            raise InvalidRequest("sampling.logit_bias", f"token {token} is not below the vocabulary size {vocab_size}")
        if math.isnan(bias) or bias == math.inf:
            raise InvalidRequest("sampling.logit_bias", f"bias of token {token} must be finite or -inf, got {bias}")
    if not -1 <= sampling.num_logprobs <= vocab_size:
        raise InvalidRequest("sampling.num_logprobs", f"must be in -1..{vocab_size}, got {sampling.num_logprobs}")
