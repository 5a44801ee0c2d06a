"""What does a first run show? A real model, three processes, one question answered with drafts and without.

Both answers go through the public API, after one warm-up of each kind, with the same prompt; speeds are decode speeds
(tokens after the first commit over the time from the first commit to the last), so that neither the prompt nor the
start counts.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import urllib.request
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from gateway.chat_client import Answer, ask, connect, served_model
from gateway.stack.checking import check_sections
from gateway.stack.console import LogFiles, StartView, legend, print_span
from gateway.stack.model import fetch_model
from gateway.stack.mps import shared_gpu
from gateway.stack.settings import load_settings, services, url, with_free_ports
from gateway.supervisor import StartFailed, Supervisor

if TYPE_CHECKING:
    import openai

QUESTION = "Write a Python function that returns the n-th Fibonacci number, then explain it line by line."
MAX_TOKENS = 128
WARM_UP_TOKENS = 12
DRAFTER_DEADLINE_S = 30.0
DRAFTER_POLL_S = 0.1
HEALTH_TIMEOUT_S = 5.0


class Silent(Exception):
    """The stack started, but the drafter was not bound in time; the message is for a person."""


async def run_quickstart(config: Path, question: str, max_tokens: int, console: Console) -> dict[str, Any]:
    """Everything between the command and its JSON line, which is returned. All services are stopped by then.

    Raises ConfigError, StartFailed (after its log was shown), AnswerFailed or Silent.
    """
    settings = load_settings(config)
    await check_sections(settings)
    _heading(console, 1, f"Model {settings.model}")
    directory = await fetch_model(settings.model)
    console.print(f"  ✓ {directory}", highlight=False)
    with tempfile.TemporaryDirectory(prefix="outrider-quickstart-") as scratch:
        settings = with_free_ports(settings, Path(scratch) / "stack.yaml")
        _heading(console, 2, "Target, drafter and gateway, three processes on free ports")
        files = LogFiles(Path(scratch))

        def on_line(name: str, line: str) -> None:
            files(name, line)
            view.on_line(name, line)

        async with AsyncExitStack() as running:
            gpu_environment = await running.enter_async_context(shared_gpu(settings, partial(_note, console)))
            specs = services(settings, directory, gpu_environment)
            view = StartView(console, [spec.name for spec in specs])
            supervisor = await running.enter_async_context(Supervisor(specs, on_line, view.on_state))
            client = await running.enter_async_context(connect(url(settings.rest)))
            try:
                with view:
                    await supervisor.wait_ready()
                if settings.drafter is not None:
                    await _wait_drafter(url(settings.rest))
                result = await _while_running(
                    supervisor, _compare(client, question, max_tokens, settings.drafter is not None, console)
                )
            except StartFailed as error:
                show_last_lines(console, error)
                raise
            with console.status("Stopping the services"):
                await supervisor.stop()
    return result


def _note(console: Console, line: str) -> None:
    console.print(f"  {line}", highlight=False, markup=False)


def show_last_lines(console: Console, error: StartFailed) -> None:
    """What a service that failed printed last."""
    for line in error.last_lines:
        console.print(Text.assemble((f"{error.name} │ ", "red"), Text.from_ansi(line)), soft_wrap=True)


async def _while_running(supervisor: Supervisor, work: Any) -> dict[str, Any]:
    """The result of `work`, unless a service fails for good meanwhile."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(supervisor.run())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            watcher.result()
        result: dict[str, Any] = await task
        return result
    finally:
        for future in (task, watcher):
            future.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _wait_drafter(rest: str) -> None:
    """Until the gateway at the URL `rest` says that the drafter is bound. Raises Silent."""
    try:
        async with asyncio.timeout(DRAFTER_DEADLINE_S):
            # The gateway has no event for it that reaches here; /health is asked until it says so.
            while not await asyncio.to_thread(_drafter_serving, rest):  # noqa: ASYNC110
                await asyncio.sleep(DRAFTER_POLL_S)
    except TimeoutError:
        raise Silent(f"the drafter was not bound to the target within {DRAFTER_DEADLINE_S:.0f} s") from None


def _drafter_serving(rest: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{rest}/health", timeout=HEALTH_TIMEOUT_S) as answer:
            report = json.load(answer)
    except (OSError, ValueError):  # 503 among them
        return False
    return any(entry["role"] == "drafter" and entry["state"] == "serving" for entry in report["services"])


async def _compare(
    client: openai.AsyncOpenAI, question: str, max_tokens: int, drafting: bool, console: Console
) -> dict[str, Any]:
    """drafting: whether there is a drafter. Without one the target is asked twice, and no speeds are compared."""
    model = await served_model(client)

    async def answer(draft_len: int | None, length: int, on_span: Callable[[str, bool], None]) -> Answer:
        return await ask(
            client,
            model,
            [{"role": "user", "content": question}],
            on_span,
            max_tokens=length,
            temperature=0.0,
            draft_len=draft_len,
        )

    with console.status("Warming up, with drafts and without" if drafting else "Warming up"):
        for draft_len in (None, 0):
            await answer(draft_len, WARM_UP_TOKENS, lambda *_: None)
    if drafting:
        _heading(console, 3, "The question, with drafts", legend())
    else:
        _heading(console, 3, "The question, to the target alone: this config has no drafter")
    console.print(Text(question, style="bold"))
    drafted = await answer(None, max_tokens, lambda text, draft: print_span(console, text, draft))
    console.print("\n")
    _heading(console, 4, "The same request with draft_len 0" if drafting else "The same request again")
    columns = (SpinnerColumn(), TextColumn("target alone"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(drafted.token_ids))
        plain = await answer(0, max_tokens, lambda *_: progress.advance(task))
    result = summary(drafted, plain)
    console.print(comparison(drafted, plain, result["identical"], drafting))
    return result


def summary(drafted: Answer, plain: Answer) -> dict[str, Any]:
    """The JSON line."""
    speed, speed_plain = drafted.tokens_per_second, plain.tokens_per_second
    return {
        "text": drafted.text,
        "identical": drafted.token_ids == plain.token_ids and drafted.text == plain.text,
        "tokens": len(drafted.token_ids),
        "mean_accepted_len": round(drafted.mean_accepted_len, 3),
        "tok_s": round(speed, 2),
        "tok_s_no_draft": round(speed_plain, 2),
        "speedup": round(speed / speed_plain, 3) if speed_plain else None,
    }


def json_line(result: dict[str, Any]) -> str:
    """The result on one line."""
    return json.dumps(result, ensure_ascii=False)


def comparison(drafted: Answer, plain: Answer, identical: bool, drafting: bool) -> Table:
    """The table for people. drafting: whether there was a drafter; else there is nothing to compare."""
    table = Table(box=box.SIMPLE_HEAD, caption_justify="left")
    for name in ("", "tokens", "steps", "tokens/step", "drafted", "accepted", "tokens/s"):
        table.add_column(name, justify="left" if not name else "right")
    names = ("with drafts", "draft_len 0") if drafting else ("target alone", "again")
    for name, answer in zip(names, (drafted, plain), strict=True):
        usage = answer.usage.get("outrider", {})
        table.add_row(
            name,
            str(len(answer.token_ids)),
            str(len(answer.commit_lens)),
            f"{answer.mean_accepted_len:.2f}",
            str(usage.get("drafted_tokens", "")),
            str(usage.get("accepted_tokens", "")),
            f"{answer.tokens_per_second:.1f}",
        )
    ratio = drafted.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0
    same = "the same tokens" if identical else "DIFFERENT TOKENS"
    speed = f"{ratio:.2f} x the speed" if drafting else "no drafter, no speed-up"
    table.caption = Text(f"  {speed}, {same}", style="bold green" if identical else "bold red")
    return table


def _heading(console: Console, number: int, text: str, note: Text | None = None) -> None:
    line = Text.assemble((f"{number}/4 ", "bold cyan"), (text, "bold"))
    if note is not None:
        line = Text.assemble(line, "   ", note)
    console.print(line)
