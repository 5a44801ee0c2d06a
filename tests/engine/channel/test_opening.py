"""Which kind of channel two processes get, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from engine.channel import (
    KINDS,
    attach_device_channel,
    attach_drafter_channel,
    choose_kind,
    describe,
    device_uuid,
    host_id,
    kinds_of,
    open_device_channel,
    open_target_channel,
    opening,
)
from engine.cuda.library import CudaLibrary
from engine.errors import ChannelError
from tests.engine.channel.entries import SPEC

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("kind", ["cuda_ipc", "carrier pigeon"])
def test_kinds_that_the_hosts_interface_lacks_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ChannelError, match=f"^kind: .*{kind}"):
        open_target_channel(SPEC, kind)
    target = open_target_channel(SPEC, "shm")
    with pytest.raises(ChannelError, match=f"^kind: .*{kind}"):
        attach_drafter_channel(replace(describe(target), kind=kind))
    target.close()


def test_kinds_that_the_devices_interface_lacks_are_refused_by_name() -> None:
    with pytest.raises(ChannelError, match="^kind: bytes"):
        open_device_channel(SPEC, "bytes", GPU)
    target = open_target_channel(SPEC, "bytes")
    with pytest.raises(ChannelError, match="^kind: bytes"):
        attach_device_channel(describe(target), GPU)
    target.close()


def test_the_kind_follows_from_the_offer_and_the_host() -> None:
    assert choose_kind(["cuda_ipc", "shm", "bytes"], host_id()) == "shm"
    assert choose_kind(["bytes", "shm"], host_id()) == "bytes"
    assert choose_kind(["shm", "bytes"], "elsewhere") == "bytes"
    for offered, host in ((["shm"], "elsewhere"), (["cuda_ipc"], host_id()), ([], host_id())):
        with pytest.raises(ChannelError, match="^kinds: "):
            choose_kind(offered, host)


def test_a_device_is_shared_where_it_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def reaches(device: torch.device, uuid: str) -> bool:
        asked.append(uuid)
        return uuid == "GPU-1"

    monkeypatch.setattr(opening, "_reaches", reaches)
    assert choose_kind(["cuda_ipc"], host_id(), None, KINDS, GPU, "GPU-1") == "cuda_ipc"
    for host, allowed, device, uuid in (
        ("elsewhere", KINDS, GPU, "GPU-1"),
        (host_id(), KINDS, None, "GPU-1"),
        (host_id(), ("shm", "bytes"), GPU, "GPU-1"),
        (host_id(), KINDS, GPU, "GPU-2"),
    ):
        with pytest.raises(ChannelError, match="^kinds: "):
            choose_kind(["cuda_ipc"], host, None, allowed, device, uuid)
    assert asked == ["GPU-1", "GPU-2"]


def test_each_interface_has_its_kinds() -> None:
    assert kinds_of(KINDS, None) == ("shm", "bytes")
    assert kinds_of(("bytes", "cuda_ipc"), GPU) == ("cuda_ipc",)


def test_a_cpu_has_no_device_to_share() -> None:
    assert device_uuid(torch.device("cpu")) == ""
    with pytest.raises(ChannelError, match="^kind: cuda_ipc needs a CUDA device, and cpu is none"):
        open_device_channel(SPEC, "cuda_ipc", torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_reason_is_one_line() -> None:
    assert device_uuid(GPU) == ""
    assert not opening._reaches(GPU, "GPU-1")
    with pytest.raises(ChannelError, match="^kind: cuda_ipc needs a CUDA device, and cuda:0 is none here$"):
        open_device_channel(SPEC, "cuda_ipc", GPU)
    if sys.platform == "linux":
        with pytest.raises(ChannelError, match="^kind: cuda_ipc needs the CUDA driver: |^cuInit: "):
            CudaLibrary()
