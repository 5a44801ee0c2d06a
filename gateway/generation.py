"""What is one generation, as it is asked for and as it is answered?

The values that pass between the public faces (REST, gRPC) and the dispatcher, in this process. The faces turn text
into token ids and back into their own wire shapes; the dispatcher sees only these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How a token is chosen. The defaults are the OpenAI API's.

    temperature: 0 is greedy. top_p: (0, 1], 1 is off. top_k: 0 is off. min_p: [0, 1], 0 is off.
    seed: the user's own, any 64-bit value, or None; then the dispatcher draws one and output may depend on drafts.
    repetition_penalty: > 0, 1 is off. presence_penalty, frequency_penalty: 0 is off.
    logit_bias: token id to the number added to its logit.
    num_logprobs: -1 none, 0 the sampled token's only, n plus the n best.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    num_logprobs: int = -1


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation asked for.

    request_id: unique for ever. token_ids: the prompt, at least one token.
    max_tokens: most tokens generated, None: up to the model's length.
    stop_token_ids: end the generation, counted, without text. stop: strings that end it and are not given out.
    ignore_eos: the model's own end tokens do not end it. draft_len: None: the gateway's default; at most what the
    gateway allows.
    input_field: what an error about the prompt names ("prompt", "messages").
    """

    request_id: str
    token_ids: tuple[int, ...]
    max_tokens: int | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    draft_len: int | None = None
    input_field: str = "prompt"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log probability under the model's unprocessed logits; top: the n best as (token id, logprob), best
    first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationUsage:
    """What a generation cost. drafted_tokens: drafts the target really verified; accepted_tokens: those kept after
    trimming.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """One commit, after trimming. token_ids, from_draft and (where asked for) logprobs are parallel.

    text: what became certain with this commit; it may lag behind token_ids (a character or a possible stop string held
    back). finish_reason: set on the last delta of a generation only, and so is usage. stop_reason: the stop string or
    stop token id that ended it; None for the model's own end token and for "length".
    """

    token_ids: tuple[int, ...]
    from_draft: tuple[bool, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: GenerationUsage | None = None
