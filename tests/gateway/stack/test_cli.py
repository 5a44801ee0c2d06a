"""The commands themselves: what they print, and with which exit status they end."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from gateway.cli import app
from gateway.errors import ConfigError
from gateway.stack.checking import check_sections
from gateway.stack.console import LogFiles, LogPrinter, StartView
from gateway.stack.settings import load_settings
from gateway.supervisor import ServiceState
from tests.gateway.rest import fakes
from tests.gateway.rest.test_server import serving
from tests.gateway.text import tiny_tokenizers
from tests.ports import ReservedPort
from tests.processes import ROOT, ProcessGroup


def outrider(processes: ProcessGroup, *arguments: str) -> tuple[int, str]:
    process = processes.python("-m", "gateway.cli", *arguments)
    return process.wait(), process.output


def test_version(processes: ProcessGroup) -> None:
    try:
        expected = metadata.version("outrider")
    except metadata.PackageNotFoundError:
        expected = "0.0.0+uninstalled"
    assert outrider(processes, "version") == (0, f"{expected}\n")
    assert outrider(processes, "--version") == (0, f"{expected}\n")


@pytest.mark.parametrize("command", ["up", "quickstart"])
def test_a_bad_config_is_one_line_naming_the_key(processes: ProcessGroup, tmp_path: Path, command: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump({"model": "m", "target": {"listen": "nowhere"}, "gateway": {}}))
    assert outrider(processes, command, str(path)) == (
        2,
        "outrider: target.listen: must be HOST:PORT, got 'nowhere'\n",
    )


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"target": {"block_size": 12}}, "target.block_size: must be a power of two (got 12)"),
        ({"target": {"accept": "often"}}, "target.accept: must be exact or synthetic:<mean> (got 'often')"),
        ({"drafter": {"methud": "ngram"}}, "drafter.methud: unknown key; allowed are "),
        ({"drafter": {"ngram": {"min_n": 0}}}, "drafter.ngram.min_n: Input should be greater than or equal to 1"),
        ({"drafter": {"method": "eagle3"}}, "drafter.checkpoint: method eagle3 needs a checkpoint, or "),
        ({"target": {"num_seats": 0}, "drafter": {"num_seats": 0}}, "target.num_seats: "),
        ({"gateway": {"depth": 5}}, "gateway.depth: "),
    ],
)
def test_a_wrong_value_in_any_section_is_found_before_anything_is_started(
    processes: ProcessGroup, tmp_path: Path, reserve_port: type[ReservedPort], sections: dict[str, Any], said: str
) -> None:
    """Before the model is looked for, too: there is none."""
    ports = [reserve_port().address for _ in range(4)]
    content = {
        "model": str(tmp_path / "none"),
        "target": {"listen": ports[0], **sections.get("target", {})},
        "drafter": {"listen": ports[1], **sections.get("drafter", {})},
        "gateway": {
            "rest": ports[2],
            "grpc": ports[3],
            "target": ports[0],
            "drafter": ports[1],
            **sections.get("gateway", {}),
        },
    }
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(content))
    for command in ("up", "quickstart") if "accept" in said else ("up",):
        status, output = outrider(processes, command, str(path))
        assert (status, output[: len(f"outrider: {said}")], output.count("\n")) == (2, f"outrider: {said}", 1)


async def test_a_check_that_cannot_be_made_is_left_to_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the checker itself is broken: the service's own start says more."""
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump({"model": "m", "target": {"block_size": 12}, "gateway": {}}))
    settings = load_settings(path)
    with pytest.raises(ConfigError, match=r"^target\.block_size: must be"):
        await check_sections(settings)
    with monkeypatch.context() as patched:
        patched.setattr("gateway.stack.checking.DEADLINE_S", 0.0)
        await check_sections(settings)
    with monkeypatch.context() as patched:
        patched.setenv("PYTHONHASHSEED", "no number: no interpreter starts")
        await check_sections(settings)


def test_a_model_that_is_not_there_names_the_key(processes: ProcessGroup, tmp_path: Path) -> None:
    path = tmp_path / "missing.yaml"
    path.write_text(yaml.safe_dump({"model": str(tmp_path / "none"), "gateway": {"target": "127.0.0.1:25051"}}))
    status, output = outrider(processes, "quickstart", str(path))
    assert status == 2
    assert output.splitlines()[-1].startswith("outrider: model: ")


def test_chat_without_a_gateway_says_where_it_looked(processes: ProcessGroup, free_port: int) -> None:
    status, output = outrider(processes, "chat", "hi", "--url", f"http://127.0.0.1:{free_port}")
    assert status == 1
    assert output.startswith(f"outrider: http://127.0.0.1:{free_port}/v1/: Connection error")
    assert len(output.splitlines()) == 1


@pytest.mark.parametrize("url", ["http://[::bad", "http://h:notaport", "nonsense"])
def test_chat_with_what_is_no_url_is_one_line(processes: ProcessGroup, url: str) -> None:
    status, output = outrider(processes, "chat", "hi", "--url", url)
    assert status == 1
    assert output.startswith(f"outrider: {url}: is not a URL")
    assert len(output.splitlines()) == 1


@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
@pytest.mark.parametrize("typed", [True, False])
async def test_chat_takes_bytes_that_are_no_text(locale: str, typed: bool) -> None:
    dispatcher = fakes.FakeDispatcher(tiny_tokenizers.byte_level())
    said = b"caf\xe9"
    async with serving(dispatcher) as url:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "gateway.cli", "chat", "--url", url),
            *([] if typed else [said]),
            cwd=ROOT,
            env={**os.environ, "LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONIOENCODING": ""},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(process.communicate(said + b"\n" if typed else b""), 60)
    assert process.returncode == 0, output
    assert "caf\ufffd" in dispatcher.tokenizer.decode(dispatcher.submitted[0].token_ids)


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are for POSIX")
async def test_ctrl_c_at_the_prompt_ends_chat_without_another_key() -> None:
    import pty

    async with serving(fakes.FakeDispatcher(tiny_tokenizers.byte_level())) as url:
        ours, theirs = pty.openpty()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gateway.cli", "chat", "--url", url),
                cwd=ROOT,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
            )
            seen = b""
            while b"> " not in seen:
                seen += await asyncio.wait_for(asyncio.to_thread(os.read, ours, 4096), 60)
            process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.wait(), 60) == 130
        finally:
            os.close(theirs)
            os.close(ours)


def test_no_command_loads_torch(processes: ProcessGroup) -> None:
    code = (
        "import sys, gateway.cli, gateway.quickstart, gateway.conversation, gateway.stack.console\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    process = processes.python("-c", code)
    assert (process.wait(), process.output) == (0, "")


def test_every_config_in_the_tree_is_taken_by_all_three_services() -> None:
    from drafter_service.config import DrafterConfig
    from engine.config_file import load_section
    from gateway.config import load_config
    from target_service.config import TargetConfig

    paths = sorted((ROOT / "configs").glob("*.yaml"))
    assert ROOT / "configs" / "quickstart.yaml" in paths
    for path in paths:
        settings = load_settings(path)
        assert load_section(path, "target", TargetConfig).listen == settings.target
        assert load_section(path, "drafter", DrafterConfig).listen in (settings.drafter, "127.0.0.1:25052")
        loaded = load_config(path)
        assert (loaded.gateway.rest, loaded.gateway.grpc) == (settings.rest, settings.grpc)


def test_log_lines_are_prefixed_whole_and_unread() -> None:
    output = io.StringIO()
    printer = LogPrinter(Console(file=output, width=20, force_terminal=True, color_system="standard"))
    printer("target", "[bold]not markup[/bold] " + "x" * 40)
    printer("gateway", "\x1b[31mred\x1b[0m")
    first, second = output.getvalue().splitlines()
    assert first == "\x1b[36m target │ \x1b[0m[bold]not markup[/bold] " + "x" * 40
    assert second == "\x1b[34mgateway │ \x1b[0m\x1b[31mred\x1b[0m"


def test_without_a_terminal_the_start_is_told_line_by_line() -> None:
    output = io.StringIO()
    with StartView(Console(file=output, width=80), ["target", "drafter"]) as view:
        view.on_line("target", "2026-01-01 10:00:00,123 INFO engine: loading")
        view.on_state("drafter", ServiceState.STARTING, "")
        view.on_state("drafter", ServiceState.READY, "")
        view.on_state("drafter", ServiceState.READY, "")
    (line,) = output.getvalue().splitlines()
    assert line.startswith("  ✓ drafter ready after 0.")


def test_on_a_terminal_the_start_shows_what_is_said_last() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    view = StartView(console, ["target", "drafter"])
    view.on_line("target", "2026-01-01 10:00:00,123 INFO engine: loading")
    view.on_line("target", "   ")
    view.on_state("drafter", ServiceState.READY, "")
    with console.capture() as captured:
        console.print(view)
    target, drafter = captured.get().splitlines()
    assert "engine: loading" in target
    assert "2026" not in target
    assert "ready" in drafter


def test_log_files_hold_each_services_lines(tmp_path: Path) -> None:
    files = LogFiles(tmp_path)
    files("target", "one")
    files("target", "two \U0001f642")
    assert (tmp_path / "target.log").read_text(encoding="utf-8") == "one\ntwo \U0001f642\n"


@pytest.mark.skipif(sys.platform == "win32", reason="Makefiles are for POSIX shells")
def test_the_makefile_names_what_the_readme_promises() -> None:
    text = (ROOT / "Makefile").read_text()
    for command in ("quickstart", "test", "serve", "bench", "lint", "clean"):
        assert f"\n{command}:" in text


@pytest.mark.parametrize(("command", "subcommand"), [("train-drafter", "train"), ("eval-drafter", "eval")])
def test_training_is_a_process_of_its_own_and_gets_every_argument(
    monkeypatch: pytest.MonkeyPatch, command: str, subcommand: str
) -> None:
    started: list[list[str]] = []
    real = subprocess.Popen

    def start(argv: list[str]) -> subprocess.Popen[bytes]:
        started.append(argv)
        return real([sys.executable, "-S", "-c", "raise SystemExit(3)"])

    monkeypatch.setattr("gateway.cli.subprocess.Popen", start)
    result = CliRunner().invoke(app, [command, "--model", "dir", "--help", "file"])
    assert result.exit_code == 3
    module = ["-m", "drafter_service.training", subcommand]
    assert started == [[sys.executable, *module, "--model", "dir", "--help", "file"]]
