"""Does the head compute what the paper says, from a checkpoint's tensors by their public names?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import linear, silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from drafter_service.eagle3.checkpoint import load_head, random_head, save_head
from drafter_service.eagle3.config import layer_config
from kernels.attention.interface import AttentionMetadata
from kernels.attention.torch_backend import TorchAttention
from tests.drafter_service.conftest import head_config, widen

CPU = torch.device("cpu")


def reference(tensors: dict[str, torch.Tensor], config: Any, ids: torch.Tensor, captured: torch.Tensor) -> Any:
    """(output before the norm, logits) of one causal pass over `ids`, with transformers' parts where it has them."""

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        module = LlamaRMSNorm(x.shape[-1], config.rms_eps)
        module.weight.data = tensors[f"{name}.weight"]
        return module(x)

    def product(name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    if config.norm_before_fc:
        captured = norm("input_norm", captured)
    if config.fc_norm:
        parts = captured.split(config.target_hidden_size, -1)
        captured = torch.cat([norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], -1)
    g = product("fc", captured)
    normed = norm("midlayer.hidden_norm", g)
    x = torch.cat([norm("midlayer.input_layernorm", tensors["embed_tokens.weight"][ids]), normed], -1)
    length, size = len(ids), config.head_dim
    q, k, v = (
        product(f"midlayer.self_attn.{name}_proj", x).view(1, length, -1, size).transpose(1, 2) for name in "qkv"
    )
    cos, sin = LlamaRotaryEmbedding(layer_config(config))(q, torch.arange(length)[None])
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    k, v = (y.repeat_interleave(config.num_heads // config.num_kv_heads, 1) for y in (k, v))
    scores = (q @ k.transpose(-1, -2)) * size**-0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    attended = (scores.softmax(-1) @ v).transpose(1, 2).reshape(length, -1)
    r = product("midlayer.self_attn.o_proj", attended) + (normed if config.norm_before_residual else g)
    y = norm("midlayer.post_attention_layernorm", r)
    gate, up = product("midlayer.mlp.gate_proj", y), product("midlayer.mlp.up_proj", y)
    a = r + product("midlayer.mlp.down_proj", silu(gate) * up)
    return a, product("lm_head", norm("norm", a))


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"attention_bias": True, "mlp_bias": True, "norm_before_residual": True},
        {
            "norm_before_fc": True,
            "norm_output": True,
            "rope": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        },
        {"fc_norm": True, "num_kv_heads": 1},
    ],
)
@torch.inference_mode()
def test_one_pass(tmp_path: Path, overrides: dict[str, Any]) -> None:
    config = head_config(**overrides)
    head = widen(random_head(config, torch.float32, CPU, seed=6), 4.0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in head.named_parameters():
        if "norm" in name:
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    head.attach_embedding(torch.randn(512, 64, generator=generator))
    save_head(head, tmp_path, with_embedding=True)
    head = load_head(tmp_path, torch.float32, CPU)
    head.pack()
    ids, captured = torch.randint(0, 512, (9,), generator=generator), torch.randn(9, 192, generator=generator)
    starts, lens = torch.tensor([0, 9], dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    metadata = AttentionMetadata(
        starts, lens, torch.ones((1, 1), dtype=torch.int32), torch.arange(16, 25), 9, 9, starts.numpy(), lens.numpy()
    )
    kv_heads = config.num_kv_heads
    plan = TorchAttention(4, kv_heads, 16, 0.25).plan(metadata)
    k_cache, v_cache = torch.zeros(2, 16, kv_heads, 16), torch.zeros(2, 16, kv_heads, 16)
    output = head(ids, head.fuse(captured), torch.arange(9), plan, k_cache, v_cache)
    expected, logits = reference(load_file(tmp_path / "model.safetensors"), config, ids, captured)
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(head.logits(output), logits, atol=1e-4, rtol=1e-4)
    passed_on = head.norm(expected) if config.norm_output else expected
    torch.testing.assert_close(head.next_hidden(output), passed_on, atol=1e-4, rtol=1e-4)
