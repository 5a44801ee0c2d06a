"""Taking an entry over, and ending a step: every element equal to the reference's, into poisoned buffers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.reference import append_anchors as plain_append
from kernels.reference import finish_reply as plain_finish
from kernels.reference import take_entry as plain_take
from kernels.triton import append_anchors, finish_reply, take_entry
from tests.kernels.entries import EPOCH, MAX_TOKENS, SEQ, VOCAB, Case, make_case, swapped_tag, with_garbage
from tests.kernels.triton.device import DEVICE, MANY, ON_GPU


def assert_same(case: Case) -> None:
    plain, device = case.copy(), case.copy(DEVICE)
    plain_arguments: tuple[Any, ...] = plain.arguments()
    device_arguments: tuple[Any, ...] = device.arguments()
    plain_take.take_entry(*plain_arguments)
    take_entry.take_entry(*device_arguments)
    expected, got = plain.written(), device.written()
    for name, values in expected.items():
        assert got[name] == values, name
    num_rows = plain.plan.shape[1]
    tags = [plain.entry.header.clone() for _ in range(2)]
    tags[1][0] = SEQ + 1
    for header in tags:
        for with_probs in (False, True):
            results = []
            for module, one, where in (
                (plain_finish, plain.copy(), "cpu"),
                (finish_reply, device.copy(DEVICE), DEVICE),
            ):
                drafts = torch.arange(40, device=where).view(5, 8).t() % VOCAB
                tokens = torch.full((9, 4), 321, device=where)
                reply_header = torch.full((8,), 6, device=where)
                has_probs = torch.ones(9, dtype=torch.bool, device=where) if with_probs else None
                module.finish_reply(
                    *(header.to(where), SEQ, EPOCH, num_rows, drafts, one.taken, one.state),
                    *(reply_header, tokens, has_probs),
                )
                written = one.written() | {"tokens": tokens.tolist(), "header": reply_header.tolist()}
                if has_probs is not None:
                    written["has_probs"] = has_probs.tolist()
                results.append(written)
            for name, values in results[0].items():
                assert results[1][name] == values, name


@pytest.mark.parametrize("seed", range(2 * MANY))
def test_right_entries(seed: int) -> None:
    assert_same(make_case(seed, with_layout=seed % 2 == 1))


@pytest.mark.parametrize("seed", range(6 * MANY))
def test_garbage(seed: int) -> None:
    assert_same(with_garbage(make_case(seed, with_layout=seed % 3 == 0), seed))


@pytest.mark.parametrize(("word", "value"), [(0, 0), (1, 9), (2, 3), (3, 1)])
def test_another_tag(word: int, value: int) -> None:
    assert_same(swapped_tag(make_case(5, with_layout=word == 0), word, value))


def test_a_step_without_rows() -> None:
    assert_same(make_case(2, num_rows=0))


@pytest.mark.parametrize("seed", range(2 * MANY))
def test_anchors_behind_their_rows(seed: int) -> None:
    case = make_case(seed)
    arguments: tuple[Any, ...] = case.arguments()
    plain_take.take_entry(*arguments)
    num_rows, num_tokens = case.taken.seats.shape[0], case.taken.positions.shape[0]
    results = []
    for module, one, where in ((plain_append, case.copy(), "cpu"), (append_anchors, case.copy(DEVICE), DEVICE)):
        outputs = (
            torch.full((num_rows + 1,), 321, dtype=torch.int32, device=where),
            torch.full((num_rows,), 321, dtype=torch.int32, device=where),
            torch.full((num_tokens + num_rows,), 321, device=where),
            torch.full((num_tokens + num_rows,), 321, device=where),
            torch.full((num_rows,), 321, dtype=torch.int32, device=where),
        )
        module.append_anchors(one.taken, *outputs)
        steps = (one.taken.step_positions, one.taken.step_seq_lens)
        results.append([tensor.tolist() for tensor in (*outputs, *steps)])
    assert results[0] == results[1]


@pytest.mark.skipif(ON_GPU, reason="only the interpreter can stop a program in its middle")
@pytest.mark.parametrize("garbage", [2**30, -(2**30), MAX_TOKENS - 1])
def test_starts_that_change_once_they_were_checked_lead_nowhere(monkeypatch: pytest.MonkeyPatch, garbage: int) -> None:
    """A late drafter reads what the target is overwriting: every program looks, and looks again."""
    case = make_case(5, with_layout=True)
    starts, right = case.entry.query_start_loc, case.entry.query_start_loc.clone()
    num_rows, num_tokens = case.plan.shape[1], int(right[case.plan.shape[1]])
    behind = {name: torch.full((MAX_TOKENS,), 321) for name in ("positions", "input_ids")}
    slots = torch.full((MAX_TOKENS,), 321)
    padded = case.taken.positions.shape[0]
    case.taken = replace(case.taken, **{name: buffer[:padded] for name, buffer in behind.items()})
    assert case.layout is not None
    case.layout = replace(case.layout, slots=slots[:padded])
    check = take_entry._entry_tokens

    def overtaken(*arguments: Any) -> Any:
        starts.copy_(right)
        tokens = check(*arguments)
        starts[1:] = garbage
        return tokens

    monkeypatch.setattr(take_entry, "_entry_tokens", overtaken)
    arguments: tuple[Any, ...] = case.arguments()
    take_entry.take_entry(*arguments)
    assert all(buffer[padded:].eq(321).all() for buffer in (*behind.values(), slots))
    assert 0 <= int(case.taken.query_start_loc.min()) <= int(case.taken.query_start_loc.max()) <= num_tokens
    assert case.taken.seats[:num_rows].max() <= case.plan.max()
