"""What do users see when a service dies in the middle of a stream, or when clients leave?

Real processes, `kill -9`. The tokens must be those of an undisturbed run, none twice, none missing.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.end_to_end.stack import Stack, running_stack
from tests.end_to_end.variants import Models, prompts

NUM_TOKENS = 300
TARGET_WAIT_S = 45


@pytest.fixture(scope="module", params=["draft_model", "eagle3"])
def stack(request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    method: str = request.param
    draft = {"draft_model": "noisy", "eagle3": "eagle3"}[method]
    drafter = {"method": method, "checkpoint": str(models.root / draft), "max_draft_len": 4}
    gateway = {"target_wait_s": TARGET_WAIT_S, "step_deadline_ms": 300, "reconnect_max_s": 0.05}
    with running_stack(tmp_path_factory.mktemp(method), models.target, {}, drafter, gateway) as running:
        yield running


class Reader:
    """Reads one streamed completion in a thread, so that the test can break things meanwhile."""

    def __init__(self, stack: Stack, prompt: tuple[int, ...], num_tokens: int, **fields: object) -> None:
        self.token_ids: list[int] = []
        self.from_draft: list[bool] = []
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self._grew = threading.Condition()
        self._stream = stack.stream(list(prompt), num_tokens, ignore_eos=True, **fields)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for chunk in self._stream:
                if "error" in chunk:
                    raise AssertionError(chunk)
                for choice in chunk["choices"]:
                    extension = choice.get("outrider") or {}
                    with self._grew:
                        self.token_ids += extension.get("token_ids", [])
                        self.from_draft += extension.get("from_draft", [])
                        self.finish_reason = choice.get("finish_reason") or self.finish_reason
                        self._grew.notify_all()
        except BaseException as error:  # whatever it is, the test's thread reports it
            self.error = error
        finally:
            with self._grew:
                self._grew.notify_all()

    def wait_tokens(self, count: int, deadline_s: float = 60) -> None:
        with self._grew:
            enough = self._grew.wait_for(lambda: len(self.token_ids) >= count or self.error is not None, deadline_s)
        assert self.error is None, self.error
        assert enough, f"{len(self.token_ids)} of {count} tokens within {deadline_s} s"

    def finish(self, deadline_s: float = 90) -> None:
        self._thread.join(deadline_s)
        assert self.error is None, self.error
        assert not self._thread.is_alive(), f"the stream hangs at {len(self.token_ids)} tokens"


def test_drafter_killed_and_restarted(stack: Stack, models: Models) -> None:
    prompt = prompts()[3]
    reader = Reader(stack, prompt, NUM_TOKENS, draft_len=4)
    reader.wait_tokens(20)
    stack.kill("drafter")
    reader.wait_tokens(len(reader.token_ids) + 30)
    reader.finish()
    assert reader.token_ids == models.greedy(prompt, NUM_TOKENS)
    assert reader.finish_reason == "length"

    drafted_before = stack.metrics()["outrider_draft_tokens_total"]
    reader = Reader(stack, prompt, NUM_TOKENS, draft_len=4)  # starts without a drafter
    stack.start("drafter")
    stack.wait_serving("target", "drafter")
    reader.finish()
    again = stack.complete(list(prompt), 40, draft_len=4, ignore_eos=True)
    assert reader.token_ids == models.greedy(prompt, NUM_TOKENS)
    assert again["choices"][0]["outrider"]["token_ids"] == models.greedy(prompt, NUM_TOKENS)[:40]
    # Drafting is back, and nothing else was restarted.
    assert stack.metrics()["outrider_draft_tokens_total"] > drafted_before


def test_drafter_restarted_within_one_stream(stack: Stack, models: Models) -> None:
    """The same request is drafted for again: it was admitted anew in the middle of its stream."""
    prompt = prompts()[4]
    drafted = "outrider_draft_tokens_total"
    stack.kill("drafter")
    reader = Reader(stack, prompt, NUM_TOKENS, draft_len=4)
    reader.wait_tokens(5)
    before = stack.metrics()[drafted]
    with stack.paused("gateway"):  # or the stream would be over long before a new process is up
        assert len(reader.token_ids) < NUM_TOKENS // 2
        stack.start("drafter")
        stack.wait_ready_line("drafter")
    reader.finish()
    assert stack.metrics()[drafted] > before
    assert reader.token_ids == models.greedy(prompt, NUM_TOKENS)


def test_target_killed_and_restarted(stack: Stack, models: Models) -> None:
    chosen = [prompts()[3], prompts()[9], prompts()[12]]
    readers = [Reader(stack, prompt, NUM_TOKENS, draft_len=3) for prompt in chosen]
    for reader in readers:
        reader.wait_tokens(10)
    stack.kill("target")
    stack.start("target")
    for reader, prompt in zip(readers, chosen, strict=True):
        reader.finish()
        assert reader.token_ids == models.greedy(prompt, NUM_TOKENS)  # none twice, none missing


def test_target_gone_for_good(models: Models, tmp_path_factory: pytest.TempPathFactory) -> None:
    with running_stack(tmp_path_factory.mktemp("gone"), models.target, gateway={"target_wait_s": 2}) as stack:
        reader = Reader(stack, prompts()[3], NUM_TOKENS)
        reader.wait_tokens(5)
        stack.kill("target")
        start = time.monotonic()
        body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 4}
        answer = httpx.post(f"{stack.rest}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"]
        assert time.monotonic() - start < 15
        reader._thread.join(15)
        assert not reader._thread.is_alive()
        assert reader.error is not None  # the stream ended with an error chunk, not as if it were complete


def test_five_hundred_mixed_requests_leave_nothing(stack: Stack, models: Models) -> None:
    source = random.Random(11)

    def run(index: int) -> None:
        prompt = list(prompts()[index % 16])
        fields = {
            "draft_len": source.randrange(5),
            "temperature": source.choice([0, 0, 0.8]),
            "ignore_eos": True,
        }
        num_tokens = source.randrange(1, 12)
        if source.random() < 0.4:
            for position, _ in enumerate(stack.stream(prompt, 60, **fields)):
                if position >= source.randrange(4):
                    break  # the client leaves
        else:
            answer = stack.complete(prompt, num_tokens, **fields)
            if fields["temperature"] == 0:
                assert answer["choices"][0]["outrider"]["token_ids"] == models.greedy(tuple(prompt), 12)[:num_tokens]

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(run, range(500)))

    def free() -> bool:
        metrics = stack.metrics()
        return metrics["outrider_running_requests"] == 0 and metrics["outrider_cache_use_ratio"] == 0

    stack.wait_until("no seat and no block is held", free, 20)


def test_clean_stop(stack: Stack) -> None:
    assert [stack.stop(name) for name in ("gateway", "drafter", "target")] == [0, 0, 0]
