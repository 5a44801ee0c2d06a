"""Which commands does `outrider` have?

Heavy imports wait for the command that needs them: `outrider version` must answer at once.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from gateway.stack.settings import ServiceSpec, StackSettings

ResultT = TypeVar("ResultT")

INTERRUPTED = 130
DEFAULT_CONFIG = Path("configs/quickstart.yaml")
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app = typer.Typer(
    name="outrider",
    help="Speculative decoding split into a target, a drafter and a gateway.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigArgument = Annotated[Path, typer.Argument(help="Config file (YAML) of target, drafter and gateway.")]


def main() -> None:
    """Entry point of the `outrider` script."""
    for stream in (sys.stdin, sys.stdout):  # models say, and people type, what a terminal may have no code for
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        print(_version())
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Speculative decoding split into a target, a drafter and a gateway."""


@app.command()
def version() -> None:
    """Print the version."""
    print(_version())


@app.command()
def up(config: ConfigArgument) -> None:
    """Run target, drafter and gateway until Ctrl-C; restart what dies."""
    from rich.console import Console

    console = Console()
    _run(_up(config, console), console, interrupted=0)  # a signal is the only way to end it, and no fault


@app.command()
def quickstart(
    config: ConfigArgument = DEFAULT_CONFIG,
    question: Annotated[str | None, typer.Option(help="What to ask.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Longest answer.")] = None,
) -> None:
    """Start everything on free ports, ask one question with drafts and without, compare, stop everything."""
    from rich.console import Console

    from gateway import quickstart as show

    console = Console()
    work = show.run_quickstart(config, question or show.QUESTION, max_tokens or show.MAX_TOKENS, console)
    result = _run(work, console)
    print(show.json_line(result), flush=True)
    if not result["identical"]:
        raise typer.Exit(1)


@app.command()
def chat(
    message: Annotated[list[str] | None, typer.Argument(help="One question; without it, a conversation.")] = None,
    url: Annotated[str, typer.Option(help="Where the gateway is.")] = "http://127.0.0.1:8000",
    draft_len: Annotated[int | None, typer.Option(min=0, help="Tokens drafted a step; 0: none.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 0.0,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
) -> None:
    """Talk to a running stack; accepted draft tokens are coloured."""
    from rich.console import Console

    from gateway.conversation import Conversation, converse

    console = Console(highlight=False)
    conversation = Conversation(url, None if system is None else _text(system), draft_len, max_tokens, temperature)
    work = converse(conversation, _text(" ".join(message)) if message else None, console)
    _run(work, console, on_interrupt=conversation.interrupt)


def _text(argument: str) -> str:
    """An argument as text: bytes that were no UTF-8 are replaced, as those that are typed."""
    return os.fsencode(argument).decode("utf-8", "replace")


@app.command("train-drafter", context_settings=PASS_ON)
def train_drafter(context: typer.Context) -> None:
    """Train an EAGLE-3 head for a model: `python -m drafter_service.training train`, see its --help."""
    _become("drafter_service.training", ["train", *context.args])


@app.command("eval-drafter", context_settings=PASS_ON)
def eval_drafter(context: typer.Context) -> None:
    """Measure a drafter's acceptance: `python -m drafter_service.training eval`, see its --help."""
    _become("drafter_service.training", ["eval", *context.args])


def _become(module: str, arguments: list[str]) -> NoReturn:
    """Run a module that needs torch, which this process never loads. In our foreground group: Ctrl-C reaches it."""
    process = subprocess.Popen([sys.executable, "-m", module, *arguments])
    while True:
        try:
            raise typer.Exit(process.wait())
        except KeyboardInterrupt:
            continue  # it was told too, and ends in its own way


async def _up(config: Path, console: Console) -> None:
    from gateway.stack.checking import check_sections
    from gateway.stack.model import fetch_model
    from gateway.stack.mps import shared_gpu
    from gateway.stack.settings import check_ports, load_settings, services

    settings = load_settings(config)
    check_ports(settings)
    await check_sections(settings)
    directory = await fetch_model(settings.model)
    async with shared_gpu(settings, partial(console.print, highlight=False, markup=False)) as gpu_environment:
        await _run_stack(settings, services(settings, directory, gpu_environment), console)


async def _run_stack(settings: StackSettings, specs: Sequence[ServiceSpec], console: Console) -> None:
    from gateway.stack.console import LogPrinter, StartView
    from gateway.stack.settings import url
    from gateway.supervisor import ServiceState, Supervisor

    printer, view = LogPrinter(console), StartView(console, [spec.name for spec in specs])

    def on_line(name: str, line: str) -> None:
        printer(name, line)
        view.on_line(name, line)

    def on_state(name: str, state: ServiceState, detail: str) -> None:
        view.on_state(name, state, detail)
        if state is ServiceState.RESTARTING:
            printer(name, f"died: {detail}")

    async with Supervisor(specs, on_line, on_state) as supervisor:
        with view:
            await supervisor.wait_ready()
        rest = url(settings.rest)
        for line in (
            f"Serving {settings.model}",
            f"  OpenAI API  {rest}/v1    docs {rest}/docs    metrics {rest}/metrics",
            f"  gRPC        {settings.grpc}",
            "Ctrl-C stops everything.",
        ):
            console.print(line, soft_wrap=True, markup=False, highlight=False)
        try:
            await supervisor.run()
        finally:
            console.print("Stopping", highlight=False)


def _run(
    work: Coroutine[Any, Any, ResultT],
    console: Console,
    interrupted: int = INTERRUPTED,
    on_interrupt: Callable[[], bool] = lambda: False,
) -> ResultT:
    """Run a command; what a person can put right becomes one line and an exit status.

    interrupted: the exit status after a signal. on_interrupt: called on Ctrl-C; True: that was all it was for.
    """
    from gateway.chat_client import AnswerFailed, ClientMissing
    from gateway.errors import ConfigError
    from gateway.quickstart import Silent
    from gateway.supervisor import StartFailed

    try:
        return asyncio.run(_until_signal(work, on_interrupt))
    except (ConfigError, StartFailed, AnswerFailed, ClientMissing, Silent) as error:
        console.print(f"outrider: {error}", style="red", soft_wrap=True, markup=False, highlight=False)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise typer.Exit(interrupted) from None


async def _until_signal(work: Coroutine[Any, Any, ResultT], on_interrupt: Callable[[], bool]) -> ResultT:
    """Run `work`, cancelled by SIGINT, SIGTERM or SIGHUP; a second one kills the services through our own end."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    asked = False

    def on_signal(number: signal.Signals) -> None:
        nonlocal asked
        if number == signal.SIGINT and on_interrupt():
            return
        if asked:  # on a leash, they end with us
            os._exit(INTERRUPTED)
        asked = True
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal, number)
    return await task


def _version() -> str:
    try:
        return importlib.metadata.version("outrider")
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return "0.0.0+uninstalled"


if __name__ == "__main__":
    main()
