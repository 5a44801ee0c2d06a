"""Our own client against the real HTTP face: figures, colours, errors, a conversation."""

from __future__ import annotations

import asyncio
import io
import json

import pytest
from rich.console import Console

from gateway.chat_client import Answer, AnswerFailed, ask, connect, served_model
from gateway.conversation import Conversation, converse
from gateway.errors import InvalidGeneration
from gateway.quickstart import comparison, json_line, summary
from tests.gateway.rest import fakes
from tests.gateway.rest.test_server import serving
from tests.gateway.text import tiny_tokenizers


@pytest.fixture
def dispatcher() -> fakes.FakeDispatcher:
    return fakes.FakeDispatcher(tiny_tokenizers.byte_level())


async def test_follows_an_answer(dispatcher: fakes.FakeDispatcher) -> None:
    spans: list[tuple[str, bool]] = []
    async with serving(dispatcher) as url, connect(url) as client:
        assert await served_model(client) == fakes.MODEL
        answer = await ask(
            client,
            fakes.MODEL,
            [{"role": "user", "content": "hi"}],
            lambda text, from_draft: spans.append((text, from_draft)),
            max_tokens=None,
            temperature=0.0,
            draft_len=2,
        )
    assert answer.text == "".join(text for text, _ in spans) == fakes.ANSWER
    assert answer.token_ids == dispatcher.tokenizer.encode(fakes.ANSWER, add_special_tokens=False)
    assert answer.commit_lens[:2] == [1, 3]
    assert sum(answer.commit_lens) == len(answer.token_ids) == len(answer.from_draft)
    assert any(from_draft for _, from_draft in spans)
    assert answer.finish_reason == "length"
    assert answer.mean_accepted_len == pytest.approx(answer.usage["outrider"]["mean_accepted_len"], abs=1e-3)
    assert dispatcher.submitted[0].draft_len == 2
    assert dispatcher.submitted[0].sampling.temperature == 0


async def test_our_own_machine_is_not_looked_for_behind_a_proxy(
    dispatcher: fakes.FakeDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    async with serving(dispatcher) as url, connect(url) as client:
        assert await served_model(client) == fakes.MODEL


async def test_errors_are_for_a_person(dispatcher: fakes.FakeDispatcher) -> None:
    dispatcher.error = InvalidGeneration("max_tokens", "is too many")
    conversation = Conversation("", None, None, None, 0.0)
    console = Console(file=io.StringIO(), width=100)
    async with serving(dispatcher) as url:
        conversation.url = url
        with pytest.raises(AnswerFailed, match="max_tokens: is too many"):
            await converse(conversation, "hi", console)
    with pytest.raises(AnswerFailed, match="Connection"):
        await converse(conversation, "hi", console)


async def test_a_conversation_remembers_and_outlives_an_error(
    dispatcher: fakes.FakeDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.StringIO()
    console = Console(file=output, width=200, force_terminal=True, color_system="standard")
    typed = iter(["first", "  ", "bad", "second"])

    def type_line(_prompt: str) -> str:
        line = next(typed, None)
        if line is None:
            raise EOFError
        dispatcher.error = InvalidGeneration("messages", "are bad") if line == "bad" else None
        return line

    monkeypatch.setattr(console, "input", type_line)
    async with serving(dispatcher) as url:
        conversation = Conversation(url, "Be brief.", 0, 50, 0.0)
        await converse(conversation, None, console)
    assert [message["role"] for message in conversation.messages] == [
        "system",
        *("user", "assistant"),
        *("user", "assistant"),
    ]
    assert [message.get("content") for message in conversation.messages][1::2] == ["first", "second"]
    assert "\x1b[32m" in output.getvalue()  # accepted drafts in green
    assert "messages: are bad" in output.getvalue()


@pytest.mark.parametrize(("max_tokens", "told"), [(15, False), (16, True)])
async def test_a_short_answer_has_no_speed(dispatcher: fakes.FakeDispatcher, max_tokens: int, told: bool) -> None:
    output = io.StringIO()
    async with serving(dispatcher) as url:
        await converse(Conversation(url, None, None, max_tokens, 0.0), "hi", Console(file=output, width=200))
    assert f"{max_tokens} tokens, " in output.getvalue()
    assert (" a step, " in output.getvalue()) == told


async def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(
    dispatcher: fakes.FakeDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.StringIO()
    console = Console(file=output, width=200)
    typed = iter(["for ever", "short"])

    def type_line(_prompt: str) -> str:
        line = next(typed, None)
        if line is None:
            raise EOFError
        dispatcher.never_ends = line == "for ever"
        return line

    monkeypatch.setattr(console, "input", type_line)
    async with serving(dispatcher) as url:
        conversation = Conversation(url, None, None, 50, 0.0)
        assert not conversation.interrupt()  # at the prompt Ctrl-C means the whole
        talk = asyncio.create_task(converse(conversation, None, console))
        await dispatcher.wait_open(1)
        assert conversation.interrupt()
        await asyncio.wait_for(talk, 30)
        await dispatcher.wait_open(0)
        assert not conversation.interrupt()
    assert [message.get("content") for message in conversation.messages] == ["short", fakes.ANSWER]
    assert "stopped; this turn is forgotten" in output.getvalue()


async def test_a_conversation_that_is_cancelled_while_it_answers_ends(
    dispatcher: fakes.FakeDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(console, "input", lambda _prompt: "for ever")
    dispatcher.never_ends = True
    async with serving(dispatcher) as url:
        talk = asyncio.create_task(converse(Conversation(url, None, None, 50, 0.0), None, console))
        await dispatcher.wait_open(1)
        talk.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(talk, 30)
        await dispatcher.wait_open(0)


@pytest.mark.parametrize(("drafting", "said"), [(True, "2.00 x the speed"), (False, "no drafter, no speed-up")])
def test_speeds_are_compared_where_there_is_a_drafter(drafting: bool, said: str) -> None:
    drafted = Answer("ab", [1, 2, 3, 4], [False, True, True, False], [1, 3], 0.0, 1.0, 2.0)
    plain = Answer("ab", [1, 2, 3, 4], [False] * 4, [1, 1, 1, 1], 0.0, 1.0, 3.0)
    console = Console(file=io.StringIO(), width=200)
    console.print(comparison(drafted, plain, True, drafting))
    assert isinstance(console.file, io.StringIO)
    assert f"{said}, the same tokens" in console.file.getvalue()


def test_the_json_line_has_the_agreed_fields() -> None:
    drafted = Answer("a\nb", [1, 2, 3, 4], [False, True, True, False], [1, 3], 0.0, 1.0, 2.0)
    plain = Answer("a\nb", [1, 2, 3, 4], [False] * 4, [1, 1, 1, 1], 0.0, 1.0, 3.0)
    line = json_line(summary(drafted, plain))
    assert "\n" not in line
    assert json.loads(line) == {
        "text": "a\nb",
        "identical": True,
        "tokens": 4,
        "mean_accepted_len": 3.0,
        "tok_s": 3.0,
        "tok_s_no_draft": 1.5,
        "speedup": 2.0,
    }
    plain.token_ids = [1, 2, 3, 5]
    assert summary(drafted, plain)["identical"] is False
    assert list(json.loads(line)) == [
        "text",
        "identical",
        "tokens",
        "mean_accepted_len",
        "tok_s",
        "tok_s_no_draft",
        "speedup",
    ]
