"""Which tokens stand around the turns of a conversation with this target?

Read off the model's own chat template by rendering sentinels, so any template works that puts the message's text into
the output as it is. A model without a template is a plain text model: one turn, opened by its begin-of-text token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engine.errors import ModelError

_USER, _ANSWER, _NEXT = "\u2042one\u2042", "\u2042two\u2042", "\u2042three\u2042"


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Token pieces of a conversation: opening, user text, to_answer, answer with its end token, to_user, user text, ...

    has_turns: False for a plain text model, whose pieces are the opening (maybe empty) and nothing else.
    """

    tokenizer: PreTrainedTokenizerBase
    has_turns: bool
    opening: tuple[int, ...]
    to_answer: tuple[int, ...]
    to_user: tuple[int, ...]

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of plain text; no special tokens are added."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def opening_with(self, system: str) -> tuple[int, ...]:
        """The opening under a system message of one's own; the plain opening where the template takes none."""
        if not self.has_turns or not system:
            return self.opening
        rendered = _render(self.tokenizer, [("system", system), ("user", _USER)])
        return self.encode(rendered.split(_USER)[0]) if _USER in rendered else self.opening

    def first_turn(self, text: str, system: str = "") -> tuple[int, ...]:
        """The prompt of a one-turn conversation, ready for the answer."""
        return (*self.opening_with(system), *self.encode(text), *self.to_answer)

    def later_turn(self, conversation: tuple[int, ...], text: str) -> tuple[int, ...]:
        """The prompt for one more answer after `conversation`, which ends with an answer, its end token included or
        not.
        """
        return (*self.after_answer(conversation), *self.encode(text), *self.to_answer)

    def after_answer(self, conversation: tuple[int, ...]) -> tuple[int, ...]:
        """`conversation` up to where the next user text begins."""
        glue = self.to_user
        if conversation and glue and conversation[-1] == glue[0]:
            glue = glue[1:]
        return (*conversation, *glue)


def load_chat_format(model: str | Path) -> ChatFormat:
    """The format of the model directory's tokenizer. ModelError if there is none, or its template changes the
    messages.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model))
    except (OSError, ValueError) as error:
        raise ModelError(f"{model}: no usable tokenizer: {str(error).splitlines()[0]}") from error
    if not tokenizer.chat_template:
        begin = tokenizer.bos_token_id
        return ChatFormat(tokenizer, False, () if begin is None else (int(begin),), (), ())
    rendered = _render(tokenizer, [("user", _USER), ("assistant", _ANSWER), ("user", _NEXT)])
    parts = rendered.split(_USER)
    if len(parts) != 2 or _ANSWER not in parts[1] or _NEXT not in parts[1]:
        raise ModelError(f"{model}: its chat template does not show the messages as they are")
    between, rest = parts[1].split(_ANSWER)
    to_user = rest.split(_NEXT)[0]

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    # What the template puts between a question and its answer may differ from the generation prompt; the latter counts.
    alone = _render(tokenizer, [("user", _USER)])
    opening, to_answer = alone.split(_USER)
    return ChatFormat(tokenizer, True, encode(opening), encode(to_answer or between), encode(to_user))


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[tuple[str, str]]) -> str:
    chat: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in messages]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=chat[-1]["role"] == "user", tokenize=False)
    return str(text)
