"""Is a configuration read as transformers reads it, and refused where the decoder would compute something else?"""

from __future__ import annotations

import json
import math
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
    wrong: tuple[object, ...] = (
        [],
        None,
        "x",
        {"eos_token_id": 1.5},
        {"eos_token_id": "2"},
        {"eos_token_id": [2, True]},
    )
    for content in wrong:
        file.write_text(json.dumps(content))
        with pytest.raises(ModelError, match=r"generation_config\.json: "):
            ModelConfig.from_directory(directory)
    file.write_text("[" * 100_000)
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


WRONG: dict[str, tuple[object, ...]] = {
    "num_hidden_layers": (0, -1, 10**9, 10**30, "2", None, True),
    "num_attention_heads": (0, "4"),
    "head_dim": (0, -64, 10**12, 10**30, "16"),
    "max_position_embeddings": (0, 10**12, 10**30),
    "vocab_size": (0, 1.5),
    "rms_norm_eps": (-1e-5, math.nan, math.inf, "x", None),
    "rope_parameters": (
        *({"rope_type": "default", "rope_theta": theta} for theta in (0.0, -1.0, math.nan, 10**30, "1e4", None)),
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": "2"},
        3,
    ),
    "eos_token_id": (1.5, "x", [[2]], 10**30),
    "dtype": (3, "torch.float33"),
}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("key", WRONG)
def test_what_can_be_no_models_is_told_in_one_line(tmp_path: Path, family: str, key: str) -> None:
    """Whoever reads the file, and before memory is taken for it."""
    directory = make_tiny_model(tmp_path / "m", family)
    (directory / "generation_config.json").unlink(missing_ok=True)
    file = directory / "config.json"
    right = json.loads(file.read_text())
    for value in WRONG[key]:
        file.write_text(json.dumps({**right, key: value}))
        with pytest.raises(ModelError) as error:
            ModelConfig.from_directory(directory)
        assert "\n" not in str(error.value)
        assert str(error.value).startswith(f"{directory}: config.json"), value
