"""Regions of a channel: never overlapping, aligned, checked against the other end's; bad specs name their field."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.channel import ChannelSpec
from engine.channel.layout import (
    ALIGNMENT,
    CONTROL_BYTES,
    HIDDEN_DTYPES,
    check_spec,
    describe_layout,
    entry_shapes,
    plan_layout,
    reply_shapes,
    spec_of,
)
from engine.errors import ChannelError
from tests.engine.channel.entries import SPEC, spec_with

specs = st.builds(
    ChannelSpec,
    channel_id=st.text(min_size=1, max_size=20).filter(lambda text: text.isprintable()),
    epoch=st.integers(1, 2**32 - 1),
    depth=st.integers(1, 9),
    max_rows=st.integers(1, 70),
    max_tokens=st.integers(1, 700),
    max_draft_len=st.integers(1, 9),
    hidden_width=st.integers(0, 900),
    hidden_dtype=st.sampled_from(HIDDEN_DTYPES),
    vocab_size=st.integers(1, 5000),
    max_blocks_per_row=st.integers(1, 70),
    block_size=st.sampled_from([1, 2, 16, 64]),
    num_blocks=st.integers(1, 10_000),
    draft_probs=st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(specs)
def test_regions_do_not_overlap_and_hold_the_largest_entries(spec: ChannelSpec) -> None:
    layout = plan_layout(spec)
    end = CONTROL_BYTES
    for region in sorted(layout.regions, key=lambda region: region.offset):
        assert region.offset % ALIGNMENT == 0
        assert region.offset >= end, region.name
        end = region.offset + region.num_bytes
    assert end <= layout.num_bytes
    largest = {**entry_shapes(spec, spec.max_rows, spec.max_tokens), **reply_shapes(spec, spec.max_rows)}
    for name, (dtype, shape) in largest.items():
        assert layout.region(name).shape == (spec.depth, *shape)
        assert layout.region(name).dtype == dtype


@settings(max_examples=50, deadline=None)
@given(specs)
def test_a_description_says_all_of_the_spec(spec: ChannelSpec) -> None:
    described = spec_of(describe_layout(spec, "shm", b"outrider-x"))
    assert described == (spec if spec.hidden_width else replace(spec, hidden_dtype=torch.float32))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("channel_id", ""),
        ("channel_id", "x" * 300),
        ("epoch", 0),
        ("epoch", 2**32),
        ("depth", 0),
        ("max_rows", 0),
        ("max_tokens", -1),
        ("max_draft_len", 0),
        ("hidden_width", -1),
        ("hidden_dtype", torch.int64),
        ("vocab_size", 0),
        ("max_blocks_per_row", 0),
        ("block_size", 12),
        ("block_size", 0),
        ("num_blocks", 0),
    ],
)
def test_an_impossible_spec_names_its_field(field: str, value: object) -> None:
    with pytest.raises(ChannelError, match=f"^{field}: "):
        check_spec(spec_with(**{field: value}))


def test_a_channel_too_large_names_the_region() -> None:
    with pytest.raises(ChannelError, match=r"^reply\.probs: "):
        plan_layout(spec_with(vocab_size=2**40))


def test_regions_that_differ_from_ours_are_named() -> None:
    description = describe_layout(SPEC, "shm", b"outrider-x")
    hidden = next(region for region in description.regions if region.name == "ring.hidden")
    others = tuple(region for region in description.regions if region is not hidden)
    for changed, match in (
        (replace(description, regions=(*others, replace(hidden, shape=(3, 17, 8)))), r"^regions\[ring\.hidden\]: "),
        (replace(description, regions=(*others, replace(hidden, dtype="int3"))), r"^regions\[ring\.hidden\]\.dtype: "),
        (replace(description, regions=others), r"^regions\[ring\.hidden\]: missing"),
        (replace(description, regions=(*description.regions, replace(hidden, name="more"))), r"^regions\[more\]: "),
        (replace(description, max_rows=6), r"^regions\[ring\."),
        (replace(description, control=replace(description.control, offset=64)), r"^control: "),
    ):
        with pytest.raises(ChannelError, match=match):
            spec_of(changed)
