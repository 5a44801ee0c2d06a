"""The Triton kernels from outside: same signatures as the references, loaded only when used, tested and compiled in
processes of their own where there is no GPU.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from kernels.attention import registry
from kernels.attention.registry import available_backends, make_attention
from tests.kernels.triton.interpreter import what_is_missing

ROOT = Path(__file__).resolve().parents[2]
NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed")
WITHOUT_A_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: tests/kernels/triton runs on it")

# Of the references, what is a building block of theirs and has another form in Triton.
NOT_TWINS = {
    "philox": {"philox4x32"},
    "slot_mapping": {"slots_of", "token_rows"},
    "linear": {"linear", "linear_silu_mul"},  # `skinny_linear` is both, and is told its tiling
}


def functions(path: Path) -> dict[str, str]:
    """Public function -> signature; a name that is imported on purpose (`from x import a as a`) counts without one.
    How a kernel is launched (`kernels/triton/prepared.py`) is none of its signature.
    """
    found: dict[str, str] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            if [argument.arg for argument in node.args.kwonlyargs] == ["launcher"]:
                node.args.kwonlyargs, node.args.kw_defaults = [], []
            result = ast.unparse(node.returns) if node.returns else ""
            found[node.name] = f"({ast.unparse(node.args)}) -> {result}"
        elif isinstance(node, ast.ImportFrom):
            found.update({alias.name: "same" for alias in node.names if alias.asname == alias.name})
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "kernels/reference").glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_every_reference_kernel_has_its_twin(path: Path) -> None:
    expected, got = functions(path), functions(ROOT / "kernels/triton" / path.name)
    for name, signature in expected.items():
        if name not in NOT_TWINS.get(path.stem, set()):
            assert name in got, f"kernels/triton/{path.name} has no {name}"
            assert got[name] in (signature, "same"), name


def test_nothing_loads_triton_that_does_not_use_it() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for folder in ("kernels", "kernels/reference", "kernels/attention")
        for path in sorted((ROOT / folder).glob("*.py"))
        if path.name not in ("triton_backend.py", "flashinfer_backend.py", "__init__.py")
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "from kernels.attention.registry import available_backends, make_attention\n"
        "available_backends(), make_attention('torch', 4, 2, 8, 0.3, None)\n"
        "from kernels.kernel_set import kernels_for\n"
        "assert kernels_for('cpu').name == 'reference'\n"
        "assert 'triton' not in sys.modules and 'flashinfer' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_the_backend_is_there_only_where_triton_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    assert available_backends() == ("torch", "reference")
    for name in ("triton", "flashinfer"):
        with pytest.raises(ValueError, match="not installed"):
            make_attention(name, 4, 2, 8, 0.3, None)
    monkeypatch.setattr(registry, "find_spec", lambda name: object())
    assert available_backends() == ("torch", "triton", "flashinfer", "reference")


@NEEDS_TRITON
def test_a_backend_of_gpus_is_refused_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="triton.*on a GPU, not on cpu"):
        make_attention("triton", 4, 2, 8, 0.3, None, torch.device("cpu"))
    assert make_attention("triton", 4, 2, 8, 0.3, None, torch.device("cuda", 1)).name == "triton"
    assert make_attention("torch", 4, 2, 8, 0.3, None, torch.device("cpu")).name == "torch"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert make_attention("triton", 4, 2, 8, 0.3, None, torch.device("cpu")).name == "triton"


def in_a_process(arguments: list[str], tmp_path: Path, **variables: str) -> str:
    """Output of python with these arguments; fails with it where it does not end with 0."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1", **variables}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@NEEDS_TRITON
@WITHOUT_A_GPU
@pytest.mark.skipif(what_is_missing() is not None, reason=str(what_is_missing()))
@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="tests/kernels/triton runs under the interpreter in this process"
)
@pytest.mark.timeout(600)
def test_kernels_under_the_interpreter(tmp_path: Path) -> None:
    output = in_a_process(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/triton"], tmp_path, TRITON_INTERPRET="1"
    )
    assert " passed" in output


@NEEDS_TRITON
@WITHOUT_A_GPU
@pytest.mark.timeout(600)
def test_kernels_compile_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    """The interpreter takes what the compiler refuses."""
    output = in_a_process(["-m", "tests.kernels.triton.compile_all"], tmp_path, TRITON_INTERPRET="0")
    assert "_attend" in output


@NEEDS_TRITON
@WITHOUT_A_GPU
@pytest.mark.timeout(600)
def test_prepared_launches_equal_ordinary_ones_to_the_launcher(tmp_path: Path) -> None:
    output = in_a_process(["-m", "tests.kernels.triton.prepare_all"], tmp_path, TRITON_INTERPRET="0")
    assert output.count("as ordinary launches") == 7
