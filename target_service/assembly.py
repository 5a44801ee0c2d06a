"""How is a target put together from its config and a model directory?

What runs its steps (`execution`), channels, and the service around them, wired once. What cannot work is refused here,
before anything listens; and what would be slow the first time is done here: see `warm_up`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.channel.opening import DEVICE_KINDS, KINDS
from engine.errors import ConfigError
from target_service.channels import ChannelSettings, OpenChannel, TargetChannels
from target_service.checks import Limits
from target_service.config import TargetConfig
from target_service.core import TargetCore
from target_service.execution import Engine, build_engine
from target_service.messages import ServiceInfo

PROGRESS_S = 5.0


@dataclass(frozen=True, slots=True)
class Target:
    """A target that is ready to take commands.

    kinds: of channels that it takes.
    """

    info: ServiceInfo
    core: TargetCore
    channels: TargetChannels
    engine: Engine
    kinds: tuple[str, ...]

    def close(self) -> None:
        """Free channels and ranks. Only once no command runs any more."""
        try:
            self.channels.close()
        finally:
            if self.engine.ranks is not None:
                self.engine.ranks.close()


def build_target(config: TargetConfig, model_name: str, directory: Path) -> Target:
    """Load the model in `directory` and set the service up. ConfigError names a setting that the model cannot have;
    RanksLost tells of a rank that could not be started.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    engine = build_engine(config, directory)
    try:
        return _around(engine, config, model_name)
    except BaseException:
        if engine.ranks is not None:
            engine.ranks.close()
        raise


def _around(engine: Engine, config: TargetConfig, model_name: str) -> Target:
    """The service's parts around an engine."""
    model, sessions, max_model_len = engine.decoder.config, engine.sessions, engine.max_model_len
    blocks = sessions.blocks
    info = ServiceInfo(
        instance_id=secrets.token_hex(8),
        model=model_name,
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        block_size=config.block_size,
        num_blocks=blocks.pool.num_usable,
        num_seats=config.num_seats,
        max_step_tokens=config.max_step_tokens,
        eos_token_ids=model.eos_token_ids,
        max_verify_len=config.max_verify_len,
    )
    kinds = _kinds(config, engine)
    channels = TargetChannels(
        ChannelSettings(
            instance_id=info.instance_id,
            kinds=kinds,
            depth=config.channel_depth,
            max_channels=config.max_channels,
            heartbeat_deadline_s=config.heartbeat_deadline_s,
            lease_s=config.drafter_lease_s,
            max_rows=config.num_seats,
            max_tokens=config.max_step_tokens,
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            hidden_dtype=engine.decoder.dtype,
            vocab_size=model.vocab_size,
            max_model_len=max_model_len,
            max_blocks_per_row=blocks.max_blocks,
            block_size=config.block_size,
            num_blocks=blocks.pool.num_blocks,
            device=engine.device if engine.device_runner is not None else None,
            num_ranks=config.pcp_size,
        )
    )
    limits = Limits(
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        max_step_tokens=config.max_step_tokens,
        max_verify_len=config.max_verify_len,
        num_seats=config.num_seats,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
    )
    core = TargetCore(info, limits, sessions, engine.runner, channels, config.max_wait_ms / 1e3, config.check_integrity)
    return Target(info, core, channels, engine, kinds)


def warm_up(
    engine: Engine,
    query_lens: tuple[int, ...],
    say: Callable[[str], None],
    hidden_layers: tuple[int, ...] = (),
    channel: OpenChannel | None = None,
) -> None:
    """Compile the kernels and capture the graphs of uniform steps of rows with query_lens tokens; those of other
    lengths when they first come. Before anything is placed, or while nothing is under way; by the thread that runs
    steps, or before there is one. hidden_layers, channel: of a drafter. say: takes lines of progress.
    """
    runner = engine.device_runner
    if runner is None or engine.device.type != "cuda":
        return
    began = said = time.perf_counter()
    with torch.inference_mode(), engine.on_stream():
        for count, job in enumerate(runner.warm_up_jobs(hidden_layers, query_lens, channel)):
            job()
            if (now := time.perf_counter()) - said > PROGRESS_S:
                said = now
                say(f"warming up: {count + 1} sizes, {now - began:.0f} s")
        torch.cuda.synchronize(engine.device)
    say(f"warm: {runner.forward.graphs.counts.captures} graphs captured, {time.perf_counter() - began:.1f} s")


def _kinds(config: TargetConfig, engine: Engine) -> tuple[str, ...]:
    on_cuda = engine.device_runner is not None and engine.device.type == "cuda"
    possible = tuple(kind for kind in KINDS if on_cuda or kind not in DEVICE_KINDS)
    if config.channel_kinds is None:
        return possible
    for kind in config.channel_kinds:
        if kind not in possible:
            raise ConfigError("target.channel_kinds", f"{kind} needs device execution on a CUDA device")
    return tuple(config.channel_kinds)
