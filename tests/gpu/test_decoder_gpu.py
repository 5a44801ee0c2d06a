"""The decoder on a GPU: transformers' logits in float32, a graph's replay equal to the eager run, dummy weights."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.decoder import Decoder, ForwardOutput
from engine.graphs import GraphCache
from engine.model_config import ModelConfig
from kernels.attention.interface import AttentionMetadata
from tests.engine.batches import BatchRunner
from tests.tiny_models import load_reference, make_tiny_model

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
    pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed"),
]

DEVICE = "cuda"
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 7, "tie_word_embeddings": False},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    "qwen3": {"head_dim": 32},
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, PreTrainedModel]:
    directory = make_tiny_model(
        tmp_path_factory.mktemp("model") / request.param, request.param, seed=3, **FAMILIES[request.param]
    )
    model = load_reference(directory)
    torch.nn.Module.to(model, DEVICE)
    return Decoder.load(directory, torch.float32, DEVICE), model


def random_tokens(num: int, seed: int) -> list[int]:
    return torch.randint(3, 512, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens], device=DEVICE)).logits[0]
    return logits


@pytest.mark.parametrize("attention", ["triton", "torch"])
def test_mixed_rows_equal_transformers(pair: tuple[Decoder, PreTrainedModel], attention: str) -> None:
    """Chunks of a prompt, a decode row and a verify row in one batch, float32 without TF32."""
    assert not torch.backends.cuda.matmul.allow_tf32
    decoder, model = pair
    sequences = [random_tokens(40, seed) for seed in range(4)]
    runner = BatchRunner(decoder, attention=attention)
    runner.step([(1, sequences[1][:11]), (2, sequences[2][:20]), (3, sequences[3][:15])])
    rows = [(0, sequences[0]), (1, sequences[1][11:30]), (2, sequences[2][20:21]), (3, sequences[3][15:21])]
    logits = decoder.logits(runner.step(rows).hidden)
    offset = 0
    for (seat, tokens), start in zip(rows, (0, 11, 20, 15), strict=True):
        expected = reference_logits(model, sequences[seat][: start + len(tokens)])[start:]
        torch.testing.assert_close(logits[offset : offset + len(tokens)], expected, atol=1e-4, rtol=0)
        offset += len(tokens)


def test_captured_layers(pair: tuple[Decoder, PreTrainedModel]) -> None:
    decoder, model = pair
    tokens = random_tokens(21, 7)
    with torch.inference_mode():
        states = model(torch.tensor([tokens], device=DEVICE), output_hidden_states=True).hidden_states
    output = BatchRunner(decoder, attention="triton").step([(0, tokens)], (1, 0, 1))
    assert output.captured is not None
    expected = torch.cat([states[layer + 1][0] for layer in (1, 0, 1)], dim=-1)
    torch.testing.assert_close(output.captured, expected, atol=1e-4, rtol=0)


def decode_steps(decoder: Decoder, graphs: GraphCache, tokens: list[int], num_rows: int = 3) -> list[torch.Tensor]:
    """Logits and captured states of five decode steps of some rows, each through `graphs`, over fixed buffers."""
    runner = BatchRunner(decoder, attention="triton")
    runner.step([(seat, tokens[seat : seat + 9 + seat]) for seat in range(num_rows)])
    rows = [(seat, 1) for seat in range(num_rows)]
    positions, plans = runner.prepare(rows)
    # A graph knows no better bound than the longest sequence there can be.
    metadata = [replace(metadata_of(plan), max_seq_len=runner.max_len) for plan in plans]
    fixed = [backend.plan(group) for backend, group in zip(runner.backends, metadata, strict=True)]
    ids = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)

    def forward() -> tuple[ForwardOutput, torch.Tensor]:
        output = decoder.forward(ids, positions, fixed, runner.kv, (1, 0))
        return output, decoder.logits(output.hidden)

    found: list[torch.Tensor] = []
    for step in range(5):
        fresh_positions, fresh = runner.prepare(rows)
        positions.copy_(fresh_positions)
        for group, plan in zip(metadata, fresh, strict=True):
            for name in ("query_start_loc", "seq_lens", "block_tables", "slot_mapping"):
                getattr(group, name).copy_(getattr(metadata_of(plan), name))
        ids.copy_(torch.tensor(tokens[20 + num_rows * step : 20 + num_rows * (step + 1)]))
        with torch.inference_mode():
            output, logits = graphs.run("decode", forward)
        assert output.captured is not None
        found += [logits.clone(), output.captured.clone()]
        for seat, _ in rows:
            runner.lengths[seat] += 1
    return found


def metadata_of(plan: object) -> AttentionMetadata:
    metadata = getattr(plan, "metadata", None)
    assert isinstance(metadata, AttentionMetadata)
    return metadata


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_gives_the_bits_of_an_eager_run(pair: tuple[Decoder, PreTrainedModel], dtype: torch.dtype) -> None:
    decoder = pair[0]
    if dtype == torch.bfloat16:
        decoder = Decoder.dummy(decoder.config, dtype, DEVICE)
    tokens = random_tokens(60, 4)
    graphs = GraphCache(DEVICE, 8)
    replayed = decode_steps(decoder, graphs, tokens)
    eager = decode_steps(decoder, GraphCache(DEVICE, 8, enabled=False), tokens)
    assert (graphs.counts.captures, graphs.counts.replays, graphs.counts.eager_runs) == (1, 4, 1)
    for got, expected in zip(replayed, eager, strict=True):
        assert torch.equal(got, expected)


def test_overlapping_launches_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of a real size, so that the products of few rows run: who of their programs comes last must not show.
    Over and over: what is read too early differs from run to run.
    """
    config = ModelConfig.from_directory(Path(__file__).resolve().parents[2] / "configs/shapes/llama-3-8b")
    config = replace(config, num_layers=4, windows=(None,) * 4)
    decoder = Decoder.dummy(config, torch.bfloat16, DEVICE)
    tokens = random_tokens(60, 4)
    for num_rows in (1, 3, 5):
        monkeypatch.setenv("OUTRIDER_LAUNCH_OVERLAP", "0")
        expected = decode_steps(decoder, GraphCache(DEVICE, 8), tokens, num_rows)
        monkeypatch.setenv("OUTRIDER_LAUNCH_OVERLAP", "1")
        for enabled in (True, False, True, True):
            got = decode_steps(decoder, GraphCache(DEVICE, 8, enabled), tokens, num_rows)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, expected, strict=True))


def test_a_run_has_its_effects_once_however_it_is_run() -> None:
    graphs = GraphCache(DEVICE, 8)
    value = torch.zeros(1, device=DEVICE)

    def add() -> torch.Tensor:
        value.add_(1)
        return value * 2

    for turn in range(5):
        assert graphs.run("add", add).item() == 2 * (turn + 1)
    assert value.item() == 5
    graphs.capture("again", add)
    assert value.item() == 6  # its warm-up
    assert "again" in graphs
    assert graphs.run("again", add).item() == 14
    assert (graphs.counts.captures, graphs.counts.replays, graphs.counts.eager_runs) == (2, 5, 1)


def test_a_forward_waits_for_nothing(tmp_path: Path) -> None:
    """Any wait for the device inside a forward raises here."""
    directory = make_tiny_model(tmp_path / "m", "qwen3", sliding_window=None)
    decoder = Decoder.load(directory, torch.bfloat16, DEVICE)
    runner = BatchRunner(decoder, attention="triton")
    runner.step([(0, random_tokens(30, 1))])
    positions, plans = runner.prepare([(0, 4)])
    ids = torch.tensor([5, 6, 7, 8], device=DEVICE)
    with torch.inference_mode():
        torch.cuda.set_sync_debug_mode("error")
        try:
            output = decoder.forward(ids, positions, plans, runner.kv, (0, 2))
            logits = decoder.logits(output.hidden)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert logits.dtype == torch.float32
    assert bool(logits.isfinite().all())


def test_dummy_weights_of_a_real_size_stay_finite() -> None:
    config = Path(__file__).resolve().parents[2] / "configs/shapes/llama-3-8b"
    decoder = Decoder.load(config, device=DEVICE, load_format="dummy")
    assert decoder.dtype == torch.bfloat16
    runner = BatchRunner(decoder, num_seats=2, max_len=128, block_size=16, attention="triton")
    output = runner.step([(0, random_tokens(100, 3)), (1, random_tokens(7, 4))], (1, 15, 31))
    assert output.captured is not None
    assert 0.5 < float(output.captured.float().std()) < 10
    logits = decoder.logits(output.hidden)
    assert bool(logits.isfinite().all())
    assert 0.3 < float(logits.std()) < 3


def test_graphs_that_gave_way_go_once_the_device_is_past_them() -> None:
    """Captured over and over, of more keys than are kept, while the device lags behind: always the right result."""
    graphs = GraphCache(DEVICE, 2)
    value = torch.zeros(1 << 20, device=DEVICE)
    sums: list[torch.Tensor] = []

    def add(number: int) -> torch.Tensor:
        return (value + number).sum()

    for turn in range(3):
        for number in range(4):
            graphs.run(number, lambda number=number: add(number))  # type: ignore[misc]
            torch.cuda._sleep(20_000_000)  # what is launched from here on is not run yet when it gives way
            sums.append(graphs.run(number, lambda number=number: add(number)).clone())  # type: ignore[misc]
        assert graphs.counts.evictions == max(0, 4 * (turn + 1) - 2)
    torch.cuda.synchronize()
    assert [total.item() for total in sums] == [number * (1 << 20) for _ in range(3) for number in range(4)]
    assert sum(number in graphs for number in range(4)) == 2


def test_garbage_does_not_spoil_a_capture() -> None:
    """Another's graphs become garbage while a graph is captured, and enough is allocated that it would be collected."""
    value = torch.zeros(8, device=DEVICE)
    others: list[object] = []

    def add() -> torch.Tensor:
        if others and torch.cuda.is_current_stream_capturing():
            cycle: list[object] = [others.pop()]
            cycle.append(cycle)
            del cycle
            assert len([[number] for number in range(5000)]) == 5000
        return value.add_(1)

    graphs, other = GraphCache(DEVICE, 8), GraphCache(DEVICE, 8)
    for _ in range(2):
        other.run("add", add)
    others.append(other)
    del other
    total = [graphs.run("add", add) for _ in range(2)][-1]
    assert not others
    assert graphs.counts.captures == 1
    assert total[0].item() == 4
