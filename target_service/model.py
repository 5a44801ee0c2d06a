"""What does a rank hold of the model: weights, KV cache, attention backends?

The same on every rank of a target, and on a target of one rank. What the machine or the model cannot give is refused
here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.decoder import Decoder
from engine.errors import ConfigError
from engine.kv_cache import KVCache
from engine.kv_group import KVGroup
from engine.model_config import ModelConfig
from kernels.attention.interface import AttentionBackend
from kernels.attention.registry import make_attention
from target_service.config import TargetConfig
from target_service.pcp.group import choose_backend, rank_device

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """attention_backends: one per KV group of the decoder. max_model_len: as configured, never above the model's own.
    token_work: what a token costs beside attention, in query-key pairs.
    """

    decoder: Decoder
    kv: KVCache
    attention_backends: tuple[AttentionBackend, ...]
    max_model_len: int
    token_work: int


def load_model(config: TargetConfig, directory: Path, device: torch.device) -> LoadedModel:
    """Load the model in `directory` onto `device`. ConfigError names a setting that the model cannot have."""
    decoder = Decoder.load(directory, _DTYPES[config.dtype], device, config.load_format)
    max_model_len = _max_model_len(config, decoder.config.max_model_len)
    backends = make_backends(config, decoder)
    kv = _make_kv_cache(decoder, config.num_blocks + 1, config.block_size)  # the pool keeps block 0 for itself
    return LoadedModel(decoder, kv, backends, max_model_len, token_work(decoder.config))


def prepare_device(config: TargetConfig, rank: int = 0) -> torch.device:
    """The device of a rank, made this thread's. ConfigError when there is none."""
    device = torch.device(config.device)
    if device.type != "cuda":
        return device
    # Newer versions of Triton warn where this is left to its default; read when Triton is first imported.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    if not torch.cuda.is_available():
        raise ConfigError("target.device", f"{config.device}, but there is no CUDA device that torch can use")
    if (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError("target.device", f"{config.device}, but there are {torch.cuda.device_count()} CUDA devices")
    device = rank_device(device, rank)
    torch.cuda.set_device(device)
    # Float32 means float32.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return device


def token_work(model: ModelConfig) -> int:
    """Multiplications of a token in one layer's linear products over those of one query-key pair in its attention."""
    heads = model.num_heads * model.head_dim
    linear = model.hidden_size * (2 * heads + 2 * model.num_kv_heads * model.head_dim + 3 * model.intermediate_size)
    return linear // (2 * heads)


def make_backends(config: TargetConfig, decoder: Decoder) -> tuple[AttentionBackend, ...]:
    """New attention backends, one per KV group. ConfigError when they cannot be."""
    return tuple(_attention(config, decoder, group) for group in decoder.groups)


def runs_on_device(config: TargetConfig, device: torch.device, backends: Sequence[AttentionBackend]) -> bool:
    """Whether steps are launched ahead of their verdicts (device execution). The same on every rank. ConfigError where
    that is asked for and cannot be.
    """
    needs_host = any(backend.needs_host_lens for backend in backends)
    if config.execution == "device" and needs_host:
        raise ConfigError(
            "target.execution", f"device needs an attention that asks the host for no lengths, not {config.attention}"
        )
    if config.execution == "auto":
        # Over gloo every collective waits for the device, so that nothing runs ahead.
        first = torch.device(config.device)  # of rank 0, whichever asks
        over_gloo = config.pcp_size > 1 and choose_backend(config.pcp_backend, first, config.pcp_size) == "gloo"
        return device.type == "cuda" and not needs_host and not over_gloo
    return config.execution == "device"


def _attention(config: TargetConfig, decoder: Decoder, group: KVGroup) -> AttentionBackend:
    model = decoder.config
    try:
        return make_attention(
            config.attention,
            model.num_heads,
            model.num_kv_heads,
            model.head_dim,
            model.attention_scale,
            group.window,
            decoder.device,
        )
    except ValueError as error:
        raise ConfigError("target.attention", str(error).removeprefix("attention: ")) from error


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
