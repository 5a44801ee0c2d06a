"""What does a drafter see of a target?

A small one, in this process: the tiny model, its own blocks, greedy verification, and the real channel filled with true
hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.block_pool import BlockPool
from engine.channel.bytes import BytesTargetEnd
from engine.channel.description import ChannelDescription
from engine.channel.interface import ChannelSpec, TargetChannel
from engine.channel.local import LocalChannel
from engine.channel.opening import open_target_channel
from engine.channel.shm import ShmTargetChannel
from engine.decoder import Decoder
from engine.request_blocks import RequestBlocks
from kernels.attention.interface import AttentionMetadata
from kernels.attention.registry import make_attention
from kernels.layout import make_positions, make_query_start_loc, make_slot_mapping
from tests.drafter_service.device.local_target import LocalAsHost

DEPTH = 4
MAX_ROWS = 16
MAX_TOKENS = 256


@dataclass
class FakeRequest:
    """tokens: committed, the anchor included once something was sampled."""

    request_id: str
    tokens: list[int]
    prompt_len: int
    seat: int
    context_len: int = 0
    drafts: list[int] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
    temperature: float = 0.0
    seed: int = 7

    @property
    def decoding(self) -> bool:
        return self.context_len >= self.prompt_len

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]


@dataclass(frozen=True)
class FakeRow:
    """query: tokens to run on top of the request's context; the first is its anchor when it decodes."""

    request: FakeRequest
    query: list[int]


class FakeTarget:
    """Runs rows and publishes ring entries. lookahead: tokens reserved past a row's own, as `reuse` needs them."""

    def __init__(
        self,
        decoder: Decoder,
        hidden_layers: Sequence[int],
        kind: str = "shm",
        block_size: int = 4,
        num_blocks: int = 512,
        max_draft_len: int = 7,
        lookahead: int = 0,
        draft_probs: bool = False,
        max_len: int = 256,
        channel_id: str = "fake/drafter",
        epoch: int = 1,
        max_rows: int = MAX_ROWS,
    ) -> None:
        config = decoder.config
        self.decoder = decoder
        self.hidden_layers = tuple(hidden_layers)
        self.lookahead = lookahead
        self.max_len = max_len
        self.block_size = block_size
        self.blocks = RequestBlocks(BlockPool(num_blocks, block_size, enable_prefix_cache=False), max_rows, max_len)
        self.kv = decoder.make_kv_cache(num_blocks, block_size)
        self.attention = [
            make_attention(
                "torch", config.num_heads, config.num_kv_heads, config.head_dim, config.attention_scale, group.window
            )
            for group in decoder.groups
        ]
        self.spec = ChannelSpec(
            channel_id=channel_id,
            epoch=epoch,
            depth=DEPTH,
            max_rows=max_rows,
            max_tokens=MAX_TOKENS,
            max_draft_len=max_draft_len,
            hidden_width=len(hidden_layers) * config.hidden_size,
            hidden_dtype=torch.float32,
            vocab_size=config.vocab_size,
            max_blocks_per_row=self.blocks.max_blocks,
            block_size=block_size,
            num_blocks=num_blocks,
            draft_probs=draft_probs,
        )
        self.local = LocalChannel(self.spec, torch.device("cpu")) if kind == "local" else None
        self.channel: TargetChannel
        if self.local is not None:
            self.channel = LocalAsHost(self.local)
        else:
            self.channel = open_target_channel(self.spec, kind)
        self.requests: dict[str, FakeRequest] = {}
        self.seq = 0
        self._free_seats = list(range(max_rows))

    def close(self) -> None:
        self.channel.close()

    def describe(self) -> ChannelDescription:
        """What a drafter needs to attach."""
        assert isinstance(self.channel, ShmTargetChannel | BytesTargetEnd)
        return self.channel.describe()

    def add(self, request_id: str, prompt: Sequence[int], temperature: float = 0.0) -> FakeRequest:
        request = FakeRequest(request_id, list(prompt), len(prompt), self._free_seats.pop(0), temperature=temperature)
        self.requests[request_id] = request
        return request

    def remove(self, request_id: str) -> None:
        request = self.requests.pop(request_id)
        self.blocks.release(request.seat)
        self._free_seats.append(request.seat)

    def plan_rows(self, requests: Sequence[FakeRequest], chunk: int) -> list[FakeRow]:
        """Each request's next row: a prompt chunk, or its anchor and its drafts."""
        rows = []
        for request in requests:
            if request.decoding:
                rows.append(FakeRow(request, [request.tokens[request.context_len], *request.drafts]))
            else:
                end = min(request.context_len + chunk, request.prompt_len)
                rows.append(FakeRow(request, request.tokens[request.context_len : end]))
        return rows

    @torch.inference_mode()
    def step(self, rows: Sequence[FakeRow], publish: bool = True) -> int:
        """Run the rows as step seq + 1, commit the verdicts, publish the entry. Returns the step's seq."""
        self.seq += 1
        contexts = np.array([row.request.context_len for row in rows])
        lens = np.array([len(row.query) for row in rows])
        seats = np.array([row.request.seat for row in rows])
        starts = make_query_start_loc(lens)
        for row, context, length in zip(rows, contexts, lens, strict=True):
            wanted = min(int(context + length) + self.lookahead, self.max_len)
            assert self.blocks.reserve(row.request.seat, wanted)
        tables = self.blocks.table_np[seats]
        positions = make_positions(contexts, lens)
        num_tokens = int(starts[-1])
        slots = make_slot_mapping(tables, positions, starts, self.block_size, self.max_len, num_tokens)
        seq_lens = (contexts + lens).astype(np.int32)
        metadata = AttentionMetadata(
            query_start_loc=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(seq_lens),
            block_tables=torch.from_numpy(tables),
            slot_mapping=torch.from_numpy(slots),
            max_query_len=int(lens.max()),
            max_seq_len=int(seq_lens.max()),
            query_start_loc_np=starts,
            seq_lens_np=seq_lens,
        )
        ids = torch.tensor([token for row in rows for token in row.query])
        output = self.decoder.forward(
            ids,
            torch.from_numpy(positions),
            [attention.plan(metadata) for attention in self.attention],
            self.kv,
            self.hidden_layers,
        )
        choices = self.decoder.logits(output.hidden).argmax(dim=-1).tolist()
        bounds = starts.tolist()
        verdicts = [self._commit(row, choices[bounds[index] : bounds[index + 1]]) for index, row in enumerate(rows)]
        sampled, rejected, anchors, following = zip(*verdicts, strict=True)
        if publish:
            entry = self.channel.begin(self.seq, len(rows), num_tokens)
            if entry.hidden is not None:
                assert output.captured is not None
                entry.hidden.copy_(output.captured)
            entry.positions.copy_(torch.from_numpy(positions))
            entry.input_ids.copy_(ids)
            entry.query_start_loc.copy_(torch.from_numpy(starts))
            entry.seq_lens.copy_(torch.from_numpy(seq_lens))
            entry.seats.copy_(torch.from_numpy(seats))
            entry.num_sampled.copy_(torch.tensor(sampled))
            entry.num_rejected.copy_(torch.tensor(rejected))
            entry.anchors.copy_(torch.tensor(anchors))
            entry.next_prompt_tokens.copy_(torch.tensor(following))
            entry.temperatures.copy_(torch.tensor([row.request.temperature for row in rows]))
            entry.seeds.copy_(torch.tensor([row.request.seed for row in rows]))
            entry.slot_mapping.copy_(torch.from_numpy(slots))
            entry.block_tables.copy_(torch.from_numpy(tables))
            self.channel.publish(self.seq)
        return self.seq

    def _commit(self, row: FakeRow, choices: list[int]) -> tuple[int, int, int, int]:
        """(num_sampled, num_rejected, anchor, next prompt token) of a row, with the request moved on."""
        request, query = row.request, row.query
        start = request.context_len
        if not request.decoding and start + len(query) < request.prompt_len:
            request.context_len += len(query)
            return 0, 0, -1, request.tokens[request.context_len]
        if not request.decoding:
            request.context_len += len(query)
            request.tokens.append(choices[-1])
            return 1, 0, choices[-1], -1
        drafts = query[1:]
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == choices[accepted]:
            accepted += 1
        request.num_drafted += len(drafts)
        request.num_accepted += accepted
        del request.tokens[start + 1 :]
        request.tokens.extend([*drafts[:accepted], choices[accepted]])
        request.context_len += 1 + accepted
        request.drafts = []
        return accepted + 1, len(drafts) - accepted, choices[accepted], -1


@torch.inference_mode()
def true_hidden(decoder: Decoder, tokens: Sequence[int], hidden_layers: Sequence[int]) -> torch.Tensor:
    """The captured hidden states [T, A * H] of one pass over `tokens`, apart from any service's cache."""
    config = decoder.config
    length = len(tokens)
    kv = decoder.make_kv_cache(2, length)
    lens = np.array([length], dtype=np.int32)
    starts = make_query_start_loc(lens)
    metadata = AttentionMetadata(
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(lens),
        block_tables=torch.ones((1, 1), dtype=torch.int32),
        slot_mapping=torch.arange(length, 2 * length),
        max_query_len=length,
        max_seq_len=length,
        query_start_loc_np=starts,
        seq_lens_np=lens,
    )
    plans = [
        make_attention(
            "torch", config.num_heads, config.num_kv_heads, config.head_dim, config.attention_scale, group.window
        ).plan(metadata)
        for group in decoder.groups
    ]
    output = decoder.forward(torch.tensor(list(tokens)), torch.arange(length), plans, kv, hidden_layers)
    assert output.captured is not None
    return output.captured
