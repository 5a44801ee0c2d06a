"""Stacks and models that the end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.end_to_end.stack import Stack, running_stack
from tests.end_to_end.variants import VARIANTS, Models, Variant, drafter_section


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The session's tiny models."""
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="package", params=VARIANTS, ids=lambda variant: variant.name)
def variant(request: pytest.FixtureRequest) -> Variant:
    """One of the stacks of variants.py."""
    value: Variant = request.param
    return value


@pytest.fixture(scope="package")
def stack(variant: Variant, models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The variant, running."""
    directory = tmp_path_factory.mktemp(variant.name)
    with running_stack(
        directory, models.target, variant.target, drafter_section(variant, models), variant.gateway
    ) as running:
        yield running
