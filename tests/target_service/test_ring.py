"""What the drafter is told of a step: hidden states, positions, lengths, anchors, slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kernels.layout import make_positions, make_slot_mapping
from tests.target_service.gateway_client import Driver, Gateway
from tests.target_service.scripted_drafter import ScriptedDrafter
from tests.target_service.test_greedy import prompt_of, wrong_from
from tests.tiny_models import greedy_reference

LAYERS = (2, 0)


@pytest.mark.parametrize("kind", ["shm", "bytes"])
def test_entries_hold_the_step(target_address: str, reference: PreTrainedModel, kind: str) -> None:
    with (
        Gateway(target_address) as gateway,
        ScriptedDrafter(target_address, kind, wrong_from(1), hidden_layers=LAYERS) as drafter,
    ):
        reply = drafter.reply
        assert (reply.dtype, reply.hidden_size, reply.max_model_len) == ("float32", 64, 512)
        assert reply.channel.hidden_width == 128
        driver = Driver(gateway, drafter, chunk=10)
        requests = []
        for length, seed in ((14, 50), (23, 51)):
            prompt = prompt_of(length, seed)
            full = prompt + greedy_reference(reference, prompt, 12)
            sampling = {"seed": seed + (1 << 63)}
            requests.append(driver.request(prompt, 8, full=full, draft_len=3, sampling=sampling))
        driver.run(requests)
        for running in requests:
            assert running.generated == running.full[len(running.prompt) : len(running.tokens)]
    outputs = [_layer_outputs(reference, running.full) for running in requests]

    for entry in drafter.entries:
        starts = entry["query_start_loc"].tolist()
        query_lens = entry["query_start_loc"].diff()
        context_lens = entry["seq_lens"] - query_lens
        assert entry["positions"].tolist() == make_positions(context_lens.numpy(), query_lens.numpy()).tolist()
        slots = make_slot_mapping(
            entry["block_tables"].numpy(),
            entry["positions"].numpy(),
            entry["query_start_loc"].numpy(),
            16,
            512,
            entry["num_tokens"],
        )
        assert entry["slot_mapping"].tolist() == slots.tolist()
        for row in range(entry["num_rows"]):
            which = int(entry["seeds"][row] + (1 << 63)) - 50
            full = requests[which].full
            _check_row(entry, row, starts[row], starts[row + 1], full, outputs[which])
    rejected = [int(entry["num_rejected"].sum()) for entry in drafter.entries]
    assert any(rejected)


@pytest.mark.parametrize("metadata_source", ["build", "reuse"])
def test_tables_have_room_for_drafts_where_the_drafter_mirrors_them(
    target_address: str, reference: PreTrainedModel, metadata_source: str
) -> None:
    with (
        Gateway(target_address) as gateway,
        ScriptedDrafter(target_address, "shm", wrong_from(1), metadata_source=metadata_source) as drafter,
    ):
        driver = Driver(gateway, drafter)
        prompt = prompt_of(14, 52)
        full = prompt + greedy_reference(reference, prompt, 60)
        driver.run([driver.request(prompt, 50, full=full, draft_len=7)])
    short = 0
    for entry in drafter.entries:
        last = int(entry["seq_lens"][0]) + 7 - 1  # the last position that a draft's KV may go to
        short += int(entry["block_tables"][0, min(last, 63) // 16] == 0)
    assert (short > 0) == (metadata_source == "build")


def _check_row(
    entry: dict[str, Any], row: int, start: int, end: int, full: list[int], outputs: dict[int, torch.Tensor]
) -> None:
    context_len = int(entry["seq_lens"][row]) - (end - start)
    committed = int(entry["seq_lens"][row] - entry["num_rejected"][row])
    kept = committed - context_len
    assert entry["input_ids"][start : start + kept].tolist() == full[context_len:committed]
    expected = torch.cat([outputs[layer][context_len:committed] for layer in LAYERS], dim=1)
    assert torch.allclose(entry["hidden"][start : start + kept], expected, atol=1e-4)
    if int(entry["num_sampled"][row]):
        assert int(entry["anchors"][row]) == full[committed]
        assert int(entry["next_prompt_tokens"][row]) == -1
    else:
        assert int(entry["anchors"][row]) == -1
        assert int(entry["num_rejected"][row]) == 0
        assert int(entry["next_prompt_tokens"][row]) == full[committed]


@torch.inference_mode()
def _layer_outputs(reference: PreTrainedModel, tokens: list[int]) -> dict[int, torch.Tensor]:
    outputs: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            outputs[layer] = (output if isinstance(output, torch.Tensor) else output[0]).reshape(len(tokens), -1)

        return hook

    hooks = [layer.register_forward_hook(keep(index)) for index, layer in enumerate(reference.model.layers)]
    reference.model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return outputs
