"""Does anybody notice that the target runs as several ranks?

The same requests go to a stack whose target has one rank, and to the same stack with two or four: greedy output is
transformers' own, and tokens, acceptance and log probabilities of seeded requests are those of one rank, for every
drafter method, both channel kinds, lockstep and run-ahead, chunked prompts, prefix hits and preemption.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.rank_kills import kill_ranks
from tests.end_to_end.stack import Stack, running_stack
from tests.end_to_end.variants import CHUNKED, ON_DEVICE, STARVED, Models, Variant, drafter_section, prompts

NUM_TOKENS = 20
# Late drafts would change what is accepted, though not the tokens; these machines are slow and shared.
PATIENT = {"step_deadline_ms": 5000}
# Nobody waits for the drafter in a step without drafts: in a ring of four, one that gets no processor for as many steps
# misses one, and drafts nothing for a while.
ROOMY = {"channel_depth": 64}

# (ranks, a stack)
STACKS = (
    (2, Variant("eagle3-shm", "eagle3", drafter={"method": "eagle3"})),
    (4, Variant("eagle3-bytes", "eagle3", drafter={"method": "eagle3", "channel_kinds": ["bytes"]}, gateway=CHUNKED)),
    (2, Variant("draft-model-shm-depth-2", "noisy", drafter={"method": "draft_model"}, gateway={"depth": 2})),
    (
        4,
        Variant(
            "draft-model-shm-preempted",
            "target",
            target=STARVED,
            drafter={"method": "draft_model", "block_size": 4},
            gateway={"max_step_tokens": 13},
            preempts=True,
        ),
    ),
    (2, Variant("ngram-bytes", None, drafter={"method": "ngram", "channel_kinds": ["bytes"]})),
    (
        2,
        Variant(
            "eagle3-bytes-preempted-depth-4",
            "eagle3",
            target=STARVED,
            drafter={"method": "eagle3", "block_size": 4, "channel_kinds": ["bytes"]},
            gateway={"depth": 4, "max_step_tokens": 37},
            preempts=True,
        ),
    ),
)


@dataclass
class Answers:
    """What one stack answered. tokens: of each request; exact: acceptance too, of requests that ran alone."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    exact: dict[str, Any] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)


def ask_all(stack: Stack, models: Models, variant: Variant, num_ranks: int) -> Answers:
    """The scenario, on one stack; what transformers can tell is checked here."""
    answers = Answers()

    def ask(name: str, prompt: tuple[int, ...], **fields: Any) -> dict[str, Any]:
        answer = stack.complete(list(prompt), NUM_TOKENS, ignore_eos=True, **fields)
        tokens = answers.tokens[name] = list(answer["choices"][0]["outrider"]["token_ids"])
        if "seed" not in fields:
            assert tokens == models.greedy(prompt, NUM_TOKENS), name
        return answer

    lockstep = "depth" not in variant.gateway
    for draft_len in (0, 1, 5):
        for index in (0, 5, 6):
            name = f"alone-{draft_len}-{index}"
            usage = ask(name, prompts()[index], draft_len=draft_len)["usage"]
            if lockstep:
                answers.exact[name] = {**usage["outrider"], **usage["prompt_tokens_details"]}
    for seed in (3, 4):
        fields = {"temperature": 0.9, "seed": seed, "draft_len": 3, "logprobs": 2}
        answer = ask(f"seeded-{seed}", prompts()[8 + seed], **fields)
        answers.logprobs += answer["choices"][0]["logprobs"]["token_logprobs"]
        if lockstep:
            answers.exact[f"seeded-{seed}"] = answer["usage"]["outrider"]
    crowd = [*prompts(), *prompts(12, 40)]
    with ThreadPoolExecutor(len(crowd)) as pool:
        list(pool.map(lambda index: ask(f"crowd-{index}", crowd[index], draft_len=index % 6), range(len(crowd))))
    metrics = stack.metrics()
    assert metrics["outrider_draft_tokens_total"] > 0
    ran = [metrics[name] for name in metrics if name.startswith("outrider_rank_tokens_total")]
    assert len(ran) == (num_ranks if num_ranks > 1 else 0)
    assert all(ran)
    if variant.preempts:
        assert metrics["outrider_preemptions_total"] > 0
    stack.wait_until("no block is held", lambda: stack.metrics()["outrider_cache_use_ratio"] == 0, 20)
    return answers


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("num_ranks", "variant"), STACKS, ids=lambda value: getattr(value, "name", f"{value}-ranks"))
def test_ranks_change_nothing(num_ranks: int, variant: Variant, models: Models, tmp_path: Path) -> None:
    found = []
    for size in (1, num_ranks):
        target = {**variant.target, **ROOMY, "check_integrity": True, "pcp_size": size}
        gateway = {**PATIENT, **variant.gateway}
        with running_stack(
            tmp_path / str(size), models.target, target, drafter_section(variant, models), gateway
        ) as stack:
            found.append(ask_all(stack, models, variant, size))
            assert [stack.stop(name) for name in ("gateway", "drafter", "target")] == [0, 0, 0]
    one, many = found
    assert many.tokens == one.tokens
    assert many.exact == one.exact
    assert many.logprobs == pytest.approx(one.logprobs, abs=1e-4)


def test_ranks_with_device_execution(models: Models, tmp_path: Path) -> None:
    """Steps launched ahead of their verdicts, over ranks, with drafts from global hidden states: transformers' tokens,
    and a seeded request's are the same alone and in a crowd.
    """
    variant = Variant("on-device", "eagle3", drafter={"method": "eagle3"})
    target = {**ON_DEVICE, "pcp_size": 2}
    gateway = {**PATIENT, **CHUNKED, "depth": 3}
    drafter = drafter_section(variant, models)
    seeded = {"temperature": 0.9, "seed": 3, "draft_len": 3}
    with running_stack(tmp_path, models.target, target, drafter, gateway) as stack:
        assert "execution=device channels=shm,bytes" in stack.log("target")

        def ask(prompt: tuple[int, ...], **fields: Any) -> list[int]:
            answer = stack.complete(list(prompt), NUM_TOKENS, ignore_eos=True, **fields)
            return list(answer["choices"][0]["outrider"]["token_ids"])

        alone = ask(prompts()[11], **seeded)
        with ThreadPoolExecutor(10) as pool:
            beside = pool.submit(ask, prompts()[11], **seeded)
            crowd = [pool.submit(ask, prompts()[index], draft_len=index % 6) for index in range(0, 16, 2)]
            for index, answer in zip(range(0, 16, 2), crowd, strict=True):
                assert answer.result(60) == models.greedy(prompts()[index], NUM_TOKENS), index
            assert beside.result(60) == alone
        metrics = stack.metrics()
        assert metrics["outrider_draft_tokens_total"] > 0
        assert all(metrics[f'outrider_rank_tokens_total{{rank="{rank}"}}'] > 0 for rank in (0, 1))
        assert [stack.stop(name) for name in ("gateway", "drafter", "target")] == [0, 0, 0]


@pytest.mark.timeout(400)  # five starts of two processes, on whatever else the machine is doing
def test_ranks_killed_at_random(models: Models, tmp_path: Path) -> None:
    """No request is lost, no token is wrong, whichever rank dies; `python -m tests.end_to_end.rank_kills` does more."""
    report = kill_ranks(tmp_path, models, num_kills=5, num_ranks=2, seed=1)
    assert report.num_kills == 5
    assert report.num_requests >= 3
