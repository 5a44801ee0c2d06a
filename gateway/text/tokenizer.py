"""Which token ids does a text have, and which bytes does a token id stand for?

A thin reading of a model directory's `tokenizer.json` through the `tokenizers` library. Beside encoding it tells how
this tokenizer turns tokens into text, because incremental decoding needs bytes and not text: a character may be spread
over several tokens. Three families exist:

- byte level (GPT-2, Llama 3, Qwen, SmolLM): each character of a token's name stands for one byte;
- sentencepiece (Llama 2, Mistral): a name is text with U+2581 for a space, `<0xNN>` is one byte;
- anything else: only whole sequences decode, so `token_bytes` is an approximation there and text is decoded in a
  window.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import tokenizers

from gateway.text.errors import TextError

SPACE_MARK = "\u2581"


class TokenFamily(Enum):
    """How the names of tokens stand for text."""

    BYTE_LEVEL = "byte_level"
    SENTENCEPIECE = "sentencepiece"
    OTHER = "other"


class Tokenizer:
    """A model's tokenizer. Immutable after loading; safe to share between tasks and threads."""

    def __init__(self, backend: tokenizers.Tokenizer, family: TokenFamily, special_ids: frozenset[int]) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_ids = special_ids
        self._added = {token_id: str(token.content) for token_id, token in backend.get_added_tokens_decoder().items()}
        vocab = backend.get_vocab(with_added_tokens=True)
        self.family = family
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.longest_token = max((len(name) for name in vocab), default=1)

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Read `directory/tokenizer.json`. Raises TextError naming the file."""
        path = directory / "tokenizer.json"
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TextError(f"{path}: cannot be read: {error}") from error
        return cls.from_json(content, str(path))

    @classmethod
    def from_json(cls, content: str, name: str = "tokenizer.json") -> Tokenizer:
        """Build from the text of a `tokenizer.json`. Raises TextError, its message starting with `name`."""
        try:
            backend = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises bare Exception for every fault of a file
            raise TextError(f"{name}: is not a tokenizer: {error}") from error
        description: dict[str, Any] = json.loads(content)
        special = frozenset(token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special)
        return cls(backend, _family(description.get("decoder")), special)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; names of special tokens inside it become those tokens.

        add_special_tokens: put what the model wants around a plain text (a begin token, for some families).
        """
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence, special tokens left out, U+FFFD where its bytes are not UTF-8."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=True)
        return text

    def is_special(self, token_id: int) -> bool:
        """Whether the token marks structure and never shows as text."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; a special token's name; empty for an id without a token."""
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        name = self._backend.id_to_token(token_id)
        if name is None:
            return b""
        if self.family is TokenFamily.BYTE_LEVEL:
            # A name with a character outside the alphabet stands for itself, as the library has it.
            values = [_BYTE_OF_CHARACTER.get(character) for character in name]
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else str(name).encode()
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            try:
                return bytes([int(name[3:5], 16)])
            except ValueError:
                return str(name).encode()
        return str(name).replace(SPACE_MARK, " ").encode()


def _family(decoder: Any) -> TokenFamily:
    kinds = set(_decoder_kinds(decoder))
    if kinds == {"ByteLevel"}:
        return TokenFamily.BYTE_LEVEL
    if kinds == {"Metaspace"} or (kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"} and "ByteFallback" in kinds):
        return TokenFamily.SENTENCEPIECE
    return TokenFamily.OTHER


def _decoder_kinds(decoder: Any) -> Iterable[str]:
    if not isinstance(decoder, dict):
        return
    if decoder.get("type") == "Sequence":
        for part in decoder.get("decoders", ()):
            yield from _decoder_kinds(part)
    else:
        yield str(decoder.get("type"))


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's table (Radford et al. 2019, `bytes_to_unicode`): printable bytes are themselves, the rest start at
    U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_level_alphabet()
