"""Which generations does a checked request ask for?

The checks here are those between two fields, or between a field and the model. Everything after this is the
dispatcher's.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.generation import Generation, SamplingOptions
from gateway.rest.problems import invalid, unknown_model
from gateway.rest.schemas import MAX_CHOICES, GenerationRequest
from gateway.rest.served import ServedModel


def check_shared(request: GenerationRequest, served: ServedModel) -> None:
    """What both endpoints check beyond single fields. Raises ApiError."""
    if request.model is not None and request.model != served.name:
        raise unknown_model(request.model[:256], served.name)
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "is only allowed when stream is true")
    served.check_token_ids(request.stop_token_ids or (), "stop_token_ids")
    for token_id in request.logit_bias or ():
        if token_id >= served.vocab_size:
            raise invalid(f"logit_bias.{token_id}", f"is not below the vocabulary's size, {served.vocab_size}")


def build_generations(
    request: GenerationRequest,
    prompts: Sequence[tuple[int, ...]],
    *,
    answer_id: str,
    input_field: str,
    max_tokens: int | None,
    num_logprobs: int,
) -> list[Generation]:
    """One generation for each choice: `n` in a row for each prompt. Raises ApiError where they are too many."""
    num_choices = request.n or 1
    if num_choices * len(prompts) > MAX_CHOICES:
        raise invalid("n", f"{num_choices} choices of {len(prompts)} prompts are more than {MAX_CHOICES} together")
    return [
        Generation(
            request_id=f"{answer_id}-{position * num_choices + index}",
            token_ids=token_ids,
            max_tokens=max_tokens,
            sampling=_sampling(request, index, num_logprobs),
            stop_token_ids=frozenset(request.stop_token_ids or ()),
            stop=tuple(request.stop or ()),
            ignore_eos=bool(request.ignore_eos),
            draft_len=request.draft_len,
            input_field=input_field,
        )
        for position, token_ids in enumerate(prompts)
        for index in range(num_choices)
    ]


def _sampling(request: GenerationRequest, index: int, num_logprobs: int) -> SamplingOptions:
    default = SamplingOptions()
    return SamplingOptions(
        temperature=_or(request.temperature, default.temperature),
        top_p=_or(request.top_p, default.top_p),
        top_k=max(0, request.top_k or 0),
        min_p=_or(request.min_p, default.min_p),
        # Choices of one request must differ; which seed each has depends on its own place alone.
        seed=None if request.seed is None else (request.seed + index) % 2**64,
        repetition_penalty=_or(request.repetition_penalty, default.repetition_penalty),
        presence_penalty=_or(request.presence_penalty, default.presence_penalty),
        frequency_penalty=_or(request.frequency_penalty, default.frequency_penalty),
        logit_bias=dict(request.logit_bias or {}),
        num_logprobs=num_logprobs,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
