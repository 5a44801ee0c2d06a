"""What measuring says of things that cannot be measured, and which model it asks a stack for."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from drafter_service.training.chat_format import ChatFormat
from drafter_service.training.evaluate import write_answers
from drafter_service.training.prompt_sets import PromptSet
from drafter_service.training.stack_evaluation import evaluate_stack
from engine.decoder import Decoder
from engine.errors import ConfigError, OutriderError


def test_a_set_of_prompts_that_are_all_too_long_is_an_error(decoder: Decoder, chat: ChatFormat) -> None:
    long = ("stone and sea " * 60,)
    with pytest.raises(ConfigError, match="mine: every prompt is longer than 64 tokens"):
        write_answers(decoder, chat, PromptSet("mine", (long, long)), 0.0, 8, 128, 2, 0)
    kept = write_answers(decoder, chat, PromptSet("mine", (long, ("two cats",))), 0.0, 8, 128, 2, 0)
    assert len(kept) == 1


class _Gateway(BaseHTTPRequestHandler):
    """Serves one model, answers every chat with three tokens and notes which model was asked for."""

    asked: list[str]
    models: object

    def do_GET(self) -> None:
        self._answer(self.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body["model"])
        marks = [False, True, False] if body["draft_len"] else [False] * 3
        choice = {"message": {"content": "a b c"}, "outrider": {"token_ids": [5, 6, 7], "from_draft": marks}}
        self._answer({"choices": [choice]})

    def _answer(self, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture
def gateway() -> Iterator[tuple[str, type[_Gateway]]]:
    class Handler(_Gateway):
        asked: list[str] = []  # noqa: RUF012  # one class for each test
        models: object = {"data": [{"id": "the-model"}]}

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", Handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_stack_is_asked_for_the_model_that_it_serves(gateway: tuple[str, type[_Gateway]]) -> None:
    url, handler = gateway
    (result,) = evaluate_stack(url, [PromptSet("mine", (("one", "two"),))], [0.0], 2, 8)
    assert set(handler.asked) == {"the-model"}
    assert len(handler.asked) == 4  # two turns, with drafts and without
    assert result.mean_accepted_len == 2.0
    assert result.identical


def test_a_stack_that_names_no_model_is_an_error(gateway: tuple[str, type[_Gateway]]) -> None:
    url, handler = gateway
    handler.models = {"data": []}
    with pytest.raises(OutriderError, match="names no model"):
        evaluate_stack(url, [PromptSet("mine", (("one",),))], [0.0], 2, 8)
