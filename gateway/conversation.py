"""How does `outrider chat` talk: one question, or a conversation?"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from gateway.chat_client import Answer, AnswerFailed, ask, connect, served_model
from gateway.stack.console import legend, print_span

if TYPE_CHECKING:
    import openai
    from openai.types.chat import ChatCompletionMessageParam

MIN_TOKENS_FOR_SPEED = (
    16  # a short answer may arrive as one packet: no time passes between its first token and its last
)


@dataclass(slots=True)
class Conversation:
    """Where to ask, how, and what was said so far."""

    url: str
    system: str | None
    draft_len: int | None
    max_tokens: int | None
    temperature: float
    messages: list[ChatCompletionMessageParam] = field(default_factory=list)
    answering: asyncio.Task[None] | None = None

    def interrupt(self) -> bool:
        """Ctrl-C: stop the answer that comes in, False where none does."""
        return self.answering is not None and self.answering.cancel()


async def converse(conversation: Conversation, question: str | None, console: Console) -> None:
    """Answer `question`, or what is typed until the end of input. Raises AnswerFailed, ClientMissing."""
    async with connect(conversation.url) as client:
        model = await served_model(client)
        if conversation.system is not None:
            conversation.messages.append({"role": "system", "content": conversation.system})
        if question is not None:
            await _turn(conversation, question, client, model, console)
            return
        console.print(
            Text.assemble(
                ("outrider chat", "bold"),
                f" with {model}   ",
                legend(),
                ("   Ctrl-C stops an answer, Ctrl-D ends", "dim"),
            )
        )
        while (line := await _read_line(console)) is not None:
            if not line.strip():
                continue
            conversation.answering = asyncio.create_task(_turn(conversation, line, client, model, console))
            try:
                await conversation.answering
            except AnswerFailed as error:  # the conversation goes on without this turn
                conversation.messages.pop()
                console.print(Text(str(error), style="red"))
            except asyncio.CancelledError:
                if (ours := asyncio.current_task()) is not None and ours.cancelling():
                    raise
                conversation.messages.pop()
                console.print(Text("\nstopped; this turn is forgotten", style="dim"))
            finally:
                conversation.answering = None


async def _turn(
    conversation: Conversation, question: str, client: openai.AsyncOpenAI, model: str, console: Console
) -> None:
    conversation.messages.append({"role": "user", "content": question})
    answer = await ask(
        client,
        model,
        conversation.messages,
        lambda text, from_draft: print_span(console, text, from_draft),
        max_tokens=conversation.max_tokens,
        temperature=conversation.temperature,
        draft_len=conversation.draft_len,
    )
    console.print()
    conversation.messages.append({"role": "assistant", "content": answer.text})
    console.print(Text(_figures(answer), style="dim"))


def _figures(answer: Answer) -> str:
    accepted = sum(answer.from_draft)
    figures = f"{len(answer.token_ids)} tokens, {accepted} of them drafted, {answer.mean_accepted_len:.2f} a step"
    if len(answer.token_ids) < MIN_TOKENS_FOR_SPEED:
        return figures
    return f"{figures}, {answer.tokens_per_second:.1f} tokens/s"


async def _read_line(console: Console) -> str | None:
    """One line from the keyboard, None at the end of input."""
    if not sys.stdin.isatty():
        return await asyncio.to_thread(_input, console)
    # Nothing wakes a thread that waits for a key: after Ctrl-C nobody may have to wait for it to end.
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str | None] = loop.create_future()

    def read() -> None:
        text = _input(console)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_hand_over, line, text)

    threading.Thread(target=read, name="keyboard", daemon=True).start()
    try:
        return await line
    except asyncio.CancelledError:
        console.print()
        raise


def _hand_over(line: asyncio.Future[str | None], text: str | None) -> None:
    if not line.done():
        line.set_result(text)


def _input(console: Console) -> str | None:
    try:
        return console.input("[bold]> [/bold]")
    except EOFError:
        console.print()
        return None
