"""Which model does the HTTP API speak for, and how does a prompt become its token ids?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.errors import InvalidGeneration
from gateway.text.chat_template import ChatTemplate
from gateway.text.errors import TemplateRefusal, TextError
from gateway.text.tokenizer import Tokenizer

INLINE_CHARACTERS = 8192  # shorter texts are encoded on the event loop: a thread would cost more than the work


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model behind this gateway.

    name: as requests call it. created: Unix seconds. vocab_size: token ids are below it. max_model_len: tokens of
    prompt and output together that the model was made for, None where its config does not say.
    """

    name: str
    created: int
    vocab_size: int
    max_model_len: int | None
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None

    @classmethod
    def from_directory(cls, directory: Path, name: str) -> ServedModel:
        """Read tokenizer, chat template and sizes of a Hugging Face directory. Raises TextError naming the file."""
        path = directory / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            created = int(path.stat().st_mtime)
        except (OSError, ValueError) as error:
            raise TextError(f"{path}: cannot be read: {error}") from error
        tokenizer = Tokenizer.from_directory(directory)
        sizes = {key: config.get(key) for key in ("vocab_size", "max_position_embeddings")}
        return cls(
            name,
            created,
            _size(sizes["vocab_size"]) or tokenizer.vocab_size,
            _size(sizes["max_position_embeddings"]),
            tokenizer,
            ChatTemplate.from_directory(directory),
        )

    def check_token_ids(self, token_ids: Sequence[int], path: str) -> None:
        """Raises InvalidGeneration naming the first id that the model does not have. path: of the list."""
        if max(token_ids, default=0) >= self.vocab_size:
            index = next(index for index, token_id in enumerate(token_ids) if token_id >= self.vocab_size)
            field = f"{path}[{index}]"
            raise InvalidGeneration(field, f"{token_ids[index]} is not below the vocabulary's size, {self.vocab_size}")

    async def encode(self, text: str, field: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of a prompt. Raises InvalidGeneration naming `field` where there are none, or surely too many."""
        tokenizer = self.tokenizer
        if self.max_model_len is not None and len(text) > self.max_model_len * max(1, tokenizer.longest_token):
            raise InvalidGeneration(
                field, f"its {len(text)} characters cannot fit in the model's {self.max_model_len} tokens"
            )
        if len(text) <= INLINE_CHARACTERS:
            token_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            token_ids = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)
        if not token_ids:
            raise InvalidGeneration(field, "must not be empty")
        return tuple(token_ids)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None, field: str = "messages"
    ) -> tuple[int, ...]:
        """Token ids of a conversation. Raises InvalidGeneration naming `field`."""
        template = self.chat_template
        if template is None:
            raise InvalidGeneration(field, f"the model {self.name} has no chat template; use plain prompts")
        try:
            size = sum(len(message["content"]) for message in messages)
            if size <= INLINE_CHARACTERS:
                text = template.render(messages, variables=variables)
            else:
                text = await asyncio.to_thread(template.render, messages, variables=variables)
        except TemplateRefusal as error:
            raise InvalidGeneration(field, str(error)) from error
        return await self.encode(text, field, add_special_tokens=False)


def _size(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
