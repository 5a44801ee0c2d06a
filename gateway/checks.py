"""Can a generation be served as it is asked for, by this model?

Every public face comes through here, so what a face has checked before may be checked twice. Errors name the field in
the API's own words.
"""

from __future__ import annotations

import math

from gateway.errors import InvalidGeneration
from gateway.generation import Generation, SamplingOptions
from gateway.messages import TargetInfo

MAX_REQUEST_ID_LEN = 256
MAX_STOP_STRINGS = 64
MAX_STOP_LEN = 4096
MAX_NUMBER = 1e6  # far past every use, and safely inside single precision, in which the services take it
MAX_LOGPROBS = 128


def check_generation(generation: Generation, info: TargetInfo, max_draft_len: int) -> int:
    """How many tokens it may generate. Raises InvalidGeneration naming the field.

    max_draft_len: what the gateway allows; that a drafter proposes fewer, or none, is no fault of the request.
    """
    if not 1 <= len(generation.request_id) <= MAX_REQUEST_ID_LEN:
        raise InvalidGeneration("request_id", f"must have 1 to {MAX_REQUEST_ID_LEN} characters")
    _check_prompt(generation, info)
    _check_sampling(generation.sampling, info.vocab_size)
    _check_ends(generation, info.vocab_size)
    if generation.draft_len is not None and not 0 <= generation.draft_len <= max_draft_len:
        raise InvalidGeneration("draft_len", f"must be in 0..{max_draft_len}, got {generation.draft_len}")
    room = info.max_request_len - len(generation.token_ids)
    if generation.max_tokens is None:
        return room
    if generation.max_tokens < 1:
        raise InvalidGeneration("max_tokens", f"must be at least 1, got {generation.max_tokens}")
    if generation.max_tokens > room:
        raise InvalidGeneration(
            "max_tokens",
            f"{generation.max_tokens} tokens after a prompt of {len(generation.token_ids)} are more than the "
            f"{info.max_request_len} tokens that fit",
        )
    return generation.max_tokens


def _check_prompt(generation: Generation, info: TargetInfo) -> None:
    num_tokens = len(generation.token_ids)
    if num_tokens == 0:
        raise InvalidGeneration(generation.input_field, "must not be empty")
    if num_tokens >= info.max_request_len:
        raise InvalidGeneration(
            generation.input_field,
            f"has {num_tokens} tokens; prompt and output together may have {info.max_request_len}",
        )
    if not 0 <= min(generation.token_ids) <= max(generation.token_ids) < info.vocab_size:
        raise InvalidGeneration(generation.input_field, f"has a token id that is not in 0..{info.vocab_size - 1}")


def _check_sampling(options: SamplingOptions, vocab_size: int) -> None:
    _check_range("temperature", options.temperature, 0, MAX_NUMBER)
    _check_range("top_p", options.top_p, 0, 1)
    if options.top_p == 0:
        raise InvalidGeneration("top_p", "must be above 0")
    _check_range("top_k", options.top_k, 0, 2**31 - 1)
    _check_range("min_p", options.min_p, 0, 1)
    _check_range("repetition_penalty", options.repetition_penalty, 0, MAX_NUMBER)
    if options.repetition_penalty == 0:
        raise InvalidGeneration("repetition_penalty", "must be above 0")
    _check_range("presence_penalty", options.presence_penalty, -MAX_NUMBER, MAX_NUMBER)
    _check_range("frequency_penalty", options.frequency_penalty, -MAX_NUMBER, MAX_NUMBER)
    if options.seed is not None and not -(2**63) <= options.seed < 2**64:
        raise InvalidGeneration("seed", "must fit in 64 bits")
    for token_id, bias in options.logit_bias.items():
        _check_token("logit_bias", token_id, vocab_size)
        _check_range("logit_bias", bias, -MAX_NUMBER, MAX_NUMBER)
    if not -1 <= options.num_logprobs <= min(MAX_LOGPROBS, vocab_size):
        raise InvalidGeneration("logprobs", f"must be in 0..{min(MAX_LOGPROBS, vocab_size)}")


def _check_ends(generation: Generation, vocab_size: int) -> None:
    for token_id in generation.stop_token_ids:
        _check_token("stop_token_ids", token_id, vocab_size)
    if len(generation.stop) > MAX_STOP_STRINGS:
        raise InvalidGeneration("stop", f"must be at most {MAX_STOP_STRINGS} strings, got {len(generation.stop)}")
    for text in generation.stop:
        if not 1 <= len(text) <= MAX_STOP_LEN:
            raise InvalidGeneration("stop", f"each string must have 1 to {MAX_STOP_LEN} characters")


def _check_range(field: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidGeneration(field, f"must be in {low:g}..{high:g}, got {value}")


def _check_token(field: str, token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise InvalidGeneration(field, f"{token_id} is not a token id; they are in 0..{vocab_size - 1}")


def api_field(field: str, generation: Generation) -> str:
    """The API's name of what a service names in its own words."""
    name = field.removeprefix("sampling.")
    return {"token_ids": generation.input_field, "max_total_len": "max_tokens", "": "request"}.get(name, name)
