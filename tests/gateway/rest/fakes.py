"""A dispatcher without services behind it, and an application around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from gateway.dispatcher import GatewayStatus, ServiceStatus
from gateway.errors import GatewayError
from gateway.generation import Delta, Generation, GenerationUsage, TokenLogprob
from gateway.rest.app import create_app
from gateway.rest.running import DeltaSource
from gateway.rest.served import ServedModel
from gateway.text.chat_template import ChatTemplate
from gateway.text.token_text import TokenText
from gateway.text.tokenizer import Tokenizer
from tests.gateway.text import tiny_tokenizers

ANSWER = "Hello, 🙂 世界!\u2028Bye."
MODEL = "tiny"


@dataclass
class FakeDispatcher:
    """Answers every generation with the same tokens, `commit_len` a step, all but the last of a step from the drafter.

    fails_after: raise `error` after that many deltas (0: at submit). never_ends: hang after the first delta.
    """

    tokenizer: Tokenizer
    answer: str = ANSWER
    commit_len: int = 3
    error: GatewayError | None = None
    fails_after: int = 0
    never_ends: bool = False
    submitted: list[Generation] = field(default_factory=list)
    open: set[str] = field(default_factory=set)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def submit(self, generation: Generation) -> DeltaSource:
        self.submitted.append(generation)
        if self.error is not None and self.fails_after == 0:
            raise self.error
        async with self.changed:
            self.open.add(generation.request_id)
            self.changed.notify_all()
        return _Source(self, generation)

    async def wait_open(self, count: int) -> None:
        """Until exactly `count` generations are open."""
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(lambda: len(self.open) == count)

    async def deltas(self, generation: Generation) -> AsyncIterator[Delta]:
        ids = self.tokenizer.encode(self.answer, add_special_tokens=False)
        if generation.max_tokens is not None:
            ids = ids[: generation.max_tokens]
        text = TokenText(self.tokenizer, generation.stop)
        count = num_accepted = 0
        groups = [ids[:1], *(ids[start : start + self.commit_len] for start in range(1, len(ids), self.commit_len))]
        for index, group in enumerate(groups):
            if self.error is not None and index == self.fails_after:
                raise self.error
            if self.never_ends and index == 1:
                await asyncio.Event().wait()
            step = text.push(group)
            kept = group[: step.num_kept]
            ended = step.stopped is not None or index == len(groups) - 1
            from_draft = tuple(position < len(group) - 1 for position in range(len(kept)))
            count += len(kept)
            num_accepted += sum(from_draft)
            logprobs = tuple(self.logprob(token_id, generation.sampling.num_logprobs) for token_id in kept)
            yield Delta(
                tuple(kept),
                from_draft,
                step.text + (text.flush() if ended else ""),
                logprobs if generation.sampling.num_logprobs >= 0 else (),
                finish_reason=("stop" if step.stopped is not None else "length") if ended else None,
                stop_reason=step.stopped,
                usage=GenerationUsage(len(generation.token_ids), count, 2, 10, num_accepted) if ended else None,
            )
            if ended:
                return
            await asyncio.sleep(0)

    def logprob(self, token_id: int, num_top: int) -> TokenLogprob:
        top = tuple((3 + index, -0.5 - index) for index in range(num_top))
        return TokenLogprob(token_id, float("-inf") if token_id % 5 == 0 else -0.25, top)


class _Source:
    def __init__(self, owner: FakeDispatcher, generation: Generation) -> None:
        self._owner = owner
        self._request_id = generation.request_id
        self._deltas = owner.deltas(generation)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._deltas

    async def aclose(self) -> None:
        async with self._owner.changed:
            self._owner.open.discard(self._request_id)
            self._owner.changed.notify_all()


def served(
    tokenizer: Tokenizer, template: str | None = tiny_tokenizers.CHATML, max_len: int | None = 512
) -> ServedModel:
    return ServedModel(
        name=MODEL,
        created=1,
        vocab_size=tokenizer.vocab_size,
        max_model_len=max_len,
        tokenizer=tokenizer,
        chat_template=None if template is None else ChatTemplate(template, {}),
    )


def ready() -> GatewayStatus:
    return GatewayStatus((ServiceStatus("127.0.0.1:1", "target", "serving", ""),), 1, 2, True)


def make_app(
    dispatcher: FakeDispatcher, model: ServedModel | None = None, status: Callable[[], GatewayStatus] = ready
) -> FastAPI:
    return create_app(
        dispatcher=dispatcher,
        served=model or served(dispatcher.tokenizer),
        max_draft_len=7,
        status=status,
        registry=CollectorRegistry(),
        version="0",
        max_body_bytes=100_000,
        body_deadline_s=2.0,
    )


def client(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway", timeout=30)
