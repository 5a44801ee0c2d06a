"""Answers of both endpoints, whole and streamed: the same text, tokens, log probabilities and usage either way."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from gateway.dispatcher import GatewayStatus, ServiceStatus
from gateway.errors import (
    GatewayError,
    GenerationTimeout,
    InvalidGeneration,
    QueueFull,
    ShuttingDown,
    StepFailed,
    TargetUnavailable,
)
from tests.gateway.rest import fakes
from tests.gateway.rest.test_validation import CHAT, HELLO, TEXT

INPUT: dict[str, dict[str, Any]] = {TEXT: {"prompt": "hello", "max_tokens": 100}, CHAT: {"messages": HELLO}}


async def ask(http: httpx.AsyncClient, path: str, **fields: Any) -> dict[str, Any]:
    answer = await http.post(path, json={**INPUT[path], **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def stream(http: httpx.AsyncClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The chunks; checks the framing."""
    answer = await http.post(path, json={**INPUT[path], "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in answer.headers
    events = answer.content.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") and len(event.splitlines()) == 1 for event in events[:-1])
    return [json.loads(event[6:]) for event in events[:-2]]


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def text_of(path: str, choice: dict[str, Any]) -> str:
    if path == TEXT:
        return str(choice["text"])
    return str(choice["message"]["content"] if "message" in choice else choice["delta"].get("content", ""))


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_whole_answer(http: httpx.AsyncClient, dispatcher: fakes.FakeDispatcher, path: str) -> None:
    answer = await ask(http, path)
    assert answer["object"] == ("text_completion" if path == TEXT else "chat.completion")
    assert answer["model"] == fakes.MODEL
    (choice,) = answer["choices"]
    assert text_of(path, choice) == fakes.ANSWER
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    ids = dispatcher.tokenizer.encode(fakes.ANSWER, add_special_tokens=False)
    assert choice["outrider"]["token_ids"] == ids
    assert choice["outrider"]["stop_reason"] is None
    assert choice["outrider"]["from_draft"][:4] == [False, True, True, False]
    (generation,) = dispatcher.submitted
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(generation.token_ids)
    assert usage["completion_tokens"] == len(ids)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    accepted = sum(choice["outrider"]["from_draft"])
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == usage["outrider"]["accepted_tokens"] == accepted
    assert details["rejected_prediction_tokens"] == max(0, 10 - accepted)
    steps = -(-(len(ids) - 1) // 3)
    assert usage["outrider"]["decode_steps"] == steps
    assert usage["outrider"]["mean_accepted_len"] == round((len(ids) - 1) / steps, 4)
    assert not dispatcher.open


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"stop": ["世"]}, {"logprobs": True, "top_logprobs": 2, "n": 2}])
async def test_streamed_parts_make_the_whole(http: httpx.AsyncClient, path: str, fields: dict[str, Any]) -> None:
    if path == TEXT and "logprobs" in fields:
        fields = {"logprobs": 2, "n": 2}
    whole = await ask(http, path, **fields)
    chunks = await stream(http, path, **fields, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(text_of(path, part) for part in parts) == text_of(path, choice)
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert joined(part["outrider"]["token_ids"] for part in parts) == choice["outrider"]["token_ids"]
        assert joined(part["outrider"]["from_draft"] for part in parts) == choice["outrider"]["from_draft"]
        for part in parts:
            spans = part["outrider"]["spans"]
            assert "".join(text for text, _ in spans) == text_of(path, part)
            assert all(one[1] != other[1] for one, other in itertools.pairwise(spans))
        if path == CHAT:
            assert [part["delta"].get("role") for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        if choice["logprobs"] is not None:
            for key, value in choice["logprobs"].items():
                if value is not None:
                    assert joined(part["logprobs"][key] for part in parts) == value


async def test_without_include_usage_no_chunk_speaks_of_usage(http: httpx.AsyncClient) -> None:
    assert all("usage" not in chunk for chunk in await stream(http, CHAT))


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_a_stop_string_ends_text_and_tokens(
    http: httpx.AsyncClient, dispatcher: fakes.FakeDispatcher, path: str
) -> None:
    (choice,) = (await ask(http, path, stop=["世"]))["choices"]
    assert text_of(path, choice) == "Hello, 🙂 "
    assert (choice["finish_reason"], choice["outrider"]["stop_reason"]) == ("stop", "世")
    assert dispatcher.tokenizer.decode(choice["outrider"]["token_ids"]).startswith("Hello, 🙂 世")


async def test_completion_logprobs(http: httpx.AsyncClient, dispatcher: fakes.FakeDispatcher) -> None:
    (choice,) = (await ask(http, TEXT, logprobs=2))["choices"]
    logprobs, ids = choice["logprobs"], choice["outrider"]["token_ids"]
    assert {len(logprobs[key]) for key in logprobs} == {len(ids)}
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    for index, token_id in enumerate(ids):
        before = dispatcher.tokenizer.decode(ids[:index]).rstrip("\ufffd")
        assert logprobs["text_offset"][index] == len(before)
        assert logprobs["token_logprobs"][index] == (-9999.0 if token_id % 5 == 0 else -0.25)
        assert logprobs["tokens"][index] in logprobs["top_logprobs"][index]
        assert 2 <= len(logprobs["top_logprobs"][index]) <= 3
    assert any(token.startswith("bytes:\\x") for token in logprobs["tokens"])
    (choice,) = (await ask(http, TEXT, logprobs=0))["choices"]
    assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [[t] for t in choice["logprobs"]["tokens"]]


async def test_chat_logprobs(http: httpx.AsyncClient, dispatcher: fakes.FakeDispatcher) -> None:
    (choice,) = (await ask(http, CHAT, logprobs=True, top_logprobs=2))["choices"]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == fakes.ANSWER
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert set(content[0]["top_logprobs"][0]) == {"token", "logprob", "bytes"}
    assert choice["logprobs"]["refusal"] is None
    (choice,) = (await ask(http, CHAT, logprobs=True))["choices"]
    assert all(entry["top_logprobs"] == [] for entry in choice["logprobs"]["content"])
    assert dispatcher.submitted[-1].sampling.num_logprobs == 0


async def test_what_the_dispatcher_is_asked(http: httpx.AsyncClient, dispatcher: fakes.FakeDispatcher) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": -1,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": -100},
        "stop": "x",
        "stop_token_ids": [2, 2],
        "ignore_eos": True,
        "draft_len": 0,
        "max_tokens": 9,
        "n": 2,
    }
    await ask(http, CHAT, **fields)
    first, second = dispatcher.submitted
    assert (first.sampling.seed, second.sampling.seed) == (2**64 - 1, 0)
    assert first.sampling.logit_bias == {7: -100.0}
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (0.5, 0.9, 5)
    assert (first.sampling.min_p, first.sampling.repetition_penalty) == (0.1, 1.1)
    assert (first.sampling.presence_penalty, first.sampling.frequency_penalty) == (0.3, -0.3)
    assert (first.stop, first.stop_token_ids, first.ignore_eos) == (("x",), frozenset({2}), True)
    assert (first.draft_len, first.max_tokens, first.input_field) == (0, 9, "messages")
    assert first.request_id != second.request_id
    template = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert list(first.token_ids) == dispatcher.tokenizer.encode(template, add_special_tokens=False)
    assert 1 in first.token_ids  # the special token itself, not its characters
    dispatcher.submitted.clear()
    await ask(http, TEXT, max_tokens=None)
    (generation,) = dispatcher.submitted
    assert (generation.max_tokens, generation.draft_len, generation.input_field) == (16, None, "prompt")
    assert generation.sampling.seed is None
    assert generation.sampling.temperature == 1.0
    dispatcher.submitted.clear()
    await ask(http, CHAT, max_completion_tokens=5)
    assert dispatcher.submitted[0].max_tokens == 5


async def test_parts_and_developer_messages(http: httpx.AsyncClient, dispatcher: fakes.FakeDispatcher) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await ask(http, CHAT, messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": parts}])
    prompt = "<|im_start|>system\nx<|im_end|>\n<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    assert list(dispatcher.submitted[0].token_ids) == dispatcher.tokenizer.encode(prompt, add_special_tokens=False)


async def test_several_prompts_each_with_n_choices(http: httpx.AsyncClient, dispatcher: fakes.FakeDispatcher) -> None:
    answer = await ask(http, TEXT, prompt=[[3, 4], [5, 6, 7]], n=2)
    assert [generation.token_ids for generation in dispatcher.submitted] == [(3, 4), (3, 4), (5, 6, 7), (5, 6, 7)]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == sum(len(c["outrider"]["token_ids"]) for c in answer["choices"])


ERRORS: list[tuple[GatewayError, int, str | None]] = [
    (InvalidGeneration("max_tokens", "too many"), 400, "max_tokens"),
    (QueueFull(2.5), 429, None),
    (TargetUnavailable("away"), 503, None),
    (GenerationTimeout("waited"), 503, None),
    (ShuttingDown("bye"), 503, None),
    (StepFailed("broken"), 500, None),
]


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("error", "status", "param"), ERRORS)
@pytest.mark.parametrize("when", [0, 2])
async def test_errors_of_a_generation(
    http: httpx.AsyncClient,
    dispatcher: fakes.FakeDispatcher,
    path: str,
    streamed: bool,
    n: int,
    error: GatewayError,
    status: int,
    param: str | None,
    when: int,
) -> None:
    dispatcher.error, dispatcher.fails_after = error, when
    answer = await http.post(path, json={**INPUT[path], "stream": streamed, "n": n})
    if streamed and when:
        assert answer.status_code == 200
        *parts, last, end = answer.content.decode().split("\n\n")
        assert end == ""
        assert len(parts) >= 2
        content = json.loads(last.removeprefix("data: "))
    else:
        assert answer.status_code == status
        content = answer.json()
        if isinstance(error, QueueFull):
            assert answer.headers["retry-after"] == "3"
    assert content["error"]["param"] == param
    assert content["error"]["message"] == (f"{param}: {error.detail}" if param else error.detail)
    assert not dispatcher.open


async def test_models_health_metrics_and_docs(dispatcher: fakes.FakeDispatcher) -> None:
    reports = [fakes.ready(), GatewayStatus((ServiceStatus("h:1", "target", "lost", "gone"),), 0, 4, False)]
    async with fakes.client(fakes.make_app(dispatcher, status=lambda: reports[0])) as http:
        models = (await http.get("/v1/models")).json()
        assert [(model["id"], model["max_draft_len"]) for model in models["data"]] == [(fakes.MODEL, 7)]
        assert (await http.get(f"/v1/models/{fakes.MODEL}")).json()["object"] == "model"
        missing = await http.get("/v1/models/no/such")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        health = await http.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "ok")
        del reports[0]
        health = await http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "unavailable")
        assert health.json()["services"] == [{"role": "target", "address": "h:1", "state": "lost", "detail": "gone"}]
        metrics = await http.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        page = await http.get("/docs")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        description = (await http.get("/openapi.json")).json()
    schemas = description["components"]["schemas"]
    assert "draft_len" in schemas["ChatCompletionRequest"]["properties"]
    assert {"CompletionRequest", "ChatMessage", "StreamOptions", "Error"} <= set(schemas)
    references = set(json.dumps(description).split('"#/components/schemas/')[1:])
    assert {reference.split('"')[0] for reference in references} <= set(schemas)
    assert not re.search(
        r"<script|<link|<img|@import|src=|https?:|//", page.text
    )  # nothing to fetch: no internet needed
    for name, schema in schemas.items():
        if not name.endswith("ValidationError"):
            assert all(f"<code>{field}</code>" in page.text for field in schema["properties"]), name
    for path in description["paths"]:
        assert f"{path}</code></h2>" in page.text
    assert set(description["paths"][TEXT]["post"]["responses"]) >= {"400", "404", "429", "503"}
