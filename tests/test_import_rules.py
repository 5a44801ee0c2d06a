"""Who may import whom: the table of the architecture as data, and every import in the tree held against it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from protos import generate

ROOT = Path(__file__).resolve().parent.parent

# Our packages -> which of our packages each may import (itself always).
MAY_IMPORT: dict[str, frozenset[str]] = {
    "protos": frozenset(),
    "kernels": frozenset(),
    "engine": frozenset({"kernels"}),
    "serving": frozenset({"engine"}),
    "target_service": frozenset({"protos", "engine", "kernels", "serving"}),
    "drafter_service": frozenset({"protos", "engine", "kernels", "serving"}),
    "gateway": frozenset({"protos"}),
}
# A file or folder -> what it may not import from outside, and why a reader would care.
FORBIDDEN_OUTSIDE: dict[str, frozenset[str]] = {
    "kernels": frozenset({"grpc", "google", "pydantic", "transformers"}),
    "kernels/layout.py": frozenset({"torch", "triton"}),
    "kernels/sharding.py": frozenset({"torch", "triton"}),
    "engine": frozenset({"grpc", "google"}),
    "serving": frozenset({"torch", "triton", "transformers"}),
    "gateway": frozenset({"torch", "transformers", "triton"}),
}
# The only files that touch generated messages (beside protos itself).
MESSAGE_FILES = frozenset({"servicer.py", "codec.py", "clients.py"})


def python_files(package: str) -> list[Path]:
    return [path for path in sorted((ROOT / package).rglob("*.py")) if "_pb2" not in path.name]


def imports_of(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of each module imported, wherever in the file; `from a import b` gives `a.b`."""
    parts = module.split(".")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                kept = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*kept, *([base] if base else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def tree_imports(package: str) -> Iterator[tuple[Path, int, str]]:
    for path in python_files(package):
        relative = path.relative_to(ROOT)
        is_package = path.name == "__init__.py"
        module = ".".join(relative.with_suffix("").parts[: -1 if is_package else None])
        for line, name in imports_of(path.read_text(), module, is_package):
            yield relative, line, name


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_packages_import_only_what_the_table_allows(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package}
    not_ours_to_use = (set(MAY_IMPORT) | {"tests", "benchmarks"}) - allowed
    broken = [
        f"{path}:{line}: {package} may not import {name}"
        for path, line, name in tree_imports(package)
        if name.split(".")[0] in not_ours_to_use
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("scope", sorted(FORBIDDEN_OUTSIDE))
def test_scopes_stay_clear_of_outside_libraries(scope: str) -> None:
    assert (ROOT / scope).exists(), f"{scope} is in the table but not in the tree"
    broken = [
        f"{path}:{line}: {scope} may not import {name}"
        for path, line, name in tree_imports(scope.split("/")[0])
        if (path == Path(scope) or Path(scope) in path.parents) and name.split(".")[0] in FORBIDDEN_OUTSIDE[scope]
    ]
    assert not broken, "\n".join(broken)


def test_only_the_edges_touch_generated_messages() -> None:
    broken = [
        f"{path}:{line}: imports {name}; only {', '.join(sorted(MESSAGE_FILES))} may"
        for package in sorted(set(MAY_IMPORT) - {"protos"})
        for path, line, name in tree_imports(package)
        if name.startswith("protos.") and path.name not in MESSAGE_FILES
    ]
    assert not broken, "\n".join(broken)


def test_the_walker_sees_every_form_of_import() -> None:
    """A rule that cannot see an import cannot hold: plain, from, relative, aliased, nested in a function."""
    source = (
        "import torch.nn as nn\n"
        "from engine import channel\n"
        "from . import sibling\n"
        "from .deep import thing\n"
        "from ..up import other\n"
        "def f():\n    import transformers\n"
    )
    assert [name for _, name in imports_of(source, "gateway.rest.app", is_package=False)] == [
        "torch.nn",
        "engine.channel",
        "gateway.rest.sibling",
        "gateway.rest.deep.thing",
        "gateway.up.other",
        "transformers",
    ]
    assert next(imports_of("from . import x", "gateway", is_package=True)) == (1, "gateway.x")


def test_gateway_modules_load_no_torch() -> None:
    """The walk above sees what files say; this sees what really gets loaded, libraries' own imports included."""
    modules = sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in python_files("gateway")
        if path.name not in ("__main__.py", "__init__.py")
    )
    code = (
        "import importlib, sys\n"
        f"for name in {['gateway', *modules]!r}:\n"
        "    importlib.import_module(name)\n"
        "    loaded = {'torch', 'transformers', 'engine', 'kernels'} & set(sys.modules)\n"
        "    assert not loaded, f'{name} loads {sorted(loaded)}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["kernels.layout", "target_service.config", "drafter_service.config"])
def test_what_must_come_up_at_once_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; assert not {{'torch', 'transformers', 'grpc'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def transformers_takes_our_kernels(installed_as: str | None, tmp_path: Path) -> bool:
    """What transformers makes of our `kernels`, in a process of its own, and that it loads and runs a model either way.

    installed_as: the version that outrider's installed metadata gives; None: a bare checkout, whatever is installed.
    """
    paths = [str(ROOT)]
    if installed_as is not None:
        info = tmp_path / f"outrider-{installed_as}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: outrider\nVersion: {installed_as}\n")
        (info / "top_level.txt").write_text("kernels\n")
        paths.insert(0, str(tmp_path))
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "import kernels\n"
        "assert kernels.__file__.startswith(sys.argv[1]), kernels.__file__\n"
        "from transformers.utils import is_kernels_available\n"
        "print('taken', is_kernels_available(), flush=True)\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,\n"
        "                             num_attention_heads=1, num_key_value_heads=1))\n"
        "print('loaded')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), *paths], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    taken = "taken True" in done.stdout
    assert taken or "loaded" in done.stdout, done.stderr
    return taken


@pytest.mark.parametrize("installed", [True, False], ids=["installed", "bare checkout"])
def test_transformers_does_not_take_our_kernels_for_the_hub_package(installed: bool, tmp_path: Path) -> None:
    """transformers looks for an optional package called `kernels`, of certain versions; ours has that name too."""
    assert not transformers_takes_our_kernels(declared_version() if installed else None, tmp_path)


def test_a_version_that_transformers_accepts_would_be_taken(tmp_path: Path) -> None:
    """Why our version must keep outside its range; and that the test above can fail."""
    from transformers.utils import import_utils

    assert transformers_takes_our_kernels(import_utils.KERNELS_MIN_VERSION, tmp_path)


def declared_version() -> str:
    import tomllib

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert isinstance(version, str)
    return version


def test_committed_stubs_are_what_the_generator_makes(tmp_path: Path) -> None:
    try:
        found = metadata.version("grpcio-tools")
    except metadata.PackageNotFoundError:
        found = "none"
    if found != generate.GENERATOR_VERSION:
        pytest.skip(f"grpcio-tools {generate.GENERATOR_VERSION} makes the stubs; installed: {found}")
    for made in generate.generate(tmp_path):
        committed = ROOT / made.relative_to(tmp_path)
        assert committed.read_text() == made.read_text(), f"{committed}: run python protos/generate.py"
