"""The step of fixed shapes computes what the plain loss computes; its inputs, optimiser and thread do their part."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from drafter_service.eagle3.head import Eagle3Head
from drafter_service.training.chain_attention import chained_attention
from drafter_service.training.corpus import Conversation, make_batch
from drafter_service.training.head_optimizer import HeadOptimizer, orthogonal
from drafter_service.training.loss import LossOptions, unrolled_loss
from drafter_service.training.prefetch import Prefetch
from drafter_service.training.step_inputs import StepShape, epoch_inputs, pack, step_shapes, unpack
from drafter_service.training.step_runner import StepRunner
from drafter_service.training.target_view import TargetView, chain_starts
from drafter_service.training.unroll import UnrollPlan

CPU = torch.device("cpu")
STEPS = 3


def conversations(number: int, shortest: int = 20, longest: int = 60) -> list[Conversation]:
    rng = np.random.default_rng(7)
    sizes = rng.integers(shortest, longest, size=number)
    return [Conversation(rng.integers(3, 512, size=n).astype(np.int32), ((9, int(n)),), "chat", True) for n in sizes]


def runner(head: Eagle3Head, target: TargetView, shapes: tuple[StepShape, ...]) -> StepRunner:
    head.requires_grad_(True)
    assert head.embed_tokens is not None
    head.embed_tokens.requires_grad_(False)
    draft_ids = head.target_ids(torch.arange(head.config.draft_vocab_size))
    optimizer = HeadOptimizer(head, 0.01, 1.0, muon=False)
    return StepRunner(target, head, optimizer, torch.ones(3 * 64), draft_ids, shapes, LossOptions(STEPS))


def test_a_padded_step_equals_the_plain_loss(head: Eagle3Head, target: TargetView) -> None:
    """Rows, columns and chains that are padding change neither loss nor gradients nor counts."""
    texts = conversations(3)
    shape = StepShape(5, 96, STEPS)
    step = runner(head, target, (shape,))
    batch = make_batch(texts, 64)
    step._load(pack(batch, shape))
    padded, gradients = step.loss_and_gradients(shape)

    token_ids = torch.from_numpy(batch.token_ids)
    chains = chain_starts(batch, STEPS, CPU)
    hidden, captured = target.run(token_ids)
    targets = target.soft_targets(hidden[chains.wanted], step._draft_ids, torch.float32)
    plain = unrolled_loss(head, captured, token_ids, chains, targets, LossOptions(STEPS))
    learned = [parameter for parameter in head.parameters() if parameter.requires_grad]
    expected = torch.autograd.grad(plain.loss, learned)
    assert torch.allclose(padded.loss, plain.loss, rtol=1e-5)
    assert torch.equal(padded.alive, plain.alive)
    assert torch.equal(padded.tried, plain.tried)
    assert torch.allclose(padded.step_losses, plain.step_losses, rtol=1e-5)
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(gradients, expected, strict=True))


def test_statistics_are_sums_since_the_last_asking(head: Eagle3Head, target: TargetView) -> None:
    shape = StepShape(3, 64, STEPS)
    step = runner(head, target, (shape,))
    inputs = pack(make_batch(conversations(3), 64), shape)
    step._load(inputs)
    first, _ = step.loss_and_gradients(shape)
    step.run(inputs, 1e-3)
    step.run(inputs, 1e-3)
    sums = step.take_statistics()
    assert sums.steps == 2
    assert sums.alive[0] == 2 * float(first.alive[0])
    assert float(first.loss) < sums.loss < 2 * float(first.loss)  # the second step's loss is lower
    assert step.take_statistics().steps == 0


def test_packing_keeps_tokens_and_chains_and_drops_what_exceeds_the_capacity() -> None:
    texts, shape = conversations(4), StepShape(4, 64, STEPS)
    batch = make_batch(texts, 64)
    token_ids, chains = unpack(torch.from_numpy(pack(batch, shape).packed), shape)
    assert token_ids[:, : batch.token_ids.shape[1]].tolist() == batch.token_ids.tolist()
    plain = chain_starts(make_batch(texts, 64, 64), STEPS, CPU)
    number = plain.starts.numel()
    assert chains.starts[:number].tolist() == plain.starts.tolist()
    assert chains.valid[:number].tolist() == plain.valid.tolist()
    assert not chains.valid[number:].any()
    full = [Conversation(np.arange(3, 67, dtype=np.int32), ((0, 64),), "chat", True)] * 4
    _, crowded = unpack(torch.from_numpy(pack(make_batch(full, 64), shape).packed), shape)
    assert 0 < int(crowded.valid[:, 0].sum()) <= shape.capacity < 4 * 64


def test_an_epoch_holds_every_conversation_once_in_a_new_order() -> None:
    texts = conversations(101, 20, 400)
    shapes = step_shapes(1024, 512, STEPS)

    def firsts(seed: int, skip: int = 0) -> list[tuple[int, ...]]:
        rows = []
        for inputs in epoch_inputs(texts, shapes, seed, skip):
            token_ids, _ = unpack(torch.from_numpy(inputs.packed), inputs.shape)
            rows += [tuple(row[:12].tolist()) for row in token_ids if row.any()]
        return rows

    whole = firsts(1)
    assert sorted(whole) == sorted(tuple(item.tokens[:12].tolist()) for item in texts)
    assert whole == firsts(1) != firsts(2)
    skipped = firsts(1, 3)
    assert whole[-len(skipped) :] == skipped
    assert len(skipped) < len(whole)


def test_chained_attention_is_one_softmax_over_text_and_chain() -> None:
    """Against weights that are written down, forwards and backwards."""
    torch.manual_seed(0)
    batch, length, scale = 2, 24, 0.3
    q, *rest = (torch.randn(batch, heads, length, 16, requires_grad=True) for heads in (6, *[2] * 8))
    plan = UnrollPlan(batch, length, scale, CPU)
    wide = [x.repeat_interleave(3, dim=1) for x in rest]
    plan._chain = [(wide[i], wide[i + 1]) for i in range(2, 8, 2)]
    expected = plan._chained(q, wide[0], wide[1])
    got = chained_attention(q, rest[0], rest[1], [(rest[i], rest[i + 1]) for i in range(2, 8, 2)], scale)
    assert torch.allclose(got, expected, atol=1e-5)
    gradient = torch.randn_like(got)
    for one, other in zip(
        torch.autograd.grad(got, (q, *rest), gradient), torch.autograd.grad(expected, (q, *rest), gradient), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-4)


def small_model() -> torch.nn.Module:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3))
    model.register_module("lm_head", torch.nn.Linear(3, 5, bias=False))
    return model


def test_without_muon_it_is_adamw() -> None:
    model, twin = small_model(), small_model()
    own = HeadOptimizer(model, 0.1, 1e9, muon=False)
    matrices = [p for p in twin.parameters() if p.dim() > 1]
    vectors = [p for p in twin.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    other = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    for _ in range(5):
        gradients = [torch.randn_like(p) for p in twin.parameters()]
        for parameter, gradient in zip(twin.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        other.step()
        own.step(gradients, torch.tensor(1e-2))
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-6)


def test_muon_makes_updates_orthogonal_and_its_state_is_kept() -> None:
    torch.manual_seed(2)
    for matrix in (torch.randn(24, 8), torch.randn(8, 24)):
        singular = torch.linalg.svdvals(orthogonal(matrix))
        assert 0.6 < float(singular.min()) <= float(singular.max()) < 1.3
    gradients = [[torch.randn_like(p) for p in small_model().parameters()] for _ in range(4)]

    def trained(stop: int | None) -> torch.nn.Module:
        model = small_model()
        optimizer = HeadOptimizer(model, 0.01, 1.0, muon=True)
        for index, given in enumerate(gradients):
            if index == stop:
                kept = optimizer.state()
                optimizer = HeadOptimizer(model, 0.01, 1.0, muon=True)
                optimizer.restore(kept)
            optimizer.step([gradient.clone() for gradient in given], torch.tensor(1e-2))
        return model

    for one, two in zip(trained(None).parameters(), trained(2).parameters(), strict=True):
        assert torch.equal(one, two)


def test_prefetch_keeps_the_order_passes_errors_on_and_ends() -> None:
    def source() -> Iterator[int]:
        yield from range(5)
        raise ValueError("no more")

    with Prefetch(source(), 2) as items:
        waiting = iter(items)
        assert [next(waiting) for _ in range(5)] == [0, 1, 2, 3, 4]
        with pytest.raises(ValueError, match="no more"):
            next(waiting)
    with Prefetch(iter(range(10**9)), 2) as endless:
        assert next(iter(endless)) == 0
    assert not endless._thread.is_alive()


def test_triton_kernels_compute_what_plain_torch_does(capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own: Triton's interpreter must be chosen before Triton is imported."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "0" if torch.cuda.is_available() else "1"}
    script = Path(__file__).with_name("fused_check.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.drafter_service.training.{script.stem}"],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        cwd=script.parents[3],
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all agree" in done.stdout
