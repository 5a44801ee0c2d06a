"""Does the one decoder compute what transformers computes, for each family, whatever rows stand in a batch?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.decoder import Decoder
from engine.errors import ModelError
from engine.model_config import ModelConfig
from tests.engine.batches import BatchRunner
from tests.tiny_models import load_reference, make_tiny_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-untied-llama3-rope": ("llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE}),
    "llama-yarn-rope": ("llama", {"rope_parameters": YARN_ROPE}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 4}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mistral-untied-no-window": ("mistral", {"sliding_window": None, "tie_word_embeddings": False}),
    "qwen2": ("qwen2", {}),
    "qwen2-untied-mixed-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2, "tie_word_embeddings": False},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-untied-wide-heads": ("qwen3", {"head_dim": 32, "tie_word_embeddings": False}),
}


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, PreTrainedModel]:
    family, overrides = CASES[request.param]
    directory = make_tiny_model(tmp_path_factory.mktemp("model") / request.param, family, seed=3, **overrides)
    return Decoder.load(directory, torch.float32), load_reference(directory)


def random_tokens(num: int, seed: int) -> list[int]:
    return torch.randint(3, 512, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_prefill_chunks_decode_and_verify_rows_in_one_batch(pair: tuple[Decoder, PreTrainedModel]) -> None:
    decoder, model = pair
    sequences = [random_tokens(40, seed) for seed in range(4)]
    runner = BatchRunner(decoder)
    # Context first: 0 has none, 1 some prompt, 2 and 3 a whole prompt.
    runner.step([(1, sequences[1][:11]), (2, sequences[2][:20]), (3, sequences[3][:15])])
    # One batch: whole prefill, next chunk of a prompt, one decode token, anchor with five drafts.
    rows = [
        (0, sequences[0]),
        (1, sequences[1][11:30]),
        (2, sequences[2][20:21]),
        (3, sequences[3][15:21]),
    ]
    starts = [0, 11, 20, 15]
    logits = decoder.logits(runner.step(rows).hidden)
    assert logits.dtype == torch.float32
    offset = 0
    for (seat, tokens), start in zip(rows, starts, strict=True):
        expected = reference_logits(model, sequences[seat][: start + len(tokens)])[start:]
        assert_close(logits[offset : offset + len(tokens)], expected)
        offset += len(tokens)


def test_rejected_drafts_leave_no_trace(pair: tuple[Decoder, PreTrainedModel]) -> None:
    decoder, model = pair
    tokens = random_tokens(24, 9)
    runner = BatchRunner(decoder)
    runner.step([(0, tokens[:10])])
    runner.step([(0, [tokens[10], 5, 6, 7])])  # an anchor and three wrong drafts
    runner.rewind(0, 11)
    logits = decoder.logits(runner.step([(0, tokens[11:])]).hidden)
    assert_close(logits, reference_logits(model, tokens)[11:])


def test_one_token_at_a_time_equals_one_pass(pair: tuple[Decoder, PreTrainedModel]) -> None:
    decoder, model = pair
    tokens = random_tokens(18, 5)
    runner = BatchRunner(decoder)
    steps = [decoder.logits(runner.step([(0, [token])]).hidden) for token in tokens]
    assert_close(torch.cat(steps), reference_logits(model, tokens))


def test_captured_layers_equal_hidden_states(pair: tuple[Decoder, PreTrainedModel]) -> None:
    decoder, model = pair
    tokens = random_tokens(21, 7)
    last = decoder.config.num_layers - 1
    last_output: list[torch.Tensor] = []
    hook = model.model.layers[last].register_forward_hook(  # transformers' last hidden state is after the final norm
        lambda _module, _inputs, output: last_output.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.inference_mode():
        expected = model(torch.tensor([tokens]), output_hidden_states=True)
    hook.remove()
    runner = BatchRunner(decoder)
    wanted = (1, 0, last, 1)  # any order, repeated
    parts = [runner.step([(0, tokens[:13])], wanted), runner.step([(0, tokens[13:])], wanted)]
    captured = torch.cat([part.captured for part in parts if part.captured is not None])
    states = {0: expected.hidden_states[1][0], 1: expected.hidden_states[2][0], last: last_output[0].view(21, -1)}
    assert_close(captured, torch.cat([states[layer] for layer in wanted], dim=-1))
    hidden = torch.cat([part.hidden for part in parts])
    assert_close(hidden, expected.hidden_states[-1][0])


def test_embeddings_are_taken_in_place_of_ids(pair: tuple[Decoder, PreTrainedModel]) -> None:
    decoder, _ = pair
    tokens = random_tokens(9, 1)
    by_id = BatchRunner(decoder).step([(0, tokens)]).hidden
    by_embedding = BatchRunner(decoder).step([(0, tokens)], embeds=True).hidden
    assert torch.equal(by_id, by_embedding)


def test_a_row_has_the_same_bits_alone_and_in_a_crowd(pair: tuple[Decoder, PreTrainedModel]) -> None:
    decoder, _ = pair
    sequences = [random_tokens(17, seed) for seed in range(6)]
    alone = []
    for tokens in sequences:
        runner = BatchRunner(decoder)
        runner.step([(0, tokens[:16])])
        alone.append(decoder.logits(runner.step([(0, tokens[16:])]).hidden))
    runner = BatchRunner(decoder)
    runner.step([(seat, tokens[:16]) for seat, tokens in enumerate(sequences)])
    crowd = decoder.logits(runner.step([(seat, tokens[16:]) for seat, tokens in enumerate(sequences)]).hidden)
    torch.testing.assert_close(crowd, torch.cat(alone), atol=2e-6, rtol=0)


def test_weights_are_reachable(pair: tuple[Decoder, PreTrainedModel]) -> None:
    decoder, model = pair
    for ours, module in (
        (decoder.embed_weight, model.get_input_embeddings()),
        (decoder.lm_head_weight, model.get_output_embeddings()),
    ):
        theirs = module.weight
        assert isinstance(theirs, torch.Tensor)
        assert torch.equal(ours, theirs)
    if decoder.config.tie_embeddings:
        assert decoder.lm_head_weight is decoder.embed_weight


def test_sharded_checkpoint_and_other_dtype(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "whole", "qwen3", seed=3)
    model = load_reference(directory)
    sharded = tmp_path / "sharded"
    model.save_pretrained(sharded, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    tokens = random_tokens(12, 2)
    decoder = Decoder.load(sharded)
    logits = decoder.logits(BatchRunner(decoder).step([(0, tokens)]).hidden)
    assert_close(logits, reference_logits(model, tokens))

    half = Decoder.load(sharded, torch.bfloat16)
    logits = half.logits(BatchRunner(half).step([(0, tokens)]).hidden)
    assert logits.dtype == torch.float32
    agreement = torch.cosine_similarity(logits, reference_logits(model, tokens), dim=-1)
    assert agreement.min() > 0.99


def test_random_decoder_is_the_same_for_a_seed(tmp_path: Path) -> None:
    config = ModelConfig.from_directory(make_tiny_model(tmp_path / "m", "llama"))
    first, second, other = (Decoder.random(config, seed=seed) for seed in (1, 1, 2))
    outputs = [BatchRunner(decoder).step([(0, [5, 6, 7])]).hidden for decoder in (first, second, other)]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert outputs[0].isfinite().all()


def test_one_plan_for_each_group_is_asked_for(pair: tuple[Decoder, PreTrainedModel]) -> None:
    decoder, _ = pair
    runner = BatchRunner(decoder)
    positions, plans = runner.prepare([(0, 2)])
    with pytest.raises(ValueError, match="KV groups"):
        decoder.forward(torch.tensor([4, 5]), positions, [*plans, plans[0]], runner.kv)


def test_missing_and_misshapen_weights_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    directory = make_tiny_model(tmp_path / "m", "llama")
    file = directory / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({key: value for key, value in weights.items() if key != name}, file)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
        Decoder.load(directory)
    save_file(weights | {name: weights[name][:-1].contiguous()}, file)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight has shape"):
        Decoder.load(directory)
    file.write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match="cannot be read"):
        Decoder.load(directory)
    file.unlink()
    with pytest.raises(ModelError, match="no safetensors file"):
        Decoder.load(directory)


def test_the_backend_that_rotates_itself_gives_the_same(pair: tuple[Decoder, PreTrainedModel]) -> None:
    """Attention without host lengths, which takes queries and keys before their rotation."""
    decoder, _ = pair
    tokens = random_tokens(20, 11)
    hidden = []
    for attention in ("torch", "reference"):
        runner = BatchRunner(decoder, attention=attention)
        runner.step([(0, tokens[:9]), (1, tokens[:5])])
        hidden.append(runner.step([(0, tokens[9:]), (1, tokens[5:6])], (1, 1, 0)))
    assert_close(hidden[0].hidden, hidden[1].hidden)
    assert hidden[0].captured is not None
    assert hidden[1].captured is not None
    assert_close(hidden[0].captured, hidden[1].captured)


def test_dummy_weights_keep_activations_finite_at_any_depth(tmp_path: Path) -> None:
    overrides = {"num_hidden_layers": 24, "tie_word_embeddings": False, "attention_bias": True}
    directory = make_tiny_model(tmp_path / "m", "llama", **overrides)
    (directory / "model.safetensors").unlink()  # nothing but the config is read
    tokens = random_tokens(40, 12)
    outputs = []
    for seed in (1, 1, 2):
        decoder = Decoder.load(directory, torch.bfloat16, load_format="dummy", seed=seed)
        output = BatchRunner(decoder).step([(0, tokens)], (23,))
        assert output.captured is not None
        assert 0.5 < output.captured.float().std() < 10
        outputs.append(decoder.logits(output.hidden))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert 0.3 < outputs[0].std() < 3
