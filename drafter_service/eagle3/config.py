"""What shape is an EAGLE-3 head, and how do the two public layouts spell it in `config.json`?

`original` (SafeAILab, SpecForge): a Llama config with `draft_vocab_size` and, optionally, `eagle_config`.
`speculators`: `speculators_model_type: eagle3` with the layer's own config under `transformer_layer_config`.

The captured layers are named in two conventions in public files; this package has one: the 0-based index of the decoder
layer whose *output* is captured (the residual stream after it, before the next layer's norm; transformers'
`hidden_states[i + 1]`). `eagle_config.eagle_aux_hidden_state_layer_ids` (SpecForge) is written that way; a top-level
`eagle_aux_hidden_state_layer_ids` (speculators, vLLM) counts layer *inputs*, so its j is our j - 1. The published
default (2, L // 2, L - 3) is in the second convention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from engine.errors import ModelError
from engine.model_config import rope_frequencies
from engine.plain_config import plain_layers, plain_rope

if TYPE_CHECKING:
    from transformers import LlamaConfig  # slow to import, and most heads need none of it (see plain_config.py)


def default_hidden_layers(num_layers: int) -> tuple[int, int, int]:
    """The three target layers whose output EAGLE-3 captures, for a target of `num_layers` decoder layers.

    The published choice, (1, L // 2 - 1, L - 4) as outputs. A target too small for it: first, middle and last layer.
    """
    if num_layers < 1:
        raise ModelError(f"a target has at least one layer, got {num_layers}")
    if num_layers < 4:
        return (0, num_layers // 2, num_layers - 1)
    return (1, num_layers // 2 - 1, num_layers - 4)


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Sizes and switches of one head.

    hidden_size: H, of the head. target_hidden_size: of the captured states (A of them are concatenated).
    hidden_layers: which target layers' outputs, see above; empty: `default_hidden_layers` of the target.
    num_captured: A. vocab_size: the target's. draft_vocab_size: rows of the head's own `lm_head`.
    rope: transformers' `rope_parameters` of the layer ("rope_type", "rope_theta", ...).
    max_len: positions the head was made for.
    norm_before_residual: the residual is the normed hidden state rather than the plain one.
    norm_before_fc: one RMSNorm over the concatenation before `fc`. fc_norm: one RMSNorm per captured state instead.
    norm_output: the next draft step takes the normed output.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    rope: Mapping[str, Any]
    max_len: int
    hidden_layers: tuple[int, ...] = ()
    num_captured: int = 3
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_attention_heads {self.num_heads}: not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ModelError(f"draft_vocab_size {self.draft_vocab_size} is not in 1..vocab_size ({self.vocab_size})")
        if self.hidden_layers and len(self.hidden_layers) != self.num_captured:
            raise ModelError(f"{len(self.hidden_layers)} captured layers where fc takes {self.num_captured}")
        if any(layer < 0 for layer in self.hidden_layers):
            raise ModelError(f"captured layers {self.hidden_layers}: the embedding itself is not captured")

    def layers_of_target(self, num_layers: int) -> tuple[int, ...]:
        """The captured layers for a target of `num_layers` layers. ModelError if the target has no such layer."""
        layers = self.hidden_layers or default_hidden_layers(num_layers)
        if max(layers) >= num_layers:
            raise ModelError(f"captured layers {layers} in a target of {num_layers} layers")
        return tuple(layers)


def layer_config(config: Eagle3Config) -> LlamaConfig:
    """The head's decoder layer as transformers sees it."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_eps,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_len,
        rope_parameters=dict(config.rope),
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        tie_word_embeddings=False,
    )


def rotary_frequencies(config: Eagle3Config) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [head_dim / 2] float32 and the factor on cos and sin."""
    rope = plain_rope({"rope_parameters": config.rope})
    layer = layer_config(config) if rope is None else SimpleNamespace(rope_parameters=rope)
    inv_freq, factor = rope_frequencies(layer, config.head_dim)
    return torch.tensor(inv_freq, dtype=torch.float32), factor


def read_config(raw: Mapping[str, Any]) -> Eagle3Config:
    """A head's `config.json`, in either public layout. ModelError names what is missing or unknown."""
    is_speculators = "speculators_model_type" in raw
    if is_speculators and raw["speculators_model_type"] != "eagle3":
        raise ModelError(f"speculators_model_type is {raw['speculators_model_type']!r}, not 'eagle3'")
    layer_raw = raw.get("transformer_layer_config") if is_speculators else raw
    if not isinstance(layer_raw, Mapping):
        raise ModelError("config.json has no transformer_layer_config")
    _require(layer_raw, ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"))
    if layer_raw.get("num_hidden_layers", 1) != 1:
        raise ModelError(f"num_hidden_layers is {layer_raw['num_hidden_layers']}: an EAGLE-3 head has one layer")
    if layer_raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act is {layer_raw['hidden_act']!r}, only 'silu' is known")
    layer = plain_layers(layer_raw) or _full_layer(layer_raw)
    hidden_layers = _read_hidden_layers(raw)
    vocab_size = int(raw.get("target_vocab_size") or layer.vocab_size)
    return Eagle3Config(
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        num_heads=layer.num_attention_heads,
        num_kv_heads=layer.num_key_value_heads or layer.num_attention_heads,
        head_dim=layer.head_dim or layer.hidden_size // layer.num_attention_heads,
        rms_eps=layer.rms_norm_eps,
        vocab_size=vocab_size,
        draft_vocab_size=int(raw.get("draft_vocab_size") or vocab_size),
        target_hidden_size=int(raw.get("target_hidden_size") or layer.hidden_size),
        rope=dict(layer.rope_parameters or {}),
        max_len=layer.max_position_embeddings,
        hidden_layers=hidden_layers,
        num_captured=len(hidden_layers) or 3,
        attention_bias=bool(layer.attention_bias),
        mlp_bias=bool(layer.mlp_bias),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_before_fc=bool(raw.get("norm_before_fc", False)),
        fc_norm=bool(raw.get("fc_norm", False)),
        norm_output=bool(raw.get("norm_output", False)),
    )


def _full_layer(raw: Mapping[str, Any]) -> LlamaConfig:
    """The layer's config with what it leaves to transformers' defaults."""
    from transformers import LlamaConfig

    ignored = ("architectures", "auto_map", "dtype", "torch_dtype", "model_type")
    return LlamaConfig.from_dict({name: value for name, value in raw.items() if name not in ignored})


def write_config(config: Eagle3Config) -> dict[str, Any]:
    """`config.json` of the original layout, with the captured layers in both conventions."""
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_eps,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "max_position_embeddings": config.max_len,
        "rope_parameters": dict(config.rope),
        "rope_theta": config.rope.get("rope_theta"),
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
    }
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        if getattr(config, name):
            raw[name] = True
    if config.hidden_layers:
        raw["eagle_config"] = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(config.hidden_layers),
        }
        raw["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in config.hidden_layers]
    return raw


def _read_hidden_layers(raw: Mapping[str, Any]) -> tuple[int, ...]:
    nested = raw.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        raise ModelError(
            "eagle_config.use_aux_hidden_state is false: this head takes no captured layers (EAGLE-1 or 2)"
        )
    if ids := nested.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(int(layer) for layer in ids)
    if ids := raw.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(int(layer) - 1 for layer in ids)
    return ()


def _require(raw: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if name not in raw:
            raise ModelError(f"config.json of the EAGLE-3 head has no {name!r}")
