"""How good and how fast is drafting in a stack that is running?

Asks the gateway's chat endpoint, one request at a time, each prompt with the draft_len in question and with 0, and
reads acceptance from the tokens' `from_draft` marks and the usage.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drafter_service.training.acceptance import AcceptanceCount
from drafter_service.training.progress import PhaseProgress
from drafter_service.training.prompt_sets import PromptSet
from engine.errors import OutriderError

_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class StackResult:
    """One prompt set at one temperature. tok_s, tok_s_no_draft: completion tokens per second of waiting.

    identical: both runs gave the same tokens; only said of greedy runs, None otherwise.
    """

    prompt_set: str
    temperature: float
    draft_len: int
    conversations: int
    tokens: int
    steps: int
    mean_accepted_len: float
    per_position: tuple[float, ...]
    tok_s: float
    tok_s_no_draft: float
    identical: bool | None

    @property
    def speedup(self) -> float:
        """tok_s over tok_s_no_draft."""
        return self.tok_s / self.tok_s_no_draft if self.tok_s_no_draft else 0.0


@dataclass(slots=True)
class _Run:
    tokens: int = 0
    seconds: float = 0.0


def evaluate_stack(
    url: str, sets: Sequence[PromptSet], temperatures: Sequence[float], draft_len: int, max_new: int, seed: int = 0
) -> list[StackResult]:
    """url: of the REST API, e.g. http://127.0.0.1:8000. OutriderError when it does not answer."""
    url = url.rstrip("/")
    model = served_model(url)
    results: list[StackResult] = []
    done, everything = 0, len(temperatures) * sum(len(prompts.items) for prompts in sets)
    with PhaseProgress("measuring") as progress:
        for prompts in sets:
            for temperature in temperatures:
                count, fast, plain = AcceptanceCount(draft_len), _Run(), _Run()
                same = True
                for item, turns in enumerate(prompts.items):
                    with_drafts = _converse(
                        url, model, turns, temperature, draft_len, max_new, seed + item, fast, count
                    )
                    without = _converse(url, model, turns, temperature, 0, max_new, seed + item, plain, None)
                    same = same and with_drafts == without
                    done += 1
                    progress.update(done / everything, f"{prompts.name} at {temperature:g}: {item + 1} conversations")
                results.append(
                    StackResult(
                        prompts.name,
                        temperature,
                        draft_len,
                        len(prompts.items),
                        count.tokens,
                        count.steps,
                        count.mean_accepted_len,
                        tuple(count.per_position),
                        fast.tokens / max(1e-9, fast.seconds),
                        plain.tokens / max(1e-9, plain.seconds),
                        same if temperature == 0.0 else None,
                    )
                )
    return results


def _converse(
    url: str,
    model: str,
    turns: Sequence[str],
    temperature: float,
    draft_len: int,
    max_new: int,
    seed: int,
    run: _Run,
    count: AcceptanceCount | None,
) -> list[int]:
    """Ask all turns one after the other; the token ids of all answers."""
    messages: list[dict[str, str]] = []
    ids: list[int] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": max_new,
            "temperature": temperature,
            "seed": seed,
            "draft_len": draft_len,
        }
        started = time.perf_counter()
        answer = _request(f"{url}/v1/chat/completions", body)
        run.seconds += time.perf_counter() - started
        try:
            choice = answer["choices"][0]
            token_ids, from_draft = choice["outrider"]["token_ids"], choice["outrider"]["from_draft"]
            text = choice["message"]["content"] or ""
        except (KeyError, IndexError, TypeError) as error:
            raise OutriderError(f"{url}: not an answer of this gateway ({error!r} is missing)") from error
        run.tokens += len(token_ids)
        ids += token_ids
        messages.append({"role": "assistant", "content": text})
        if count is not None:
            count_steps(from_draft, count)
    return ids


def count_steps(from_draft: Sequence[bool], count: AcceptanceCount) -> None:
    """Add the verify steps of one answer: a step is a run of accepted drafts and the target's own token after it.

    The first token comes from the prompt's step. As in `acceptance.walk`, drafts past the answer's end do not count.
    """
    position, last = 1, len(from_draft)
    while position < last:
        accepted = 0
        while position + accepted < last and from_draft[position + accepted]:
            accepted += 1
        left = last - position
        committed = min(accepted + 1, left)
        count.add_step(min(count.draft_len, left), accepted, committed)
        position += committed


def served_model(url: str) -> str:
    """The id of the model that the gateway at `url` serves, the first where it lists several."""
    listed = _request(f"{url}/v1/models", None)
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise OutriderError(f"{url}/v1/models: names no model ({error!r} is missing)") from error


def _request(url: str, body: dict[str, Any] | None) -> dict[str, Any]:
    """GET without a body, else POST."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_DEADLINE_S) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        raise OutriderError(f"{url}: {error.code} {error.read().decode(errors='replace')[:300]}") from error
    except (OSError, ValueError) as error:
        raise OutriderError(f"{url}: {error}") from error
    if not isinstance(answer, dict):
        raise OutriderError(f"{url}: not a JSON object")
    return answer
