"""The timeout of a collective is longer than what it may have to wait for, on every rank, and shorter than the deadline
of the device.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from target_service.config import TargetConfig
from target_service.model import load_model
from target_service.pcp import __main__ as rank_process
from target_service.pcp.board import ExportedBoard
from target_service.pcp.laps import LapWatch
from target_service.pcp.service import join_launching_ranks, join_ranks
from target_service.pcp.settings import RankArguments, collective_timeout_s
from target_service.server import _device_deadline_s
from tests.target_service.device.bench import Bench

CPU = torch.device("cpu")
WAIT_S = {"device": 20.0 + 4 * 7.0, "host": 20.0}


def config_of(execution: str) -> TargetConfig:
    settings = {"execution": execution, "attention": "reference", "pcp_size": 2, "pcp_timeout_s": 20, "threads": 1}
    own = {"channel_depth": 3, "max_wait_ms": 7000, "device_deadline_s": 50, "num_blocks": 8, "num_seats": 2}
    return TargetConfig.model_validate({**settings, **own})


@pytest.mark.parametrize("execution", ["device", "host"])
def test_every_rank_waits_as_long(execution: str, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, on_device = config_of(execution), execution == "device"
    assert collective_timeout_s(config, on_device) == WAIT_S[execution]
    found = list[float]()

    class MetError(Exception):
        pass

    def meet(*arguments: Any) -> None:
        found.append(arguments[-1])
        raise MetError

    loaded = load_model(config, tiny_dir, CPU)
    ranks = cast(Any, SimpleNamespace(join=meet))
    with pytest.raises(MetError):
        _ = (
            join_launching_ranks(ranks, config, loaded, LapWatch(CPU, 0))
            if on_device
            else join_ranks(ranks, config, loaded, cast(Any, None))
        )
    monkeypatch.setattr(rank_process, "TorchGroup", meet)
    board = ExportedBoard(2, 4096)
    try:
        board.board.start_joining()
        told = RankArguments(
            rank=1,
            config=config,
            model_directory=str(tiny_dir),
            board_name=board.name,
            order_bytes=board.order_bytes,
            board_depth=board.depth,
            port=1,
            parent_pid=1,
        )
        with pytest.raises(MetError):
            rank_process.serve(told)
    finally:
        board.close()
    assert found == [WAIT_S[execution]] * 2


def test_ranks_end_a_collective_before_the_device_is_given_up() -> None:
    config, gpu = config_of("device"), torch.device("cuda")
    assert _device_deadline_s(config, gpu) == 50 + WAIT_S["device"]
    assert _device_deadline_s(config.model_copy(update={"pcp_size": 1}), gpu) == 50 + 28
    assert _device_deadline_s(config, CPU) is None


def test_the_group_has_the_timeout(tiny_dir: Path) -> None:
    bench = Bench(tiny_dir, pcp_size=2, threads=1, pcp_timeout_s=20, channel_depth=3, max_wait_ms=7000)
    ranks = bench.engine.ranks
    assert ranks is not None
    try:
        group = cast(Any, torch.distributed.group.WORLD)
        assert group._get_backend(CPU).options._timeout.total_seconds() == WAIT_S["device"]
    finally:
        ranks.close()
