"""Does every mistake in the config file become one line that names the key?"""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, Field, field_validator

from engine.config_file import SectionModel, load_model_name, load_section, read_config_file
from engine.errors import ConfigError


class Inner(SectionModel):
    depth: int = 4


class Section(SectionModel):
    listen: str
    block_size: int = Field(default=16, ge=1)
    channel: Inner = Inner()

    @field_validator("block_size")
    @classmethod
    def power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("must be a power of two")
        return value


class Loose(BaseModel):
    listen: str = "here"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_a_section_is_read_and_others_are_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path, "model: m\ntarget: {listen: a, channel: {depth: 2}}\ndrafter: {what: ever}\n")
    section = load_section(path, "target", Section)
    assert (section.listen, section.block_size, section.channel.depth) == ("a", 16, 2)
    assert load_model_name(path) == "m"
    assert load_model_name(path, "other") == "other"


@pytest.mark.parametrize(
    ("text", "key", "detail"),
    [
        ("target: {listen: a, block_size: 12}", "target.block_size", "must be a power of two (got 12)"),
        ("target: {listen: a, block_size: many}", "target.block_size", "valid integer"),
        ("target: {listen: a, blocksize: 16}", "target.blocksize", "unknown key; allowed are block_size, channel"),
        ("target: {listen: a, channel: {depht: 2}}", "target.channel.depht", "not permitted"),
        ("target: {block_size: 16}", "target.listen", "is required"),
        ("target: {block_size: 0}", "target.listen", "(and 1 more)"),
        ("target: [1]", "target", "must be a mapping"),
        ("target: {listen: a}\ntraget: {}", "traget", "unknown key; allowed are model, target, drafter, gateway"),
    ],
)
def test_mistakes_name_the_key_in_one_line(tmp_path: Path, text: str, key: str, detail: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_section(write(tmp_path, text), "target", Section)
    assert caught.value.key == key
    assert detail in caught.value.detail
    assert str(caught.value).startswith(f"{key}: ")
    assert "\n" not in str(caught.value)


def test_unknown_keys_are_refused_even_by_a_model_that_would_not(tmp_path: Path) -> None:
    path = write(tmp_path, "target: {listne: x}")
    with pytest.raises(ConfigError, match=r"^target\.listne: unknown key"):
        load_section(path, "target", Loose)


def test_a_missing_section_gives_the_defaults(tmp_path: Path) -> None:
    assert load_section(write(tmp_path, ""), "target", Loose).listen == "here"


@pytest.mark.parametrize("text", ["- 1\n", "just words", "{unclosed: [", "a: b: c"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_config_file(path)
    assert caught.value.key == str(path)
    assert "\n" not in str(caught.value)


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_config_file(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_config_file(tmp_path / "binary.yaml")


@pytest.mark.parametrize("text", ["", "model:", "model: 7", "model: ''"])
def test_a_model_has_to_be_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="^model: "):
        load_model_name(write(tmp_path, text))
