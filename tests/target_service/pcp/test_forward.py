"""A step over ranks against the same step on one: hidden states, captured layers, and every rank's KV cache."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.block_pool import BlockPool
from engine.decoder import Decoder
from engine.kv_cache import KVCache
from engine.request_blocks import RequestBlocks
from kernels.attention.interface import AttentionBackend
from kernels.attention.registry import make_attention
from kernels.layout import PAD_SLOT
from kernels.sharding import shard_step
from target_service.model import LoadedModel
from target_service.pcp.exchange import gathered_slots
from target_service.pcp.forward import RankForward, ShardedOutput
from target_service.pcp.group import RankGroup
from target_service.pcp.order import StepOrder, most_bytes, table_columns
from target_service.pcp.warm import warm_up
from tests.target_service.pcp.ranks import ThreadRanks
from tests.tiny_models import make_tiny_model

BLOCK_SIZE, MAX_LEN, NUM_SEATS, NUM_BLOCKS = 4, 2048, 40, 1200
LAYERS = (2, 0)
FAMILIES = {
    "llama": ("llama", {}),
    "windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    family, overrides = FAMILIES[request.param]
    directory: Path = tmp_path_factory.mktemp("model") / request.param
    return Decoder.load(make_tiny_model(directory, family, seed=3, **overrides), torch.float32)


@dataclass
class Requests:
    """Requests on seats, and the orders of their steps: what rank 0 keeps, in small."""

    lengths: list[int] = field(default_factory=lambda: [0] * NUM_SEATS)
    blocks: RequestBlocks = field(
        default_factory=lambda: RequestBlocks(BlockPool(NUM_BLOCKS, BLOCK_SIZE), NUM_SEATS, MAX_LEN)
    )

    def order(self, rows: list[tuple[int, int, bool]], source: random.Random, layers: tuple[int, ...]) -> StepOrder:
        """rows: (seat, query_len, is a prompt chunk). Decode rows want logits for all tokens, chunks for the last."""
        seats, lens, splits = (np.array([row[column] for row in rows], dtype=np.int64) for column in range(3))
        contexts = np.array([self.lengths[seat] for seat in seats], dtype=np.int64)
        for seat, query_len in zip(seats.tolist(), lens.tolist(), strict=True):
            self.lengths[seat] += query_len
            assert self.blocks.reserve(seat, self.lengths[seat])
        return StepOrder(
            context_lens=contexts,
            query_lens=lens,
            num_logits=np.where(splits == 1, seats % 2, lens),
            splits=splits.astype(np.bool_),
            input_ids=np.array([source.randrange(3, 512) for _ in range(int(lens.sum()))], dtype=np.int64),
            block_tables=self.blocks.table_np[seats, : table_columns(contexts, lens, BLOCK_SIZE)].copy(),
            hidden_layers=layers,
        )


def steps(source: random.Random, num_rows: int, longest: int) -> list[list[tuple[int, int, bool]]]:
    """Prompts in chunks of odd lengths, then decode rows beside other prompts."""
    seats = list(range(num_rows))
    first = [(seat, source.randrange(1, longest + 1), True) for seat in seats]
    second = [(seat, source.randrange(1, 6), False) for seat in seats[::2]]
    second += [(seat, source.randrange(1, longest + 1), True) for seat in seats[1::2]]
    source.shuffle(second)
    third = [(seat, source.randrange(1, 6), False) for seat in seats]
    return [first, second, third]


def backends(decoder: Decoder, name: str = "torch") -> list[AttentionBackend]:
    config = decoder.config
    shape = (config.num_heads, config.num_kv_heads, config.head_dim, config.attention_scale)
    return [make_attention(name, *shape, group.window) for group in decoder.groups]


def run_all(
    decoder: Decoder, orders: list[StepOrder], group: RankGroup, name: str = "torch"
) -> tuple[list[ShardedOutput], KVCache]:
    kv = decoder.make_kv_cache(NUM_BLOCKS, BLOCK_SIZE)
    model = LoadedModel(decoder, kv, tuple(backends(decoder, name)), MAX_LEN, token_work=100)
    forward = RankForward(model, backends(decoder, name), group)
    return [forward.run(order) for order in orders], kv


def cached(kv: KVCache) -> torch.Tensor:
    return torch.stack([torch.stack([kv.k(layer), kv.v(layer)]) for layer in range(kv.num_layers)])


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("num_rows", "longest"), [(1, 1), (1, 37), (3, 9), (33, 11)])
def test_ranks_give_what_one_rank_gives(decoder: Decoder, num_ranks: int, num_rows: int, longest: int) -> None:
    torch.set_num_threads(1)
    source = random.Random(num_rows * 100 + longest)
    requests = Requests()
    orders = [
        requests.order(rows, source, LAYERS if step != 1 else ())
        for step, rows in enumerate(steps(source, num_rows, longest))
    ]
    compare(decoder, orders, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_long_prompts_in_odd_chunks(decoder: Decoder, num_ranks: int) -> None:
    """Prompts of 1 to 2,000 tokens, in chunks of odd lengths, beside rows that verify drafts."""
    source = random.Random(num_ranks)
    requests = Requests()
    left = {0: 1999, 1: 1, 2: 703, 3: 2000 - 1703, 4: 64}
    orders = []
    while left:
        rows = [(seat, min(tokens, source.randrange(1, 901, 2)), True) for seat, tokens in left.items()]
        rows += [(seat, source.randrange(1, 6), False) for seat in range(5) if seat not in left]
        left = {seat: left[seat] - chunk for seat, chunk, is_prompt in rows if is_prompt and left[seat] > chunk}
        orders.append(requests.order(rows, source, LAYERS))
    compare(decoder, orders, num_ranks)


def test_a_backend_that_reads_lengths_on_the_device(decoder: Decoder) -> None:
    source = random.Random(9)
    requests = Requests()
    orders = [requests.order(rows, source, LAYERS) for rows in steps(source, 5, 17)]
    compare(decoder, orders, 2, "reference")


def compare(decoder: Decoder, orders: list[StepOrder], num_ranks: int, name: str = "torch") -> None:
    """The steps on one rank and on several: results, and what is in the caches."""
    (alone,) = ThreadRanks(1).run(lambda group: run_all(decoder, orders, group))
    ranks = ThreadRanks(num_ranks)
    shared = ranks.run(lambda group: run_all(decoder, orders, group, name))
    for order, one, many in zip(orders, alone[0], shared[0][0], strict=True):
        for expected, found in ((one.logit_hidden, many.logit_hidden), (one.captured, many.captured)):
            assert (expected is None) == (found is None)
            if expected is not None and found is not None:
                torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
        assert (many.captured is None) == (order.hidden_layers == ())
        assert many.logit_hidden is None or many.logit_hidden.shape[0] == int(order.num_logits.sum())
    for _, kv in shared:  # every rank's cache holds the whole step, and nothing else
        torch.testing.assert_close(cached(kv), cached(alone[1]), rtol=2e-5, atol=2e-5)
    assert len(set(ranks.calls)) == 1  # an empty rank is in every collective
    assert all(output.logit_hidden is None and output.captured is None for output in shared[1][0])


def test_one_collective_a_layer_and_one_for_each_result(decoder: Decoder) -> None:
    source = random.Random(1)
    requests = Requests()
    order = requests.order([(1, 9, True), (2, 3, False)], source, ())
    ranks = ThreadRanks(2)
    ranks.run(lambda group: run_all(decoder, [order], group))
    assert ranks.calls == [decoder.config.num_layers + 1] * 2


@pytest.mark.parametrize(("num_blocks", "max_step_tokens"), [(80, 512), (6, 512), (2, 4), (80, 1)])
def test_warming_up_fits_any_target(decoder: Decoder, num_blocks: int, max_step_tokens: int) -> None:
    kv = decoder.make_kv_cache(num_blocks, BLOCK_SIZE)
    model = LoadedModel(decoder, kv, tuple(backends(decoder)), MAX_LEN, 100)
    warm_up(model, (model.attention_backends, backends(decoder)), max_step_tokens)
    assert (num_blocks == 80) == bool(kv.k(0).count_nonzero())  # a cache of a few blocks has no room for it
    assert not kv.k(0)[0].count_nonzero()  # the null block


def test_an_order_is_read_as_it_was_written() -> None:
    requests = Requests()
    order = requests.order([(3, 9, True), (5, 1, True), (9, 4, False)], random.Random(2), LAYERS)
    buffer = memoryview(bytearray(most_bytes(NUM_SEATS, 64, requests.blocks.max_blocks, 3)))
    num_bytes = order.encode_into(buffer)
    assert num_bytes <= len(buffer)
    read = StepOrder.decode(buffer)
    buffer[:] = bytes(len(buffer))
    for name in ("context_lens", "query_lens", "num_logits", "splits", "input_ids", "block_tables"):
        expected, found = getattr(order, name), getattr(read, name)
        assert (found == expected).all()
        assert found.dtype == expected.dtype
    assert read.hidden_layers == LAYERS
    with pytest.raises(ValueError, match="does not fit"):
        order.encode_into(buffer[: num_bytes - 1])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_each_rank_writes_each_token_once(num_ranks: int) -> None:
    """What the backend writes of a rank's whole rows, and what the exchange writes, is the step, no token twice."""
    order = Requests().order([(0, 17, True), (1, 3, False), (2, 4, False), (3, 1, True)], random.Random(4), ())
    shards = shard_step(order.context_lens, order.query_lens, order.splits, num_ranks)
    slots = np.arange(100, 100 + order.num_tokens, dtype=np.int64)
    slots[5] = PAD_SLOT  # a position past the length limit
    for rank, shard in enumerate(shards.ranks):
        exchanged = gathered_slots(shards, rank, slots)
        assert exchanged.shape == (num_ranks * shards.padded_tokens,)
        written = exchanged.tolist() + slots[shard.tokens[: shard.num_whole_tokens]].tolist()
        written = [slot for slot in written if slot != PAD_SLOT]
        assert sorted(written) == sorted(slot for slot in slots.tolist() if slot != PAD_SLOT)
