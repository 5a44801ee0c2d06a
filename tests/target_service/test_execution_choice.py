"""Which execution does `auto` mean, and is it the same for all ranks of a target?"""

from __future__ import annotations

from typing import cast

import pytest
import torch

from engine.errors import ConfigError
from kernels.attention.interface import AttentionBackend
from target_service.config import TargetConfig
from target_service.model import runs_on_device
from target_service.pcp.service import board_depth


class _Backend:
    def __init__(self, needs_host_lens: bool) -> None:
        self.needs_host_lens = needs_host_lens


def chosen(config: TargetConfig, device: str, needs_host_lens: bool = False) -> bool:
    return runs_on_device(config, torch.device(device), [cast(AttentionBackend, _Backend(needs_host_lens))])


@pytest.mark.parametrize(
    ("num_gpus", "pcp_size", "pcp_backend", "on_device"),
    [
        (1, 1, "auto", True),
        (2, 2, "auto", True),
        (4, 4, "nccl", True),
        (1, 2, "auto", False),  # two ranks on one GPU: gloo
        (2, 2, "gloo", False),
    ],
)
def test_auto_on_gpus(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, pcp_size: int, pcp_backend: str, on_device: bool
) -> None:
    """Every rank asks with a device of its own."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    config = TargetConfig.model_validate({"device": "cuda", "pcp_size": pcp_size, "pcp_backend": pcp_backend})
    devices = {f"cuda:{rank % num_gpus}" for rank in range(pcp_size)}
    assert {chosen(config, device) for device in devices} == {on_device}
    assert {chosen(config, device, needs_host_lens=True) for device in devices} == {False}


@pytest.mark.parametrize("execution", ["host", "auto", "device"])
@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_the_board_holds_all_steps_that_may_be_under_way(
    monkeypatch: pytest.MonkeyPatch, execution: str, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    raw = {"device": device, "execution": execution, "pcp_size": 2, "channel_depth": 6}
    config = TargetConfig.model_validate(raw)
    assert board_depth(config) == (6 if chosen(config, device) else 2)


def test_auto_on_a_cpu() -> None:
    assert not chosen(TargetConfig.model_validate({"pcp_size": 2}), "cpu")


def test_what_is_asked_for() -> None:
    asked = TargetConfig.model_validate({"execution": "device", "pcp_size": 2, "pcp_backend": "gloo"})
    assert chosen(asked, "cpu")
    assert not chosen(TargetConfig.model_validate({"execution": "host", "device": "cuda"}), "cuda:0")
    with pytest.raises(ConfigError, match=r"target\.execution"):
        chosen(asked, "cpu", needs_host_lens=True)
