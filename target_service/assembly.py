"""How is a target put together from its config and a model directory?

Model, KV cache, block pool, sessions, runner and channels, wired once. What cannot work is refused here, before
anything listens.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.block_pool import BlockPool
from engine.decoder import Decoder
from engine.errors import ConfigError
from engine.kv_cache import KVCache
from engine.request_blocks import RequestBlocks
from engine.seats import SeatAllocator
from kernels.attention.registry import make_attention
from target_service.channels import ChannelSettings, TargetChannels
from target_service.checks import Limits
from target_service.config import TargetConfig
from target_service.core import TargetCore
from target_service.messages import ServiceInfo
from target_service.runner import StepRunner
from target_service.sessions import Sessions

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Target:
    """A target that is ready to take commands. The caller closes `channels`, once no command runs any more."""

    info: ServiceInfo
    core: TargetCore
    channels: TargetChannels


def build_target(config: TargetConfig, model_name: str, directory: Path) -> Target:
    """Load the model in `directory` and set the service up. ConfigError names a setting that the model cannot have."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    decoder = Decoder.load(directory, _DTYPES[config.dtype], config.device)
    model = decoder.config
    max_model_len = _max_model_len(config, model.max_model_len)
    num_pool_blocks = config.num_blocks + 1  # the pool keeps block 0 for itself
    pool = BlockPool(num_pool_blocks, config.block_size, config.prefix_caching)
    blocks = RequestBlocks(pool, config.num_seats, max_model_len, config.device)
    sessions = Sessions(SeatAllocator(config.num_seats), blocks)
    backends = [
        (
            group,
            make_attention(
                config.attention,
                model.num_heads,
                model.num_kv_heads,
                model.head_dim,
                model.attention_scale,
                group.window,
            ),
        )
        for group in decoder.groups
    ]
    kv = _make_kv_cache(decoder, num_pool_blocks, config.block_size)
    runner = StepRunner(decoder, kv, backends, sessions, max_model_len, config.trim_absent_drafts)
    info = ServiceInfo(
        instance_id=secrets.token_hex(8),
        model=model_name,
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        block_size=config.block_size,
        num_blocks=pool.num_usable,
        num_seats=config.num_seats,
        max_step_tokens=config.max_step_tokens,
        eos_token_ids=model.eos_token_ids,
        max_verify_len=config.max_verify_len,
    )
    channels = TargetChannels(
        ChannelSettings(
            instance_id=info.instance_id,
            kinds=config.channel_kinds,
            depth=config.channel_depth,
            max_channels=config.max_channels,
            heartbeat_deadline_s=config.heartbeat_deadline_s,
            lease_s=config.drafter_lease_s,
            max_rows=config.num_seats,
            max_tokens=config.max_step_tokens,
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            hidden_dtype=decoder.dtype,
            vocab_size=model.vocab_size,
            max_model_len=max_model_len,
            max_blocks_per_row=blocks.max_blocks,
            block_size=config.block_size,
            num_blocks=num_pool_blocks,
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
    core = TargetCore(info, limits, sessions, runner, channels, config.max_wait_ms / 1e3, config.check_integrity)
    return Target(info, core, channels)


def _make_kv_cache(decoder: Decoder, num_blocks: int, block_size: int) -> KVCache:
    """The cache; ConfigError when the machine has no room for it: fresh zeros cost nothing until they are written, so
    one that is too big would be granted and end the process later.
    """
    model = decoder.config
    num_bytes = num_blocks * KVCache.bytes_per_block(
        block_size, model.num_layers, model.num_kv_heads, model.head_dim, decoder.dtype
    )
    problem = f"{num_blocks - 1} blocks of {block_size} tokens take {num_bytes / 2**30:.1f} GiB of KV cache"
    if decoder.device.type == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if num_bytes > memory:
            raise ConfigError("target.num_blocks", f"{problem}, this machine has {memory / 2**30:.1f} GiB in all")
    try:
        return decoder.make_kv_cache(num_blocks, block_size)
    except RuntimeError as error:  # torch has no class of its own for it on every device
        raise ConfigError("target.num_blocks", f"{problem}, which could not be allocated") from error


def _max_model_len(config: TargetConfig, model_limit: int) -> int:
    if config.max_model_len is None:
        return model_limit
    if config.max_model_len > model_limit:
        raise ConfigError("target.max_model_len", f"{config.max_model_len} is above the model's own {model_limit}")
    return config.max_model_len
