"""What can be set about a target?

The `target:` section of the config file. The defaults suit one CPU machine; a mistake is one line naming the key, also
from `python -m target_service.config FILE`, which loads no torch.
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from engine.config_fields import AddressText, DeviceName, PowerOfTwo
from engine.config_file import SectionModel, check_file

ChannelKind = Literal["cuda_ipc", "shm", "bytes"]

_SYNTHETIC = "synthetic:"


def parse_acceptance(text: str) -> float | None:
    """The mean of `synthetic:<mean>`, None for `exact`. ValueError says what is wrong."""
    if text == "exact":
        return None
    if not text.startswith(_SYNTHETIC):
        raise ValueError("must be exact or synthetic:<mean>")
    try:
        mean = float(text.removeprefix(_SYNTHETIC))
    except ValueError as error:
        raise ValueError("the mean after synthetic: must be a number") from error
    if not mean >= 1:
        raise ValueError("the mean counts the target's own token: it is at least 1")
    return mean


def _acceptance(value: str) -> str:
    parse_acceptance(value)
    return value


class TargetConfig(SectionModel):
    """Settings of one target process.

    listen: HOST:PORT; port 0 takes a free one (the ready line tells which).
    device: cpu, cuda or cuda:N. attention: torch needs the rows' lengths on the host, triton and reference do not.
    execution: `host` reads every step's verdicts back before the next one is prepared; `device` puts steps on the
    device ahead of the verdicts of those before them; `auto` is device where it is cuda, the attention allows it, and
    ranks, if there are several, meet over nccl.
    load_format: `dummy` makes random weights of the model's shape, from its config.json alone.
    cuda_graphs: run steps of decode rows as captured graphs, padded to one of graph_rows rows; over ranks
    with nccl alone.
    accept: `exact`, or `synthetic:<mean>`, which changes the output: see `acceptance`.
    num_blocks: KV blocks that requests can hold at once. max_model_len: None, the model's own; never above it.
    max_step_tokens: largest sum of query_len in one plan. max_verify_len: most drafts a row verifies in a step.
    threads: torch's intra-op threads, None: torch's choice.
    trim_absent_drafts: cut a row's query to its real drafts before the forward (the host sees them in lockstep).
    channel_kinds: what drafters may use, None: all that work here; `cuda_ipc` needs device execution on CUDA and one
    host, `shm` one host. channel_depth: steps that a channel holds, and with device execution steps under way.
    heartbeat_deadline_s: a drafter whose heartbeat is older is not waited for. drafter_lease_s: after that long without
    a heartbeat its channel is closed and its memory freed.
    max_wait_ms: upper bound of a plan's deadline_ms. device_deadline_s: a CUDA device that takes longer over a step,
    beside what the step may wait for, is taken for lost, and the target ends. Kernels that a step is the first to need
    are compiled within it.
    command_queue, event_queue: bounds of what waits for the device, and of what waits for one gateway to read.
    gateway_lease_s: a gateway that has requests here and neither sends nor is sent anything for so long loses its
    stream, and they are let go. Longer than its step_timeout_s.
    drain_s: how long SIGTERM waits for running requests.
    check_integrity: check blocks and seats after every command; a fault is reported as such. For tests and debugging.
    pcp_size: ranks that share out a step's tokens (prefill-context parallelism); each holds the whole model and cache.
    pcp_backend: auto: nccl where each rank has a GPU to itself, else gloo. pcp_timeout_s: after which a collective
    fails; with device execution (channel_depth + 1) * max_wait_ms later, since ranks enter theirs while rank 0 still
    waits for drafters. pcp_start_timeout_s: for all ranks to load.
    """

    listen: AddressText = "127.0.0.1:25051"
    device: DeviceName = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["torch", "triton", "flashinfer", "reference"] = "torch"
    execution: Literal["auto", "host", "device"] = "auto"
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    cuda_graphs: bool = True
    graph_rows: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = (1, 2, 4, 8, 16, 32, 64)
    accept: Annotated[str, AfterValidator(_acceptance)] = "exact"
    block_size: PowerOfTwo = Field(16, ge=1, le=1024)
    num_blocks: int = Field(1024, ge=1, le=1 << 24)
    num_seats: int = Field(32, ge=1, le=4096)
    max_model_len: int | None = Field(None, ge=2)
    max_step_tokens: int = Field(512, ge=1, le=1 << 20)
    max_verify_len: int = Field(7, ge=0, le=64)
    threads: int | None = Field(None, ge=1, le=1024)
    prefix_caching: bool = True
    trim_absent_drafts: bool = True
    channel_kinds: tuple[ChannelKind, ...] | None = Field(None, min_length=1)
    channel_depth: int = Field(4, ge=2, le=64)
    max_channels: int = Field(8, ge=1, le=256)
    heartbeat_deadline_s: float = Field(2.0, gt=0, le=600)
    drafter_lease_s: float = Field(10.0, gt=0, le=3600)
    max_wait_ms: int = Field(5000, ge=0, le=600_000)
    device_deadline_s: float = Field(120.0, gt=0, le=3600)
    command_queue: int = Field(1024, ge=1, le=1 << 20)
    event_queue: int = Field(1024, ge=1, le=1 << 20)
    gateway_lease_s: float = Field(300.0, gt=0, le=86_400)
    drain_s: float = Field(5.0, ge=0, le=3600)
    check_integrity: bool = False
    pcp_size: Literal[1, 2, 4, 8] = 1
    pcp_backend: Literal["auto", "gloo", "nccl"] = "auto"
    pcp_timeout_s: float = Field(30.0, ge=5, le=3600)  # the ranks meet under it, too
    pcp_start_timeout_s: float = Field(600.0, gt=0, le=7200)


if __name__ == "__main__":
    sys.exit(check_file("target", TargetConfig))
