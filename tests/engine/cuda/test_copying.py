"""Copies whose ends are settled once, on a CPU and, where there is one, on a GPU."""

from __future__ import annotations

import pytest
import torch

from engine.cuda.copying import DeviceCopies, prepare_copy

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_elements_go_there_and_come_back(device: str) -> None:
    on_gpu = device == "cuda"
    host, back = (torch.arange(12, dtype=torch.int64, pin_memory=on_gpu).view(3, 4) for _ in range(2))
    there = torch.full((14,), -1, dtype=torch.int64, device=device)
    send, fetch = prepare_copy(there, host), prepare_copy(back, there)
    send(5)
    assert there.tolist() == [0, 1, 2, 3, 4, *[-1] * 9]
    host += 100
    send(0)
    send(2)
    fetch(7)
    if on_gpu:
        torch.cuda.synchronize()
    assert back.flatten().tolist() == [100, 101, 2, 3, 4, -1, -1, 7, 8, 9, 10, 11]
    send(12)
    assert there[:12].tolist() == host.flatten().tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_no_more_than_both_ends_have_and_in_the_order_of_the_current_stream() -> None:
    host, there = torch.ones(4, pin_memory=True), torch.zeros(4, device="cuda")
    send = prepare_copy(there, host)
    for count in (5, -1):
        with pytest.raises(ValueError, match="count"):
            send(count)
    with pytest.raises(ValueError, match="pinned"):
        prepare_copy(there, torch.ones(4))
    with pytest.raises(ValueError, match="between the host and a GPU"):
        prepare_copy(there, there.clone())
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        send(4)
    assert there.tolist() == [0, 0, 0, 0]
    stream.synchronize()
    assert there.tolist() == [1, 1, 1, 1]


def test_ends_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"out: .*torch.int32"):
        prepare_copy(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="contiguous"):
        prepare_copy(torch.zeros(3, 3).t(), torch.zeros(9))


@pytest.mark.parametrize("device", DEVICES)
def test_copies_within_a_device(device: str) -> None:
    copies = DeviceCopies(torch.device(device))
    out, source = torch.zeros((2, 3), dtype=torch.int64, device=device), torch.arange(9, device=device)
    copies.copy(out, source[2:], 4)
    assert out.tolist() == [[2, 3, 4], [5, 0, 0]]
    copies.copy(out, source, 0)
    copies.copy(out[1], out, 3)
    assert out.tolist() == [[2, 3, 4], [2, 3, 4]]
    with pytest.raises(ValueError, match="count: 7"):
        copies.copy(out, source, 7)
    with pytest.raises(ValueError, match="contiguous"):
        copies.copy(out.t(), source, 2)
    with pytest.raises(ValueError, match=r"torch.int64"):
        copies.copy(out.to(torch.int32), source, 2)
