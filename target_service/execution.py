"""What runs a target's steps, and how is it put together?

Model, KV cache, blocks, sessions and a runner, from the config and a model directory: all of a target but its channels
and its RPCs. `build_engine` is also the way to run steps without a service, as benchmarks do.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.block_pool import BlockPool
from engine.decoder import Decoder
from engine.errors import ConfigError
from engine.graphs import GraphCache
from engine.request_blocks import RequestBlocks
from engine.seats import SeatAllocator
from kernels.kernel_set import kernels_for
from target_service.acceptance import SyntheticAcceptance
from target_service.config import TargetConfig, parse_acceptance
from target_service.device.buffers import Sizes, StepBuffers, StepMemory, table_width
from target_service.device.forward import StepForward
from target_service.device.frame import StepFrame
from target_service.device.local_forward import LocalStepForward
from target_service.device.padding import Padding, captured_rows, most_graphs
from target_service.device.plan_buffer import PlanBuffer
from target_service.device.runner import DeviceRunner, RunLimits
from target_service.device.sampling import DeviceSampling
from target_service.device.tables import DeviceTables
from target_service.forward import BatchForward, LocalForward
from target_service.model import LoadedModel, load_model, prepare_device, runs_on_device
from target_service.pcp.captured import can_capture, let_go, make_graphs
from target_service.pcp.laps import LapWatch
from target_service.pcp.lead import Lead
from target_service.pcp.ranks import Ranks
from target_service.pcp.service import join_launching_ranks, join_ranks, start_ranks
from target_service.pcp.settings import REST_S
from target_service.pcp.step_forward import RankStepForward
from target_service.runner import StepRunner
from target_service.sessions import Sessions


@dataclass(frozen=True, slots=True)
class Engine:
    """A target without its service. One thread uses it.

    device_runner: None with host execution; then host_runner is not. max_model_len: tokens. stream: on which the
    thread's work is put; None: the device's default one. ranks: the others, None on a target of one rank.
    """

    device: torch.device
    decoder: Decoder
    sessions: Sessions
    max_model_len: int
    host_runner: StepRunner | None
    device_runner: DeviceRunner | None
    stream: torch.cuda.Stream | None
    ranks: Ranks | None = None

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
    """Load the model in `directory` and set up what runs it. ConfigError names a setting that cannot be; RanksLost
    tells of a rank that could not be started. Who has an engine with ranks closes them.

    With device execution on CUDA graphs are not captured yet: see `warm_up`.
    """
    ranks = start_ranks(config, directory)
    try:
        return _build(config, directory, ranks)
    except BaseException as error:
        if ranks is not None:
            ranks.close()
        if isinstance(error, torch.OutOfMemoryError):
            detail = f"{config.device} has no room: {str(error).splitlines()[0]}"
            raise ConfigError("target.device", detail) from error
        raise


def _build(config: TargetConfig, directory: Path, ranks: Ranks | None) -> Engine:
    device = prepare_device(config)
    loaded = load_model(config, directory, device)
    decoder, backends, max_model_len = loaded.decoder, loaded.attention_backends, loaded.max_model_len
    pool = BlockPool(loaded.kv.num_blocks, config.block_size, config.prefix_caching)
    on_device = runs_on_device(config, device, backends)
    # Device execution has a device table of its own.
    blocks = RequestBlocks(pool, config.num_seats, max_model_len, "cpu" if on_device else device)
    sessions = Sessions(SeatAllocator(config.num_seats), blocks)
    synthetic = _synthetic(config, device)
    if on_device:
        device_runner = _device_runner(config, loaded, sessions, synthetic, ranks)
        stream = None
        if device.type == "cuda":
            # What was made so far was made on another stream.
            torch.cuda.synchronize(device)
            stream = torch.cuda.Stream(device)
        return Engine(device, decoder, sessions, max_model_len, None, device_runner, stream, ranks)
    forward: BatchForward
    if ranks is None:
        forward = LocalForward(decoder, loaded.kv, backends)
    else:
        forward = join_ranks(ranks, config, loaded, blocks)
    runner = StepRunner(decoder, forward, sessions, max_model_len, config.trim_absent_drafts, synthetic)
    return Engine(device, decoder, sessions, max_model_len, runner, None, None, ranks)


def _device_runner(
    config: TargetConfig,
    loaded: LoadedModel,
    sessions: Sessions,
    synthetic: SyntheticAcceptance | None,
    ranks: Ranks | None,
) -> DeviceRunner:
    decoder, max_model_len = loaded.decoder, loaded.max_model_len
    device, vocab_size = decoder.device, decoder.config.vocab_size
    kernels = kernels_for(device)
    memory = _step_memory(config, max_model_len, sessions.blocks, device)
    frame = StepFrame(kernels, memory, config.block_size, max_model_len, synthetic)
    forward: StepForward
    if ranks is None:
        forward = _local_forward(config, loaded, frame, memory.buffers.sizes)
    else:
        forward = _rank_forward(config, loaded, frame, memory.buffers.sizes, ranks)
    sampling = DeviceSampling(config.num_seats, vocab_size, device, kernels, synthetic)
    limits = RunLimits(vocab_size, max_model_len, config.channel_depth)
    return DeviceRunner(sessions, forward, frame, memory, sampling, kernels, limits)


def _step_memory(config: TargetConfig, max_model_len: int, blocks: RequestBlocks, device: torch.device) -> StepMemory:
    longest = config.max_verify_len + 1
    max_rows = max([config.num_seats, *captured_rows(config)])
    sizes = Sizes(
        num_seats=config.num_seats,
        max_rows=max_rows,
        max_tokens=max(config.max_step_tokens, max_rows * longest),
        max_drafts=config.max_verify_len,
        table_width=table_width(max_model_len, config.max_verify_len, config.block_size),
        max_seq_len=max_model_len + longest,
    )
    # Prompt tokens; indices of logits twice over; changed blocks, of which a step brings few.
    tail_bytes = 8 * (config.max_step_tokens + 3 * sizes.max_rows * longest) + 12 * 4096 + 4096
    return StepMemory(
        StepBuffers(sizes, device),
        PlanBuffer(max_rows, tail_bytes, config.channel_depth, device),
        DeviceTables(blocks, sizes.table_width, device),
    )


def _local_forward(config: TargetConfig, loaded: LoadedModel, frame: StepFrame, sizes: Sizes) -> LocalStepForward:
    # Without graphs nothing is padded, so there are no sizes to be warmed up.
    row_counts = captured_rows(config) if config.cuda_graphs else ()
    padding = Padding(row_counts, sizes, config.cuda_graphs)
    num_graphs = most_graphs(len(row_counts), sizes.max_drafts)
    graphs = GraphCache(loaded.decoder.device, num_graphs, config.cuda_graphs)
    return LocalStepForward(loaded.decoder, loaded.kv, loaded.attention_backends, frame, padding, graphs)


def _rank_forward(
    config: TargetConfig, loaded: LoadedModel, frame: StepFrame, sizes: Sizes, ranks: Ranks
) -> RankStepForward:
    decoder, device = loaded.decoder, loaded.decoder.device
    # Two collectives a layer begin and end, three more a step.
    watch = LapWatch(device, (2 * decoder.config.num_layers + 3) * config.channel_depth)
    padding = Padding(captured_rows(config), sizes, can_capture(config, device, ranks.backend))
    graphs = make_graphs(config, loaded.max_model_len, device, ranks.backend)
    launched = join_launching_ranks(ranks, config, loaded, watch)
    ranks.before_leaving(lambda: let_go(graphs, device, REST_S))
    return RankStepForward(decoder, frame, padding, graphs, Lead(ranks, config.pcp_timeout_s), launched, watch)


def _synthetic(config: TargetConfig, device: torch.device) -> SyntheticAcceptance | None:
    mean = parse_acceptance(config.accept)
    if mean is None:
        return None
    try:
        return SyntheticAcceptance.of_mean(mean, config.max_verify_len, device, kernels_for(device).uniform)
    except ValueError as error:
        raise ConfigError("target.accept", str(error)) from error
