"""Every bad body gets 400 (404, 413) in OpenAI's error shape with the field at fault named; nothing ever gets a 500."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gateway.rest.problems import ApiError
from gateway.rest.schemas import ChatCompletionRequest, CompletionRequest
from gateway.rest.validation import parse_request
from tests.gateway.rest import fakes
from tests.gateway.text import tiny_tokenizers

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


async def refused(http: httpx.AsyncClient, path: str, body: bytes | str, status: int = 400) -> dict[str, Any]:
    answer = await http.post(path, content=body)
    assert answer.status_code == status, answer.text
    content = answer.json()
    assert set(content) == {"error"}
    error = content["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    return dict(error)


BAD_FIELDS: list[tuple[str, str, str]] = [
    # path, fields as JSON text, the field named
    (TEXT, '"prompt": null', "prompt"),
    (TEXT, '"prompt": 7', "prompt"),
    (TEXT, '"prompt": []', "prompt"),
    (TEXT, '"prompt": ""', "prompt"),
    (TEXT, '"prompt": [[]]', "prompt"),
    (TEXT, '"prompt": [[1], []]', "prompt[1]"),
    (TEXT, '"prompt": ["a", [1]]', "prompt[1]"),
    (TEXT, '"prompt": [1, "a"]', "prompt[1]"),
    (TEXT, '"prompt": [1, true]', "prompt[1]"),
    (TEXT, '"prompt": [1, 2.5]', "prompt[1]"),
    (TEXT, '"prompt": [1, -1]', "prompt[1]"),
    (TEXT, '"prompt": [1, 99999]', "prompt[1]"),
    (TEXT, '"prompt": [[1], [2, 1e3]]', "prompt[1][1]"),
    (TEXT, '"prompt": [[1], [2, 123456789]]', "prompt[1][1]"),
    (TEXT, '"prompt": [1e999]', "prompt[0]"),
    (TEXT, '"prompt": "\\ud800"', "prompt"),
    (TEXT, '"prompt": ["a", "b\\udc00c"]', "prompt[1]"),
    (TEXT, '"suffix": "end"', "suffix"),
    (TEXT, '"echo": true', "echo"),
    (TEXT, '"best_of": 2', "best_of"),
    (TEXT, '"logprobs": true', "logprobs"),
    (TEXT, '"logprobs": 21', "logprobs"),
    (TEXT, '"messages": []', "messages"),
    (TEXT, '"n": 65, "prompt": ["a", "b"]', "n"),
    (CHAT, '"messages": []', "messages"),
    (CHAT, '"messages": {}', "messages"),
    (CHAT, '"messages": ["hi"]', "messages[0]"),
    (CHAT, '"messages": [{"content": "hi"}]', "messages[0].role"),
    (CHAT, '"messages": [{"role": "user"}]', "messages[0].content"),
    (CHAT, '"messages": [{"role": "wizard", "content": "hi"}]', "messages[0].role"),
    (CHAT, '"messages": [{"role": "tool", "content": "hi"}]', "messages[0].role"),
    (CHAT, '"messages": [{"role": "user", "content": null}]', "messages[0].content"),
    (CHAT, '"messages": [{"role": "user", "content": 3}]', "messages[0].content"),
    (CHAT, '"messages": [{"role": "user", "content": "hi", "colour": 1}]', "messages[0].colour"),
    (CHAT, '"messages": [{"role": "user", "content": "\\ud83d"}]', "messages[0].content"),
    (CHAT, '"messages": [{"role": "user", "content": [{"type": "image_url"}]}]', "messages[0].content[0].type"),
    (CHAT, '"messages": [{"role": "user", "content": [{"type": "text"}]}]', "messages[0].content[0].text"),
    (CHAT, '"messages": [{"role": "user", "content": ["hi"]}]', "messages[0].content[0]"),
    (CHAT, '"logprobs": 2', "logprobs"),
    (CHAT, '"top_logprobs": 2', "top_logprobs"),
    (CHAT, '"logprobs": true, "top_logprobs": 21', "top_logprobs"),
    (CHAT, '"max_tokens": 3, "max_completion_tokens": 4', "max_completion_tokens"),
    (CHAT, '"response_format": {"type": "json_object"}', "response_format"),
    (CHAT, '"tools": [{"type": "function"}]', "tools"),
    (CHAT, '"tool_choice": "required"', "tool_choice"),
    (CHAT, '"functions": [{}]', "functions"),
    (CHAT, '"modalities": ["audio"]', "modalities[0]"),
    (CHAT, '"modalities": ["text", "text"]', "modalities"),
    (CHAT, '"prediction": {"type": "content"}', "prediction"),
    (CHAT, '"reasoning_effort": "high"', "reasoning_effort"),
    (CHAT, '"prompt": "hi"', "prompt"),
    (CHAT, '"chat_template_kwargs": {"a": {"b": [NaN]}}', "chat_template_kwargs.a.b[0]"),
    (CHAT, '"chat_template_kwargs": {"a": 1' + "0" * 30 + "}", "chat_template_kwargs.a"),
]
BAD_ANYWHERE: list[tuple[str, str]] = [
    ('"model": ""', "model"),
    ('"model": 3', "model"),
    ('"max_tokens": 0', "max_tokens"),
    ('"max_tokens": -1', "max_tokens"),
    ('"max_tokens": 2.0', "max_tokens"),
    ('"max_tokens": "5"', "max_tokens"),
    ('"max_tokens": true', "max_tokens"),
    ('"max_tokens": 1' + "0" * 30, "max_tokens"),
    ('"max_tokens": 1' + "0" * 5000, "max_tokens"),
    ('"max_tokens": 4294967296', "max_tokens"),
    ('"temperature": NaN', "temperature"),
    ('"temperature": Infinity', "temperature"),
    ('"temperature": -Infinity', "temperature"),
    ('"temperature": 1e999', "temperature"),
    ('"temperature": -0.1', "temperature"),
    ('"temperature": 2.1', "temperature"),
    ('"temperature": "hot"', "temperature"),
    ('"temperature": []', "temperature"),
    ('"top_p": 0', "top_p"),
    ('"top_p": 1.01', "top_p"),
    ('"top_k": -2', "top_k"),
    ('"top_k": 1e2', "top_k"),
    ('"min_p": 1.5', "min_p"),
    ('"seed": 9223372036854775808', "seed"),
    ('"seed": 1.5', "seed"),
    ('"n": 0', "n"),
    ('"n": 129', "n"),
    ('"presence_penalty": 3', "presence_penalty"),
    ('"frequency_penalty": -3', "frequency_penalty"),
    ('"repetition_penalty": 0', "repetition_penalty"),
    ('"logit_bias": []', "logit_bias"),
    ('"logit_bias": {"a": 1}', "logit_bias"),
    ('"logit_bias": {"-1": 1}', "logit_bias"),
    ('"logit_bias": {"3": 101}', "logit_bias.3"),
    ('"logit_bias": {"3": "x"}', "logit_bias.3"),
    ('"logit_bias": {"3": NaN}', "logit_bias.3"),
    ('"logit_bias": {"99999": 1}', "logit_bias.99999"),
    ('"stop": 5', "stop"),
    ('"stop": ""', "stop"),
    ('"stop": ["a", ""]', "stop[1]"),
    ('"stop": ["a", 1]', "stop[1]"),
    ('"stop": ["\\ud800"]', "stop[0]"),
    ('"stop": ' + json.dumps(["x"] * 17), "stop"),
    ('"stop": ' + json.dumps("x" * 257), "stop"),
    ('"stop_token_ids": 5', "stop_token_ids"),
    ('"stop_token_ids": [-1]', "stop_token_ids[0]"),
    ('"stop_token_ids": [0, 99999]', "stop_token_ids[1]"),
    ('"draft_len": -1', "draft_len"),
    ('"draft_len": "4"', "draft_len"),
    ('"stream": "yes"', "stream"),
    ('"stream": 1', "stream"),
    ('"stream_options": {"include_usage": true}', "stream_options"),
    ('"stream": true, "stream_options": {"usage": true}', "stream_options.usage"),
    ('"stream": true, "stream_options": true', "stream_options"),
    ('"ignore_eos": 1', "ignore_eos"),
    ('"store": true', "store"),
    ('"service_tier": "flex"', "service_tier"),
    ('"speed": "max"', "speed"),
    ('"metadata": {"a": 1}', "metadata.a"),
    ('"logit_bias": {' + ", ".join(f'"{key}": 1' for key in range(4097)) + "}", "logit_bias"),
    (", ".join(f'"f{key}": 1' for key in range(4097)), "body"),
    ('"user": {"deep": ' + "[" * 80 + "]" * 80 + "}", "user.deep" + "[0]" * 62),
]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [*BAD_FIELDS, *((path, *bad) for path in (TEXT, CHAT) for bad in BAD_ANYWHERE)],
)
async def test_bad_field_is_named(
    http: httpx.AsyncClient, dispatcher: fakes.FakeDispatcher, path: str, fields: str, param: str
) -> None:
    good = '"prompt": "hello"' if path == TEXT else '"messages": ' + json.dumps(HELLO)
    name = good.split(":")[0]
    body = "{" + (fields if fields.startswith(name) or f", {name}" in fields else f"{good}, {fields}") + "}"
    error = await refused(http, path, body)
    assert error["param"] == (param if len(param) <= 80 else param[:77] + "...")
    assert error["param"] in error["message"]
    assert dispatcher.submitted == []


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "a",}',
        b'{"prompt": "a"} x',
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe{}",
        b'{"prompt": "\xff"}',
        '{"prompt": "a"}'.encode("utf-16"),
        b'{"prompt": ' + b"[" * 20_000,
        b"[" * 20_000 + b"]" * 20_000,
    ],
)
async def test_what_is_no_json_object_is_said_so(http: httpx.AsyncClient, path: str, body: bytes) -> None:
    error = await refused(http, path, body)
    assert (error["param"], error["code"]) == ("body", "invalid_json")


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_missing_input_unknown_field_and_unknown_model(http: httpx.AsyncClient, path: str) -> None:
    needed = "prompt" if path == TEXT else "messages"
    error = await refused(http, path, "{}")
    assert (error["param"], error["code"]) == (needed, "missing_required_parameter")
    good = {"prompt": "hi"} if path == TEXT else {"messages": HELLO}
    error = await refused(http, path, json.dumps({**good, "model": "other"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "tiny" in error["message"]
    error = await refused(http, path, json.dumps({**good, "\udcff": 1}))
    assert error["param"] == "body"


async def test_a_long_body_is_not_read_to_its_end(http: httpx.AsyncClient) -> None:
    error = await refused(http, TEXT, json.dumps({"prompt": "a" * 100_000}), 413)
    assert error["param"] == "body"
    error = await refused(http, TEXT, json.dumps({"prompt": "a" * 99_000}))
    assert error["param"] == "prompt"
    assert "cannot fit" in error["message"]


async def test_a_body_that_says_it_is_too_long_is_not_read(http: httpx.AsyncClient) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"{"

    for length, status in [("100001", 413), ("9" * 30, 413), ("1", 400)]:
        answer = await http.post(TEXT, content=body(), headers={"Content-Length": length})
        assert answer.status_code == status
        assert answer.json()["error"]["param"] == "body"


async def test_too_many_prompts_are_not_the_fault_of_n(http: httpx.AsyncClient) -> None:
    assert (await refused(http, TEXT, json.dumps({"prompt": ["a"] * 129})))["param"] == "prompt"
    assert (await refused(http, TEXT, json.dumps({"prompt": ["a"] * 65, "n": 2})))["param"] == "n"


async def test_many_texts_leave_turns_to_others(http: httpx.AsyncClient) -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.create_task(others())
    error = await refused(http, TEXT, json.dumps({"prompt": ["a"] * 127 + [""]}))
    task.cancel()
    assert error["param"] == "prompt[127]"
    assert turns >= 100


async def test_one_long_body_is_checked_at_a_time(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    active: list[int] = []
    most = 0

    def watched(body: bytes, schema: type[CompletionRequest]) -> CompletionRequest:
        nonlocal most
        active.append(1)
        most = max(most, len(active))
        try:
            return parse_request(body, schema)
        finally:
            active.pop()

    monkeypatch.setattr("gateway.rest.app.parse_request", watched)
    await asyncio.gather(*(refused(http, TEXT, json.dumps({"prompt": ["a"] * 17_000})) for _ in range(6)))
    assert most == 1


@pytest.mark.parametrize(
    ("template", "words"),
    [("{{ raise_exception('roles must alternate') }}", "roles must alternate"), (None, "no chat template")],
)
async def test_a_conversation_the_model_cannot_take(
    dispatcher: fakes.FakeDispatcher, template: str | None, words: str
) -> None:
    model = fakes.served(dispatcher.tokenizer, template)
    async with fakes.client(fakes.make_app(dispatcher, model)) as http:
        error = await refused(http, CHAT, json.dumps({"messages": HELLO}))
    assert error["param"] == "messages"
    assert words in error["message"]


async def test_paths_and_methods_that_are_not_there(http: httpx.AsyncClient) -> None:
    for method, path, status in [("GET", "/v2", 404), ("GET", TEXT, 405), ("DELETE", "/v1/models", 405)]:
        answer = await http.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_null_and_harmless_fields_are_as_if_left_out(http: httpx.AsyncClient) -> None:
    for path, schema, good in (
        (TEXT, CompletionRequest, {"prompt": "hi"}),
        (CHAT, ChatCompletionRequest, {"messages": HELLO}),
    ):
        nulls: dict[str, Any] = dict.fromkeys(schema.model_fields)
        assert (await http.post(path, json={**nulls, **good})).status_code == 200
        harmless = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "top_k": -1}
        assert (await http.post(path, json={**harmless, **good})).status_code == 200
    spoken = [{"role": "assistant", "content": "a", "refusal": None, "tool_calls": None, "annotations": []}, *HELLO]
    extra = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}}
    assert (await http.post(CHAT, json={"messages": spoken, **extra})).status_code == 200


# Anything at all.

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


def bodies(schema: type[CompletionRequest] | type[ChatCompletionRequest]) -> st.SearchStrategy[dict[str, Any]]:
    message = st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"]) | json_values, "content": json_values | st.just("hi")}
    )
    likely = {
        "prompt": st.just("hi") | st.lists(st.integers(-1, 400), max_size=4) | json_values,
        "messages": st.just(HELLO) | st.lists(message, max_size=3) | json_values,
        "model": st.just("tiny") | json_values,
        "max_tokens": st.integers(1, 9) | json_values,
        "logit_bias": st.dictionaries(st.integers(-1, 400).map(str), st.floats(-101, 101) | json_values) | json_values,
        "n": st.integers(0, 3) | json_values,
    }
    names = list(schema.model_fields)
    return st.lists(st.sampled_from(names), unique=True, max_size=5).flatmap(
        lambda chosen: st.fixed_dictionaries({name: likely.get(name, json_values) for name in chosen})
    )


@pytest.mark.parametrize(("path", "schema"), [(TEXT, CompletionRequest), (CHAT, ChatCompletionRequest)])
def test_no_body_gets_a_500(path: str, schema: type[CompletionRequest] | type[ChatCompletionRequest]) -> None:
    import asyncio

    async def one(body: dict[str, Any]) -> None:
        dispatcher = fakes.FakeDispatcher(tiny_tokenizers.byte_level(), answer="ok")
        async with fakes.client(fakes.make_app(dispatcher)) as http:
            answer = await http.post(path, content=json.dumps(body))
        assert answer.status_code in (200, 400, 404), answer.text
        if answer.status_code != 200:
            assert answer.json()["error"]["param"]
        assert not dispatcher.open

    @given(bodies(schema))
    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    def fuzz(body: dict[str, Any]) -> None:
        asyncio.run(one(body))

    fuzz()


@given(st.binary(max_size=64) | json_values.map(lambda value: json.dumps(value).encode()))
@example(b'{"": 18446744073709551616}')
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_refused_by_name(body: bytes) -> None:
    for schema in (CompletionRequest, ChatCompletionRequest):
        with pytest.raises(ApiError) as caught:
            parse_request(body, schema)
        assert caught.value.problem.http_status == 400
        assert caught.value.problem.param
        json.dumps(caught.value.problem.body()).encode()
