"""What runs a target's steps, and how is it put together?

Model, KV cache, blocks, sessions and a runner, from the config and a model directory: all of a target but its channels
and its RPCs. `build_engine` is also the way to run steps without a service, as benchmarks do.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.block_pool import BlockPool
from engine.decoder import Decoder
from engine.errors import ConfigError
from engine.kv_cache import KVCache
from engine.kv_group import KVGroup
from engine.request_blocks import RequestBlocks
from engine.seats import SeatAllocator
from kernels.attention.interface import AttentionBackend
from kernels.attention.registry import make_attention
from kernels.kernel_set import kernels_for
from kernels.layout import blocks_needed
from target_service.acceptance import SyntheticAcceptance, parse_acceptance
from target_service.config import TargetConfig
from target_service.device.buffers import Sizes, StepBuffers
from target_service.device.forward import StepForward
from target_service.device.plan_buffer import PlanBuffer
from target_service.device.runner import DeviceRunner
from target_service.device.sampling import DeviceSampling
from target_service.device.tables import DeviceTables
from target_service.runner import StepRunner
from target_service.sessions import Sessions

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Engine:
    """A target without its service. One thread uses it.

    device_runner: None with host execution; then host_runner is not. max_model_len: tokens. stream: on which the
    thread's work is put; None: the device's default one.
    """

    device: torch.device
    decoder: Decoder
    sessions: Sessions
    max_model_len: int
    host_runner: StepRunner | None
    device_runner: DeviceRunner | None
    stream: torch.cuda.Stream | None

    @property
    def runner(self) -> StepRunner | DeviceRunner:
        """The one there is."""
        runner = self.device_runner or self.host_runner
        assert runner is not None
        return runner

    def on_stream(self) -> AbstractContextManager[object]:
        """Makes the engine's stream the current one."""
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    @property
    def execution(self) -> str:
        """`host` or `device`."""
        return "device" if self.device_runner is not None else "host"


def build_engine(config: TargetConfig, directory: Path) -> Engine:
    """Load the model in `directory` and set up what runs it. ConfigError names a setting that cannot be.

    With device execution on CUDA graphs are not captured yet: see `warm_up`.
    """
    device = _prepare_device(config)
    try:
        return _build(config, directory, device)
    except torch.OutOfMemoryError as error:
        raise ConfigError("target.device", f"{config.device} has no room: {str(error).splitlines()[0]}") from error


def _build(config: TargetConfig, directory: Path, device: torch.device) -> Engine:
    decoder = Decoder.load(directory, _DTYPES[config.dtype], device, config.load_format)
    model = decoder.config
    max_model_len = _max_model_len(config, model.max_model_len)
    num_pool_blocks = config.num_blocks + 1  # the pool keeps block 0 for itself
    pool = BlockPool(num_pool_blocks, config.block_size, config.prefix_caching)
    backends = [(group, _attention(config, decoder, group)) for group in decoder.groups]
    on_device = _on_device(config, device, backends)
    # Device execution has a device table of its own.
    blocks = RequestBlocks(pool, config.num_seats, max_model_len, "cpu" if on_device else device)
    sessions = Sessions(SeatAllocator(config.num_seats), blocks)
    kv = _make_kv_cache(decoder, num_pool_blocks, config.block_size)
    synthetic = _synthetic(config, device)
    if not on_device:
        runner = StepRunner(decoder, kv, backends, sessions, max_model_len, config.trim_absent_drafts, synthetic)
        return Engine(device, decoder, sessions, max_model_len, runner, None, None)
    device_runner = _device_runner(config, decoder, kv, backends, sessions, max_model_len, synthetic)
    stream = None
    if device.type == "cuda":
        # What was made so far was made on another stream.
        torch.cuda.synchronize(device)
        stream = torch.cuda.Stream(device)
    return Engine(device, decoder, sessions, max_model_len, None, device_runner, stream)


def _device_runner(
    config: TargetConfig,
    decoder: Decoder,
    kv: KVCache,
    backends: list[tuple[KVGroup, AttentionBackend]],
    sessions: Sessions,
    max_model_len: int,
    synthetic: SyntheticAcceptance | None,
) -> DeviceRunner:
    device, vocab_size = decoder.device, decoder.config.vocab_size
    kernels = kernels_for(device)
    longest = config.max_verify_len + 1
    graph_rows = [rows for rows in sorted(set(config.graph_rows)) if rows < 2 * config.num_seats]
    max_rows = max([config.num_seats, *graph_rows])
    sizes = Sizes(
        num_seats=config.num_seats,
        max_rows=max_rows,
        max_tokens=max(config.max_step_tokens, max_rows * longest),
        max_drafts=config.max_verify_len,
        # A row's padded tokens may lie past its length limit.
        table_width=blocks_needed(max_model_len + longest, config.block_size),
        max_seq_len=max_model_len + longest,
    )
    buffers = StepBuffers(sizes, device)
    # Prompt tokens; indices of logits twice over; changed blocks, of which a step brings few.
    tail_bytes = 8 * (config.max_step_tokens + 3 * sizes.max_rows * longest) + 12 * 4096 + 4096
    plans = PlanBuffer(max_rows, tail_bytes, config.channel_depth, device)
    tables = DeviceTables(sessions.blocks, sizes.table_width, device)
    forward = StepForward(
        decoder,
        kv,
        [backend for _, backend in backends],
        kernels,
        buffers,
        plans,
        tables.table[None],
        config.block_size,
        max_model_len,
        graph_rows,
        config.cuda_graphs,
        synthetic,
    )
    sampling = DeviceSampling(config.num_seats, vocab_size, device, kernels, synthetic)
    return DeviceRunner(
        sessions,
        forward,
        buffers,
        plans,
        tables,
        sampling,
        kernels,
        device,
        vocab_size,
        max_model_len,
        max_in_flight=config.channel_depth,
    )


def _prepare_device(config: TargetConfig) -> torch.device:
    device = torch.device(config.device)
    if device.type != "cuda":
        return device
    # Newer versions of Triton warn where this is left to its default; read when Triton is first imported.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    if not torch.cuda.is_available():
        raise ConfigError("target.device", f"{config.device}, but there is no CUDA device that torch can use")
    index = device.index if device.index is not None else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise ConfigError("target.device", f"{config.device}, but there are {torch.cuda.device_count()} CUDA devices")
    torch.cuda.set_device(index)
    # Float32 means float32.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return torch.device("cuda", index)


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
        )
    except ValueError as error:
        raise ConfigError("target.attention", str(error).removeprefix("attention: ")) from error


def _on_device(config: TargetConfig, device: torch.device, backends: list[tuple[KVGroup, AttentionBackend]]) -> bool:
    needs_host = any(backend.needs_host_lens for _, backend in backends)
    if config.execution == "device" and needs_host:
        raise ConfigError(
            "target.execution", f"device needs an attention that asks the host for no lengths, not {config.attention}"
        )
    if config.execution == "auto":
        return device.type == "cuda" and not needs_host
    return config.execution == "device"


def _synthetic(config: TargetConfig, device: torch.device) -> SyntheticAcceptance | None:
    mean = parse_acceptance(config.accept)
    if mean is None:
        return None
    try:
        return SyntheticAcceptance.of_mean(mean, config.max_verify_len, device, kernels_for(device).uniform)
    except ValueError as error:
        raise ConfigError("target.accept", str(error)) from error


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
