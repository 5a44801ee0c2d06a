"""Is a configuration read as transformers reads it, and refused where the decoder would compute something else?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import GemmaConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from engine.errors import ModelError
from engine.model_config import ModelConfig
from tests.tiny_models import make_tiny_model


def test_family_switches() -> None:
    llama = ModelConfig.from_hf_config(LlamaConfig(num_hidden_layers=2))
    assert (llama.qkv_bias, llama.o_bias, llama.qk_norm, llama.windows) == (False, False, False, (None, None))
    mistral = ModelConfig.from_hf_config(MistralConfig(num_hidden_layers=2, sliding_window=9))
    assert mistral.windows == (9, 9)
    qwen2 = ModelConfig.from_hf_config(Qwen2Config(num_hidden_layers=2))
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.windows) == (True, False, (None, None))
    sliding = Qwen2Config(num_hidden_layers=3, use_sliding_window=True, sliding_window=5, max_window_layers=1)
    assert ModelConfig.from_hf_config(sliding).windows == (None, 5, 5)
    qwen3 = ModelConfig.from_hf_config(Qwen3Config(num_hidden_layers=2, attention_bias=True))
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm, qwen3.head_dim) == (True, True, True, 128)


def test_generation_config_has_the_last_word_on_end_tokens(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "m")
    file = directory / "generation_config.json"
    assert ModelConfig.from_directory(directory).eos_token_ids == (2,)
    file.write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert ModelConfig.from_directory(directory).eos_token_ids == (2, 0)
    file.write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        ModelConfig.from_directory(directory)
    file.unlink()
    assert ModelConfig.from_directory(directory).eos_token_ids == (2,)
    assert ModelConfig.from_directory(directory).dtype == torch.float32


def test_unsupported_models_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="model_type 'gemma' is not supported"):
        ModelConfig.from_hf_config(GemmaConfig())
    with pytest.raises(ModelError, match="hidden_act 'gelu'"):
        ModelConfig.from_hf_config(LlamaConfig(hidden_act="gelu"))
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ModelError, match="rope_type 'dynamic' is not supported"):
        ModelConfig.from_hf_config(LlamaConfig(rope_parameters=dynamic))
    with pytest.raises(ModelError, match=r"no config\.json"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        ModelConfig.from_directory(tmp_path)
