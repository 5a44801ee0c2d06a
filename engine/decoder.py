"""How does a dense decoder turn tokens into hidden states and logits?

One implementation for Llama, Mistral, Qwen2 and Qwen3: what differs between them is in ModelConfig. A step's tokens
come as one flat batch; how they attend is the business of the attention plans, so the decoder knows neither rows nor
requests. Query, key and value projections are one product, gate and up another. On a GPU nothing here waits for the
device, so that a forward can be captured in a graph; a layer takes ten launches: four products, rotation with the write
of the KV, attention in two, the gate, and two norms that add the residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch.nn.functional import embedding

from engine.kv_cache import KVCache
from engine.kv_group import KVGroup, group_layers
from engine.linear import PackedLinear
from engine.model_config import ModelConfig
from engine.weights import DummyWeights, RandomWeights, SafetensorsWeights, WeightSource
from kernels.attention.interface import AttentionPlan, RotatingPlan
from kernels.kernel_set import kernels_for

LoadFormat = Literal["safetensors", "dummy"]


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """hidden: [T, H] after the final norm. captured: [T, A * H], the layers asked for side by side; None for none."""

    hidden: torch.Tensor
    captured: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights. q_norm, k_norm: [D], or None."""

    input_norm: torch.Tensor
    qkv: PackedLinear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: PackedLinear
    post_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear


class Decoder:
    """A dense decoder ready to run. Weights never change after loading; run it under torch.inference_mode().

    embed_weight, lm_head_weight: [V, H], the same tensor where the model ties them. An untied lm_head_weight is a copy
    wherever the product is packed (see PackedLinear).
    groups: the KV groups; `forward` takes one plan for each, in this order.
    """

    def __init__(
        self, config: ModelConfig, weights: WeightSource, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        """Takes every tensor from `weights` by its Hugging Face name, as `dtype` on `device`."""
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self._kernels = kernels_for(self.device)
        self.groups: tuple[KVGroup, ...] = group_layers(config)
        self._group_of_layer = [
            next(index for index, group in enumerate(self.groups) if layer in group.layers)
            for layer in range(config.num_layers)
        ]
        loader = _Loader(config, weights, dtype, self.device)
        vocab = (config.vocab_size, config.hidden_size)
        self.embed_weight = loader.tensor("model.embed_tokens.weight", vocab)
        self.layers = tuple(loader.layer(index) for index in range(config.num_layers))
        self.final_norm = loader.tensor("model.norm.weight", (config.hidden_size,))
        # Tied: one tensor in memory for the embedding, and the product's own (packed) form of it.
        self._lm_head = PackedLinear(
            self.embed_weight if config.tie_embeddings else loader.tensor("lm_head.weight", vocab)
        )
        self._inv_freq = torch.tensor(config.inv_freq, dtype=torch.float32, device=self.device)

    @classmethod
    def load(
        cls,
        directory: str | Path,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        load_format: LoadFormat = "safetensors",
        seed: int = 0,
    ) -> Decoder:
        """From a Hugging Face directory. dtype: None takes the checkpoint's. load_format `dummy` reads the config only
        and draws the weights from `seed` on the device. ModelError names what is missing or not supported.
        """
        config = ModelConfig.from_directory(directory)
        if load_format == "dummy":
            return cls.dummy(config, dtype or config.dtype, device, seed)
        with SafetensorsWeights(directory) as weights:
            return cls(config, weights, dtype or config.dtype, device)

    @classmethod
    def dummy(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Decoder:
        """With weights of a trained model's size, drawn on the device: what a model of this shape costs, without it."""
        return cls(config, DummyWeights(seed, config.num_layers, dtype, torch.device(device)), dtype, device)

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> Decoder:
        """With weights drawn from `seed`: the same on every device and machine."""
        return cls(config, RandomWeights(seed), dtype, device)

    @property
    def lm_head_weight(self) -> torch.Tensor:
        return self.embed_weight if self.config.tie_embeddings else self._lm_head.weight

    def make_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """A zeroed cache of this model's shape, dtype and device."""
        config = self.config
        return KVCache(
            num_blocks, block_size, config.num_layers, config.num_kv_heads, config.head_dim, self.dtype, self.device
        )

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: [T] int64. Returns [T, H]."""
        return embedding(input_ids, self.embed_weight)

    def forward(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        plans: Sequence[AttentionPlan],
        kv: KVCache,
        hidden_layers: Sequence[int] = (),
    ) -> ForwardOutput:
        """Run one step's tokens through all layers.

        inputs: [T] int64 token ids, or [T, H] embeddings of this decoder's dtype.
        positions: [T] int64, absolute, for the rotary embedding.
        plans: one per KV group, in the order of `groups`; each writes this step's KV into `kv` as its layers run.
        hidden_layers: 0-based decoder layers whose *output* is captured, in the order given: the residual stream after
            the whole layer, before the next layer's norm. transformers calls the output of layer i
            `hidden_states[i + 1]` (but normalises the last one). EAGLE-3's and vLLM's layer numbers name a layer's
            *input*: their layer n is the output of n - 1 here.
        """
        if len(plans) != len(self.groups):
            raise ValueError(f"{len(self.groups)} KV groups need as many plans, got {len(plans)}")
        config, kernels = self.config, self._kernels
        num_heads, num_kv_heads, head_dim, eps = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.rms_eps,
        )
        residual = inputs if inputs.is_floating_point() else self.embed(inputs)
        num_tokens = residual.shape[0]
        captured = _Captured(residual, hidden_layers)
        cos, sin = kernels.rotary_angles(positions, self._inv_freq, config.rope_scaling, self.dtype)
        rotating = [plan if isinstance(plan, RotatingPlan) else None for plan in plans]
        layers = self.layers
        normed = kernels.rms_norm(residual, layers[0].input_norm, eps)
        for index, layer in enumerate(layers):
            qkv = layer.qkv(normed).view(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
            q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = kernels.rms_norm(q, layer.q_norm, eps), kernels.rms_norm(k, layer.k_norm, eps)
            group = self._group_of_layer[index]
            rotates = rotating[group]
            if rotates is not None:
                attended = rotates.run_rotating(q, k, v, cos, sin, kv.k(index), kv.v(index))
            else:
                q, k = kernels.apply_rope(q, k, cos, sin)
                attended = plans[group].run(q, k, v, kv.k(index), kv.v(index))
            attended = layer.out(attended.reshape(num_tokens, num_heads * head_dim))
            normed, residual = kernels.rms_norm_residual(attended, residual, layer.post_norm, eps)
            mlp = layer.down(layer.gate_up.silu_mul(normed))
            next_norm = layers[index + 1].input_norm if index + 1 < len(layers) else self.final_norm
            normed, residual = kernels.rms_norm_residual(mlp, residual, next_norm, eps, captured.place(index))
            captured.repeat(index)
        return ForwardOutput(normed, captured.states)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, H] after the final norm. Returns [N, V] float32."""
        return self._lm_head.float32(hidden)


class _Captured:
    """The captured layers' states, [T, A * H], in the making: the residual of a layer is written where it is kept, and
    the next layer reads it there.
    """

    def __init__(self, inputs: torch.Tensor, hidden_layers: Sequence[int]) -> None:
        self._layers = tuple(hidden_layers)
        self._size = inputs.shape[1]
        shape = (inputs.shape[0], len(self._layers) * self._size)
        self.states = inputs.new_empty(shape) if self._layers else None

    def place(self, layer: int) -> torch.Tensor | None:
        """Where this layer's output goes, a view of row stride A * H; None where it is not captured."""
        return self._column(self._layers.index(layer)) if layer in self._layers else None

    def repeat(self, layer: int) -> None:
        """Copy the layer's output to where it was asked for again."""
        if self._layers.count(layer) > 1:
            first = self._layers.index(layer)
            for column in range(first + 1, len(self._layers)):
                if self._layers[column] == layer:
                    self._column(column).copy_(self._column(first))

    def _column(self, column: int) -> torch.Tensor:
        assert self.states is not None
        return self.states[:, column * self._size : (column + 1) * self._size]


@dataclass(frozen=True, slots=True)
class _Loader:
    """Reads a layer's tensors under their Hugging Face names and fuses what is run as one product."""

    config: ModelConfig
    weights: WeightSource
    dtype: torch.dtype
    device: torch.device

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.weights.get(name, shape).to(self.device, self.dtype).contiguous()

    def linear(self, names: tuple[str, ...], out_sizes: tuple[int, ...], in_size: int, bias: bool) -> PackedLinear:
        """The products `names`, stacked."""
        weights = [
            self.tensor(f"{name}.weight", (out_size, in_size)) for name, out_size in zip(names, out_sizes, strict=True)
        ]
        if not bias:
            return PackedLinear(torch.cat(weights))
        biases = [self.tensor(f"{name}.bias", (size,)) for name, size in zip(names, out_sizes, strict=True)]
        return PackedLinear(torch.cat(weights), torch.cat(biases))

    def layer(self, index: int) -> DecoderLayer:
        config = self.config
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        hidden, head_dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        return DecoderLayer(
            input_norm=self.tensor(f"{prefix}.input_layernorm.weight", (hidden,)),
            qkv=self.linear(
                (f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
                (q_size, kv_size, kv_size),
                hidden,
                config.qkv_bias,
            ),
            q_norm=self.tensor(f"{attention}.q_norm.weight", (head_dim,)) if config.qk_norm else None,
            k_norm=self.tensor(f"{attention}.k_norm.weight", (head_dim,)) if config.qk_norm else None,
            out=self.linear((f"{attention}.o_proj",), (hidden,), q_size, config.o_bias),
            post_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
            gate_up=self.linear((f"{mlp}.gate_proj", f"{mlp}.up_proj"), (inner, inner), hidden, config.mlp_bias),
            down=self.linear((f"{mlp}.down_proj",), (hidden,), inner, config.mlp_bias),
        )
