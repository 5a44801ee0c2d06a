"""Is every mistake in a config file told by its key?"""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import load_config, parse_address
from gateway.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_defaults_and_other_sections(tmp_path: Path) -> None:
    loaded = load_config(write(tmp_path, "model: some/dir\ntarget: {listen: anything}\ngateway: {draft_len: 2}\n"))
    assert (loaded.model, loaded.model_label, loaded.gateway.draft_len) == ("some/dir", "some/dir", 2)
    assert load_config(write(tmp_path, "model: m\n")).gateway.rest == "127.0.0.1:8000"


def test_the_override_says_where_and_the_file_how_it_is_called(tmp_path: Path) -> None:
    path = write(tmp_path, "model: smol\n")
    loaded = load_config(path, "/somewhere/else")
    assert (loaded.model, loaded.model_label) == ("/somewhere/else", "smol")
    assert load_config(write(tmp_path, "gateway: {}\n"), "/dir/x").model_label == "/dir/x"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("model: m\ngateway: {draft_len: -1}", "gateway.draft_len"),
        ("model: m\ngateway: {draft_len: 9}", "gateway.draft_len"),
        ("model: m\ngateway: {max_draft_len: 1000000000}", "gateway.max_draft_len"),
        ("model: m\ngateway: {drafft_len: 1}", "gateway.drafft_len"),
        ("model: m\ngateway: {rest: nowhere}", "gateway.rest"),
        ("model: m\ngateway: {target: 'h:99999'}", "gateway.target"),
        ("model: m\ngateway: {queue_timeout_s: 0}", "gateway.queue_timeout_s"),
        ("model: m\ngateway: {queue_timeout_s: .inf}", "gateway.queue_timeout_s"),
        ("model: m\ngateway: {target_wait_s: .nan}", "gateway.target_wait_s"),
        ("model: m\ngateway: {reconnect_min_s: 5}", "gateway.reconnect_min_s"),
        ("model: m\ngateway: 3", "gateway"),
        ("gateway: {}", "model"),
        ("model: 3", "model"),
        ("model: m\ngatway: {}", "gatway"),
    ],
)
def test_mistakes_name_their_key(tmp_path: Path, text: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    assert caught.value.key == key
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["- a\n", "a: [\n", "\x00"])
def test_what_is_no_config_names_the_file(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.key == str(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_told() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config("/no/such/file.yaml")


def test_addresses() -> None:
    address = parse_address("[::1]:80")
    assert (address.host, address.port) == ("::1", 80)
    for wrong in ("", "host", "host:", ":80", "host:x", "host:-1", "host:70000"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            parse_address(wrong)
