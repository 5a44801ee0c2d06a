"""Which parts do the answers of both endpoints share: usage, Outrider's own fields, the shape of an answer?

Outrider's additions live under the key `outrider` and in OpenAI's fields for predicted output:

- `choices[i].outrider`: `token_ids` and, parallel to it, `from_draft` (an accepted draft); `stop_reason`, the stop
  string or stop token that ended it, with the last part. A streamed chunk is one commit of one step, and has `spans`:
  its text in pieces, each with whether a draft brought it.
- `usage.outrider`: `drafted_tokens` (verified by the target), `accepted_tokens`, `decode_steps` (commits after the
  one that ended the prompt) and `mean_accepted_len` (tokens per decode step; 1 without drafts, null before the first).
"""

from __future__ import annotations

import math
from typing import Any, NotRequired, Protocol, TypedDict

from gateway.generation import Delta, GenerationUsage
from gateway.rest.running import Event
from gateway.rest.spans import SpanWriter

LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot say


class ChoiceExtension(TypedDict):
    """`choices[i].outrider`."""

    token_ids: list[int]
    from_draft: list[bool]
    stop_reason: NotRequired[str | int | None]
    spans: NotRequired[list[tuple[str, bool]]]


class UsageExtension(TypedDict):
    """`usage.outrider`, over all choices."""

    drafted_tokens: int
    accepted_tokens: int
    decode_steps: int
    mean_accepted_len: float | None


class PromptTokensDetails(TypedDict):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """`usage.completion_tokens_details`."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    """`usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    outrider: UsageExtension


class Answer(Protocol):
    """One request's answer while it grows. Every event is added once, in order, either through `chunk` or `add`."""

    def chunk(self, event: Event) -> dict[str, Any]:
        """Add the event, and give the streamed chunk that tells it."""
        ...

    def usage_chunk(self) -> dict[str, Any]:
        """The streamed chunk that ends a stream with `include_usage`."""
        ...

    def add(self, event: Event) -> None:
        """Add the event to the whole answer."""
        ...

    def whole(self) -> dict[str, Any]:
        """The answer in one piece, after the last event."""
        ...


class UsageTally:
    """Adds up what the choices of a request cost. A prompt with several choices counts once."""

    def __init__(self, choices_per_prompt: int) -> None:
        self._choices_per_prompt = choices_per_prompt
        self._commits: dict[int, int] = {}
        self._tokens: dict[int, int] = {}
        self._ended: dict[int, GenerationUsage] = {}

    def add(self, event: Event) -> None:
        """Count one delta."""
        choice, delta = event.choice, event.delta
        if delta.token_ids:
            self._commits[choice] = self._commits.get(choice, 0) + 1
            self._tokens[choice] = self._tokens.get(choice, 0) + len(delta.token_ids)
        if delta.usage is not None:
            self._ended[choice] = delta.usage

    def usage(self) -> Usage:
        """The `usage` object, over the choices that have ended."""
        ended = self._ended
        prompts = {choice // self._choices_per_prompt: usage for choice, usage in sorted(ended.items(), reverse=True)}
        prompt_tokens = sum(usage.prompt_tokens for usage in prompts.values())
        completion_tokens = sum(usage.completion_tokens for usage in ended.values())
        drafted = sum(usage.drafted_tokens for usage in ended.values())
        accepted = sum(usage.accepted_tokens for usage in ended.values())
        steps = sum(commits - 1 for commits in self._commits.values())
        decoded = sum(self._tokens.values()) - len(self._commits)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(usage.cached_tokens for usage in prompts.values())
            ),
            completion_tokens_details=CompletionTokensDetails(
                accepted_prediction_tokens=accepted, rejected_prediction_tokens=max(0, drafted - accepted)
            ),
            outrider=UsageExtension(
                drafted_tokens=drafted,
                accepted_tokens=accepted,
                decode_steps=steps,
                mean_accepted_len=round(decoded / steps, 4) if steps else None,
            ),
        )


def chunk_extension(delta: Delta, spans: SpanWriter) -> ChoiceExtension:
    """`outrider` of one streamed chunk."""
    extension = ChoiceExtension(
        token_ids=list(delta.token_ids), from_draft=list(delta.from_draft), spans=spans.write(delta)
    )
    if delta.finish_reason is not None:
        extension["stop_reason"] = delta.stop_reason
    return extension


def extend(extension: ChoiceExtension, delta: Delta) -> None:
    """Add one delta to the `outrider` of a whole choice, in place."""
    extension["token_ids"] += delta.token_ids
    extension["from_draft"] += delta.from_draft
    if delta.finish_reason is not None:
        extension["stop_reason"] = delta.stop_reason


def finite_logprob(logprob: float) -> float:
    """A log probability as JSON can say it."""
    return logprob if math.isfinite(logprob) and logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def token_label(token_bytes: bytes) -> str:
    """How an answer names a token: its text, or as OpenAI does `bytes:\\xe4\\xb8` where it is no whole text."""
    try:
        return token_bytes.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)
