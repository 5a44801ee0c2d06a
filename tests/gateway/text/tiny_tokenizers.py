"""Small tokenizers of each family, made on the spot."""

from __future__ import annotations

import functools

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from gateway.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "hello world, hello there",
    "naïve café 中文 日本 🙂🙂 👩‍👩‍👧",
] * 4


@functools.cache
def byte_level_json() -> str:
    """GPT-2 style: all 256 bytes, a few merges (some of them end inside a character), ChatML's special tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return str(backend.to_str())


def byte_level() -> Tokenizer:
    return Tokenizer.from_json(byte_level_json())


def sentencepiece() -> Tokenizer:
    """Llama 2 style: U+2581 for a space, byte tokens for what has no piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "c", "▁a", "▁b", "ab", "▁ab", "中", "é"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer.from_json(backend.to_str())


def wordpiece() -> Tokenizer:
    """A family that only decodes whole sequences: `##` joins a piece to the one before."""
    vocab = {piece: index for index, piece in enumerate(["[UNK]", "play", "##ing", "##ed", "we", ",", "中"])}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return Tokenizer.from_json(backend.to_str())
