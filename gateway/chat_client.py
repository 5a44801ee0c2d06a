"""How does a client of ours ask one chat question and follow the answer?

Over the public HTTP API with the official `openai` client, like anybody else's; Outrider's own fields of the stream
tell which text was drafted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import openai
    from openai.types.chat import ChatCompletionMessageParam

REQUEST_TIMEOUT_S = 600.0
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class ClientMissing(Exception):
    """The `openai` package is not installed."""


class AnswerFailed(Exception):
    """The gateway turned the request down or could not be reached; the message is for a person."""


@dataclass(slots=True)
class Answer:
    """A whole answer. Times are `time.perf_counter` seconds.

    commit_lens: tokens of each commit, the first being the one that ended the prompt.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    commit_lens: list[int] = field(default_factory=list)
    sent_at: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first commit, over the time from the first commit to the last."""
        seconds = self.last_at - self.first_at
        return sum(self.commit_lens[1:]) / seconds if seconds > 0 else 0.0

    @property
    def mean_accepted_len(self) -> float:
        """Tokens per verify step, that is per commit after the first; 1 without drafts."""
        steps = len(self.commit_lens) - 1
        return sum(self.commit_lens[1:]) / steps if steps > 0 else 1.0


def connect(url: str) -> openai.AsyncOpenAI:
    """A client of the gateway at `url` (without `/v1`). Raises ClientMissing, AnswerFailed where that is no URL."""
    try:
        import openai
    except ImportError as error:
        raise ClientMissing("this needs the openai package: pip install 'outrider[quickstart]'") from error
    # A proxy of the user's is not for this machine's own gateway.
    http_client = openai.DefaultAsyncHttpxClient(trust_env=False) if _host(url) in LOOPBACK else None
    return openai.AsyncOpenAI(
        base_url=f"{url.rstrip('/')}/v1",
        api_key="none",
        max_retries=0,
        timeout=REQUEST_TIMEOUT_S,
        http_client=http_client,
    )


def _host(url: str) -> str:
    try:
        parts = urlsplit(url)
        if parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0:  # a bad port raises
            return parts.hostname
    except ValueError:
        pass
    raise AnswerFailed(f"{url}: is not a URL: must be http://HOST:PORT")


async def served_model(client: openai.AsyncOpenAI) -> str:
    """The name of the model behind the gateway. Raises AnswerFailed."""
    import openai

    try:
        models = await client.models.list()
    except openai.APIConnectionError as error:
        raise AnswerFailed(f"{client.base_url}: {error} Is `outrider up` (or `make serve`) running there?") from error
    except openai.OpenAIError as error:
        raise AnswerFailed(f"{client.base_url}: {error}") from error
    return models.data[0].id


async def ask(
    client: openai.AsyncOpenAI,
    model: str,
    messages: Sequence[ChatCompletionMessageParam],
    on_span: Callable[[str, bool], None],
    *,
    max_tokens: int | None,
    temperature: float,
    draft_len: int | None,
) -> Answer:
    """Ask, and follow the streamed answer. on_span(text, from_draft) is called as text comes. Raises AnswerFailed."""
    import openai

    answer = Answer(sent_at=time.perf_counter())
    try:
        stream = await client.chat.completions.create(
            model=model,
            messages=list(messages),
            max_tokens=max_tokens,
            temperature=temperature,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={} if draft_len is None else {"draft_len": draft_len},
        )
        async with stream:
            async for chunk in stream:
                now = time.perf_counter()
                if chunk.usage is not None:
                    answer.usage = chunk.usage.to_dict()
                if chunk.choices:
                    _add(answer, chunk.choices[0].to_dict(), now, on_span)
    except openai.OpenAIError as error:
        raise AnswerFailed(str(error)) from error
    return answer


def _add(answer: Answer, choice: dict[str, Any], now: float, on_span: Callable[[str, bool], None]) -> None:
    extension = choice["outrider"]
    if extension["token_ids"]:
        answer.token_ids += extension["token_ids"]
        answer.from_draft += extension["from_draft"]
        answer.commit_lens.append(len(extension["token_ids"]))
        answer.first_at = answer.first_at or now
        answer.last_at = now
    for text, from_draft in extension["spans"]:
        answer.text += text
        on_span(text, from_draft)
    answer.finish_reason = choice["finish_reason"] or answer.finish_reason
