"""What can be set about a drafter?

The `drafter:` section of the config file. The defaults suit one CPU machine and need no weights; a mistake is one line
naming the key, also from `python -m drafter_service.config FILE`, which loads no torch.
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from pydantic import Field, model_validator

from drafter_service.device.shapes import DEFAULT_GRAPH_ROWS
from engine.config_fields import AddressText, DeviceName, PowerOfTwo
from engine.config_file import SectionModel, check_file
from engine.errors import ConfigError

ChannelKind = Literal["cuda_ipc", "shm", "bytes"]
Method = Literal["eagle3", "draft_model", "ngram"]


class NgramConfig(SectionModel):
    """The suffix lengths that prompt lookup tries, longest first."""

    min_n: int = Field(2, ge=1, le=16)
    max_n: int = Field(4, ge=1, le=16)

    @model_validator(mode="after")
    def _ordered(self) -> NgramConfig:
        if self.min_n > self.max_n:
            raise ValueError(f"min_n {self.min_n} is above max_n {self.max_n}")
        return self


class RandomHeadConfig(SectionModel):
    """An EAGLE-3 head with random weights, shaped like the target: everything works, few drafts are accepted.

    draft_vocab_size: None, the target's. hidden_layers: target layers captured, as outputs; None, the usual ones.
    """

    seed: int = Field(0, ge=0)
    draft_vocab_size: int | None = Field(None, ge=1)
    hidden_layers: tuple[int, ...] | None = Field(None, min_length=1, max_length=64)


class DrafterConfig(SectionModel):
    """Settings of one drafter process.

    listen: HOST:PORT; port 0 takes a free one (the ready line tells which).
    drafter_id: stable over restarts. method: how it drafts.
    checkpoint: of the EAGLE-3 head or the draft model: a directory, a hub id, or a built-in name. `eagle3` without one
    needs random_head.
    device: cpu, cuda or cuda:N. attention: torch needs the rows' lengths on the host, triton and reference do not.
    execution: `host` reads every ring entry before it drafts; `device` puts a step on the device when its plan comes,
    before its entry is there; `auto` is device where it is cuda and method and attention allow it.
    load_format: `dummy` makes random weights of the checkpoint's shape, from its config.json alone.
    cuda_graphs: run what follows a step of decode rows as captured graphs, padded to one of graph_rows rows.
    metadata_fusion: the metadata of all KV groups in one launch (`auto`, `on`) or by each group's own builder, with
    device execution. metadata_shadow: do both and compare every element that a replay reads; ends the drafter where
    they differ. For debugging.
    num_blocks: KV blocks that requests can hold at once. max_model_len: None, the model's own; never above it.
    max_step_tokens: tokens of the largest step it can follow; at least the target's max_step_tokens.
    metadata_source: `build`, from our own blocks; `reuse`, the target's (its block_size, and at least its num_blocks).
    draft_sampling: `greedy`, or `probabilistic`: draw drafts for unseeded sampling rows and publish probabilities.
    channel_kinds: kinds to offer, best first; `cuda_ipc` goes with device execution, the others with host execution.
    max_entry_wait_s: the longest wait for one step of a live target. heartbeat_deadline_s: a target whose heartbeat is
    older is not waited for. device_deadline_s: a CUDA device that takes longer over a step whose entry is there is
    taken for lost, and the drafter ends.
    command_queue, event_queue: bounds of what one gateway may have waiting either way.
    gateway_lease_s: a gateway that has requests here and neither sends nor is sent anything for so long loses its
    stream, and they are let go. Longer than its step_timeout_s.
    drain_s: how long SIGTERM waits for gateways to leave.
    check_integrity: check blocks and seats after every command. For tests and debugging.
    """

    listen: AddressText = "127.0.0.1:25052"
    drafter_id: str = Field("drafter", min_length=1, max_length=64)
    method: Method = "ngram"
    checkpoint: str | None = Field(None, min_length=1)
    random_head: RandomHeadConfig | None = None
    ngram: NgramConfig = NgramConfig()
    device: DeviceName = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["torch", "triton", "flashinfer", "reference"] = "torch"
    execution: Literal["auto", "host", "device"] = "auto"
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    cuda_graphs: bool = True
    graph_rows: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = DEFAULT_GRAPH_ROWS
    block_size: PowerOfTwo = Field(16, ge=1, le=1024)
    num_blocks: int = Field(4096, ge=1, le=1 << 24)
    num_seats: int = Field(32, ge=1, le=4096)
    max_model_len: int | None = Field(None, ge=2)
    max_draft_len: int = Field(7, ge=1, le=64)
    max_step_tokens: int = Field(4096, ge=1, le=1 << 20)
    metadata_source: Literal["build", "reuse"] = "build"
    metadata_fusion: Literal["auto", "on", "off"] = "auto"
    metadata_shadow: bool = False
    draft_sampling: Literal["greedy", "probabilistic"] = "greedy"
    prefix_caching: bool = True
    threads: int | None = Field(None, ge=1, le=1024)
    channel_kinds: tuple[ChannelKind, ...] = Field(("cuda_ipc", "shm", "bytes"), min_length=1)
    attach_timeout_s: float = Field(5.0, gt=0, le=600)
    heartbeat_deadline_s: float = Field(2.0, gt=0, le=600)
    max_entry_wait_s: float = Field(30.0, gt=0, le=3600)
    device_deadline_s: float = Field(120.0, gt=0, le=3600)
    command_queue: int = Field(1024, ge=1, le=1 << 20)
    event_queue: int = Field(1024, ge=1, le=1 << 20)
    gateway_lease_s: float = Field(300.0, gt=0, le=86_400)
    drain_s: float = Field(0.0, ge=0, le=3600)
    check_integrity: bool = False

    def check_together(self) -> None:
        """See SectionModel."""
        if self.method != "eagle3" and self.metadata_source == "reuse":
            raise ConfigError("drafter.metadata_source", "`reuse` needs method eagle3")
        if self.method == "draft_model" and self.checkpoint is None:
            raise ConfigError("drafter.checkpoint", "is required with method draft_model")
        if self.method == "eagle3" and self.checkpoint is None and self.random_head is None:
            raise ConfigError(
                "drafter.checkpoint", "method eagle3 needs a checkpoint, or `random_head: {}` for a trial"
            )


if __name__ == "__main__":
    sys.exit(check_file("drafter", DrafterConfig))
