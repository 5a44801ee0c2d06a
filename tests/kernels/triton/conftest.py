"""Where do these tests run? On the GPU, or under the interpreter, which must be chosen before Triton is first imported.

Without a GPU and with Triton imported already (transformers does), nothing here can run in this process: the folder is
left out, and `tests/kernels/test_triton.py` runs it in a process of its own.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import pytest
import torch

from tests.kernels.triton.interpreter import what_is_missing

# Newer versions warn where this is left to its default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

collect_ignore_glob: list[str] = []
if find_spec("triton") is None:
    collect_ignore_glob.append("test_*.py")
elif not torch.cuda.is_available():
    if what_is_missing() is not None:
        collect_ignore_glob.append("test_*.py")
    elif "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    elif os.environ.get("TRITON_INTERPRET") != "1":
        collect_ignore_glob.append("test_*.py")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Infinities are values here, on a GPU without a word; the interpreter computes with numpy, which warns of them."""
    item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
