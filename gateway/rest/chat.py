"""How is `POST /v1/chat/completions` asked and answered?"""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal, NotRequired, TypedDict

from gateway.generation import Delta, FinishReason, Generation, TokenLogprob
from gateway.rest.answers import (
    ChoiceExtension,
    Usage,
    UsageTally,
    chunk_extension,
    extend,
    finite_logprob,
    token_label,
)
from gateway.rest.generations import build_generations, check_shared
from gateway.rest.problems import invalid
from gateway.rest.running import Event
from gateway.rest.schemas import ChatCompletionRequest, template_role
from gateway.rest.served import ServedModel
from gateway.rest.spans import SpanWriter
from gateway.text.tokenizer import Tokenizer


class TopLogprob(TypedDict):
    """One of the most likely tokens at a position. bytes: what the token stands for; a character may need several
    tokens.
    """

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob):
    """The token that was taken at a position."""

    top_logprobs: list[TopLogprob]


class Logprobs(TypedDict):
    """`choices[i].logprobs`."""

    content: list[ContentLogprob]
    refusal: None


class Message(TypedDict):
    """`choices[i].message`."""

    role: Literal["assistant"]
    content: str
    refusal: None


class DeltaMessage(TypedDict):
    """`choices[i].delta` of a chunk; the role comes with the first."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


class Choice(TypedDict):
    """`choices[i]` of a whole answer."""

    index: int
    message: Message
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
    outrider: ChoiceExtension


class ChunkChoice(TypedDict):
    """`choices[i]` of a chunk."""

    index: int
    delta: DeltaMessage
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
    outrider: ChoiceExtension


class ChatCompletion(TypedDict):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class ChatCompletionChunk(TypedDict):
    """One streamed chunk: one commit of one choice."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]


async def prepare(request: ChatCompletionRequest, served: ServedModel) -> tuple[list[Generation], ChatAnswer]:
    """The generations asked for and the answer to fill from them. Raises ApiError naming the field."""
    check_shared(request, served)
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "is only allowed when logprobs is true")
    if request.response_format is not None and request.response_format != {"type": "text"}:
        raise invalid("response_format", "only the type text is supported", "unsupported_parameter")
    max_tokens = request.max_tokens
    if request.max_completion_tokens is not None:
        if max_tokens not in (None, request.max_completion_tokens):
            raise invalid("max_completion_tokens", "differs from max_tokens, its older name")
        max_tokens = request.max_completion_tokens
    messages = [
        {"role": template_role(message.role), "content": message.content}
        | ({} if message.name is None else {"name": message.name})
        for message in request.messages
    ]
    prompt = await served.encode_chat(messages, request.chat_template_kwargs)
    answer_id = f"chatcmpl-{uuid.uuid4().hex}"
    generations = build_generations(
        request,
        [prompt],
        answer_id=answer_id,
        input_field="messages",
        max_tokens=max_tokens,
        num_logprobs=(request.top_logprobs or 0) if request.logprobs else -1,
    )
    include_usage = bool(request.stream_options and request.stream_options.include_usage)
    return generations, ChatAnswer(answer_id, served, len(generations), bool(request.logprobs), include_usage)


class ChatAnswer:
    """See `answers.Answer`."""

    def __init__(
        self, answer_id: str, served: ServedModel, num_choices: int, logprobs: bool, include_usage: bool
    ) -> None:
        self._id = answer_id
        self._created = int(time.time())
        self._model = served.name
        self._tokenizer = served.tokenizer
        self._with_logprobs = logprobs
        self._include_usage = include_usage
        self._tally = UsageTally(num_choices)
        self._begun = [False] * num_choices
        self._spans = [SpanWriter(served.tokenizer) for _ in range(num_choices)]
        self._choices = [
            Choice(
                index=index,
                message=Message(role="assistant", content="", refusal=None),
                logprobs=Logprobs(content=[], refusal=None) if logprobs else None,
                finish_reason=None,
                outrider=ChoiceExtension(token_ids=[], from_draft=[]),
            )
            for index in range(num_choices)
        ]

    def chunk(self, event: Event) -> dict[str, Any]:
        """See `answers.Answer`."""
        self._tally.add(event)
        delta = event.delta
        message = DeltaMessage()
        if not self._begun[event.choice]:
            self._begun[event.choice] = True
            message["role"] = "assistant"
            message["content"] = ""
        if delta.text:
            message["content"] = delta.text
        choice = ChunkChoice(
            index=event.choice,
            delta=message,
            logprobs=self._delta_logprobs(delta),
            finish_reason=delta.finish_reason,
            outrider=chunk_extension(delta, self._spans[event.choice]),
        )
        answer = self._chunk([choice])
        if self._include_usage:
            answer["usage"] = None
        return dict(answer)

    def usage_chunk(self) -> dict[str, Any]:
        """See `answers.Answer`."""
        answer = self._chunk([])
        answer["usage"] = self._tally.usage()
        return dict(answer)

    def add(self, event: Event) -> None:
        """See `answers.Answer`."""
        self._tally.add(event)
        delta, choice = event.delta, self._choices[event.choice]
        choice["message"]["content"] += delta.text
        choice["finish_reason"] = delta.finish_reason
        extend(choice["outrider"], delta)
        added = self._delta_logprobs(delta)
        if choice["logprobs"] is not None and added is not None:
            choice["logprobs"]["content"] += added["content"]

    def whole(self) -> dict[str, Any]:
        """See `answers.Answer`."""
        answer = ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            choices=self._choices,
            usage=self._tally.usage(),
        )
        return dict(answer)

    def _chunk(self, choices: list[ChunkChoice]) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._id, object="chat.completion.chunk", created=self._created, model=self._model, choices=choices
        )

    def _delta_logprobs(self, delta: Delta) -> Logprobs | None:
        if not self._with_logprobs:
            return None
        return Logprobs(content=[self._content_logprob(entry) for entry in delta.logprobs], refusal=None)

    def _content_logprob(self, entry: TokenLogprob) -> ContentLogprob:
        taken = _top_logprob(self._tokenizer, entry.token_id, entry.logprob)
        top = [_top_logprob(self._tokenizer, token_id, logprob) for token_id, logprob in entry.top]
        return ContentLogprob(token=taken["token"], logprob=taken["logprob"], bytes=taken["bytes"], top_logprobs=top)


def _top_logprob(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    token_bytes = tokenizer.token_bytes(token_id)
    return TopLogprob(token=token_label(token_bytes), logprob=finite_logprob(logprob), bytes=list(token_bytes))
