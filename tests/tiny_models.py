"""Which tiny model directories do the tests run on?

Hugging Face directories with random weights (fixed seed), small enough to load in milliseconds: config.json,
generation_config.json, model.safetensors, and a byte-level tokenizer whose 512 ids cover every byte string, with the
chat template of SmolLM2. Weights are wider than transformers' own initialisation, so that attention matters and
greedy output is not one token for ever.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 512
EOS_TOKEN_ID = 2  # <|im_end|>
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2, as in SmolLM2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_FAMILIES: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of exactly 512 ids: 3 special tokens, 256 bytes, 253 two-letter merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = ["Ġ", *"etaoinshrdlucmw"]
    merges = [(a, b) for a in letters for b in letters if b != "Ġ"]
    merges += [(a, b) for a in "ETAOINSH" for b in letters if b != "Ġ"]
    merges = merges[: VOCAB_SIZE - len(SPECIAL_TOKENS) - len(alphabet)]
    tokens = [*SPECIAL_TOKENS, *alphabet, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def make_tiny_model(directory: Path, family: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny model of `family` (llama, mistral, qwen2, qwen3) to `directory` and return it.

    Defaults: vocabulary 512, hidden 64, 3 layers, 4 query and 2 KV heads of 16, MLP 128, 512 positions, tied embedding,
    fp32. `overrides` are fields of the family's transformers config (num_hidden_layers=2, sliding_window=8, ...). A
    directory that is already complete is reused as it is. The same arguments give the same weights, bit for bit.
    """
    directory = Path(directory)
    if (directory / "model.safetensors").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": EOS_TOKEN_ID,
    }
    fields.update(overrides)
    config = _FAMILIES[family](**fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):  # ones would hide a norm that is left out
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                elif name.endswith("bias"):
                    parameter.normal_(0.0, 0.1)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "model_max_length": fields["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    model.save_pretrained(directory)  # last: model.safetensors marks a complete directory
    return directory


def load_reference(directory: Path) -> PreTrainedModel:
    """transformers' own model of `directory`, fp32, for comparison."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


@torch.inference_mode()
def greedy_reference(model: PreTrainedModel, prompt: list[int], num_tokens: int, ignore_eos: bool = True) -> list[int]:
    """The next `num_tokens` greedy tokens of `prompt` by transformers' generate; with `ignore_eos`, past the end
    token.
    """
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=None if ignore_eos else EOS_TOKEN_ID,
        pad_token_id=EOS_TOKEN_ID,
    )
    ids = torch.tensor([prompt])
    generate: Any = model.generate
    output = generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return [int(token) for token in output[0, len(prompt) :]]
