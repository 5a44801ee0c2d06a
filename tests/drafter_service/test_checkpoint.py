"""Are EAGLE-3 heads read and written the way the public layouts have them?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter_service.eagle3.checkpoint import load_head, random_head, save_head
from drafter_service.eagle3.config import Eagle3Config, default_hidden_layers, read_config
from drafter_service.eagle3.head import Eagle3Head
from engine.errors import ModelError
from tests.drafter_service.conftest import head_config

CPU = torch.device("cpu")


def same(a: Eagle3Head, b: Eagle3Head) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"attention_bias": True, "mlp_bias": True, "norm_before_residual": True},
        {"norm_before_fc": True, "norm_output": True, "hidden_layers": ()},
        {"fc_norm": True, "num_captured": 2, "hidden_layers": (0, 2)},
        {"draft_vocab_size": 512},
    ],
)
def test_round_trip(tmp_path: Path, overrides: dict[str, Any]) -> None:
    head = random_head(head_config(**overrides), torch.float32, CPU, seed=1)
    save_head(head, tmp_path)
    loaded = load_head(tmp_path, torch.float32, CPU)
    assert loaded.config == head.config
    assert same(loaded, head)
    assert loaded.embed_tokens is None


def test_the_original_layout_is_what_is_written(tmp_path: Path) -> None:
    head = random_head(head_config(), torch.float32, CPU, seed=1)
    save_head(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == {
        "d2t",
        "t2d",
        "fc.weight",
        "lm_head.weight",
        "norm.weight",
        *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        *(f"midlayer.{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
    }
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (64, 128)
    assert tensors["midlayer.self_attn.k_proj.weight"].shape == (32, 128)
    assert tensors["fc.weight"].shape == (64, 192)
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]


def test_pytorch_bin_files_are_read(tmp_path: Path) -> None:
    head = random_head(head_config(), torch.float32, CPU, seed=2)
    save_head(head, tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert same(load_head(tmp_path, torch.float32, CPU), head)


def speculators_config() -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "draft_vocab_size": 128,
        "norm_before_residual": True,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 1],
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x"}},
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 512,
            "vocab_size": 512,
            "attention_bias": False,
        },
    }


def test_the_speculators_layout_is_read(tmp_path: Path) -> None:
    head = random_head(head_config(), torch.float32, CPU, seed=3)
    save_head(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    renamed["embed_tokens.weight"] = torch.randn(512, 64)
    save_file(renamed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(speculators_config()))
    loaded = load_head(tmp_path, torch.float32, CPU)
    assert torch.equal(loaded.qkv_proj.weight, head.qkv_proj.weight)  # type: ignore[attr-defined]
    assert torch.equal(loaded.d2t, head.d2t)
    assert loaded.embed_tokens is not None
    assert torch.equal(loaded.embed_tokens, renamed["embed_tokens.weight"])
    assert loaded.config.norm_before_residual
    # Their layer numbers count inputs: their 2 is the output of layer 1.
    assert loaded.config.hidden_layers == (1, 2, 0)


def test_default_layers() -> None:
    assert default_hidden_layers(30) == (1, 14, 26)
    assert default_hidden_layers(32) == (1, 15, 28)
    assert head_config(hidden_layers=()).layers_of_target(30) == (1, 14, 26)
    with pytest.raises(ModelError, match="target of 2 layers"):
        head_config().layers_of_target(2)


def test_llama3_rope_is_transformers_own() -> None:
    raw = speculators_config()
    raw["transformer_layer_config"] |= {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    }
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from drafter_service.eagle3.config import layer_config

    config = read_config(raw)
    rotary = LlamaRotaryEmbedding(layer_config(config))
    head = Eagle3Head(config)
    positions = torch.tensor([0, 3, 400])
    cos, sin = head.rotary(positions)
    expected_cos, expected_sin = rotary(torch.zeros(1, 3, 1), positions[None])
    torch.testing.assert_close(cos, expected_cos[0, :, :8])
    torch.testing.assert_close(sin, expected_sin[0, :, :8])


def broken(tmp_path: Path, change: Any) -> None:
    head = random_head(head_config(), torch.float32, CPU, seed=3)
    save_head(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, c: t.pop("fc.weight"), "no tensor 'fc.weight'"),
        (lambda t, c: t.update({"fc.bias": torch.zeros(64)}), "unknown tensors fc.bias"),
        (lambda t, c: t.update({"fc.weight": torch.zeros(64, 64)}), "fc.weight is"),
        (lambda t, c: t.pop("d2t"), "no tensor 'd2t'"),
        (lambda t, c: t.update({"d2t": torch.full((128,), 500)}), "outside the target's vocabulary"),
        (lambda t, c: c.pop("hidden_size"), "'hidden_size'"),
        (lambda t, c: c.update({"num_hidden_layers": 2}), "num_hidden_layers"),
        (lambda t, c: c.update({"hidden_act": "gelu"}), "hidden_act"),
        (lambda t, c: c.update({"draft_vocab_size": 600}), "draft_vocab_size"),
        (lambda t, c: c.update({"eagle_config": {"use_aux_hidden_state": False}}), "use_aux_hidden_state"),
        (lambda t, c: c.update({"speculators_model_type": "eagle"}), "not 'eagle3'"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: Any, message: str) -> None:
    broken(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        load_head(tmp_path, torch.float32, CPU)


def test_an_empty_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        load_head(tmp_path, torch.float32, CPU)


def test_draft_vocabulary_maps_by_offsets() -> None:
    config: Eagle3Config = head_config(draft_vocab_size=4)
    head = Eagle3Head(config)
    head.set_draft_vocab(torch.tensor([3, 4, 100, 511]))
    assert head.d2t.tolist() == [3, 3, 98, 508]
    assert head.target_ids(torch.tensor([0, 3, 2])).tolist() == [3, 511, 100]
    assert head.t2d.nonzero().flatten().tolist() == [3, 4, 100, 511]
    for ids in ([4, 3, 100, 511], [3, 4, 100, 512], [3, 4, 100]):
        with pytest.raises(ModelError):
            head.set_draft_vocab(torch.tensor(ids))


def test_packing_changes_nothing_but_speed() -> None:
    head = random_head(head_config(), torch.float32, CPU, seed=4)
    captured = torch.randn(5, 192)
    with torch.inference_mode():
        fused, logits = head.fuse(captured), head.logits(torch.randn(5, 64, generator=torch.Generator().manual_seed(1)))
        head.pack()
        torch.testing.assert_close(head.fuse(captured), fused)
        again = head.logits(torch.randn(5, 64, generator=torch.Generator().manual_seed(1)))
    torch.testing.assert_close(again, logits)


def test_gradients_reach_every_weight() -> None:
    """A trainer's own plan: dense causal attention, no cache."""

    class Dense:
        def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)

    head = random_head(head_config(), torch.float32, CPU, seed=5)
    head.attach_embedding(torch.randn(512, 64))
    none = torch.empty(0)
    output = head(torch.arange(6), head.fuse(torch.randn(6, 192)), torch.arange(6), Dense(), none, none)
    head.logits(output).logsumexp(-1).sum().backward()
    for name, parameter in head.named_parameters():
        if name != "embed_tokens":
            assert parameter.grad is not None, name
            assert bool(parameter.grad.any()), name
