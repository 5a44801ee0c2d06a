"""Is a file that says everything read as transformers reads it, and one that does not left to transformers?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from drafter_service.eagle3.config import read_config
from engine import model_config
from engine.errors import ModelError
from engine.model_config import ModelConfig
from engine.plain_config import ELSEWHERE, plain_layers, read_plain_config
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 9},
    "qwen2": {},
    "qwen3": {"attention_bias": True, "head_dim": 32},
}


def spelled_before_5(raw: dict[str, Any]) -> dict[str, Any]:
    """The same, as transformers 4 wrote it."""
    old = {key: value for key, value in raw.items() if key not in ("rope_parameters", "dtype", "layer_types")}
    return {**old, "rope_theta": 5e5, "rope_scaling": None, "torch_dtype": "bfloat16"}


def write(directory: Path, raw: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


def raw_of(tmp_path: Path, family: str, **fields: Any) -> dict[str, Any]:
    raw = json.loads((make_tiny_model(tmp_path / f"{family}-made", family, **fields) / "config.json").read_text())
    assert isinstance(raw, dict)
    return raw


def by_transformers(directory: Path) -> ModelConfig:
    return ModelConfig.from_hf_config(AutoConfig.from_pretrained(directory, local_files_only=True))


@pytest.mark.parametrize("old", [False, True], ids=["spelled-today", "spelled-before-5"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_that_says_everything(tmp_path: Path, family: str, old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = raw_of(tmp_path, family, **FAMILIES[family]) | {"eos_token_id": [2, 7]}
    directory = write(tmp_path / "read", spelled_before_5(raw) if old else raw)
    expected = by_transformers(directory)
    assert expected.windows == ((9, 9, 9) if family == "mistral" else (None, None, None))
    monkeypatch.setattr(AutoConfig, "from_pretrained", None)
    assert ModelConfig.from_directory(directory) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_left_out_is_left_to_transformers_or_the_same_everywhere(tmp_path: Path, family: str) -> None:
    """One key after the other, and null in its place."""
    raw = raw_of(tmp_path, family, **FAMILIES[family])
    num_plain = 0
    for key in raw:
        for rest in ({k: v for k, v in raw.items() if k != key}, {**raw, key: None}):
            directory = write(tmp_path / "read", rest)
            plain = read_plain_config(directory / "config.json")
            num_plain += plain is not None
            try:
                expected = by_transformers(directory)
            except Exception:  # of many kinds: it cannot read this, perhaps for a field that we do not look at
                if plain is None:
                    with pytest.raises(ModelError):
                        ModelConfig.from_directory(directory)
            else:
                assert ModelConfig.from_directory(directory) == expected, key
    assert 10 < num_plain < 2 * len(raw) - 10  # some of both


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
        {"hidden_size": 64.0},
        {"num_key_value_heads": True},
        {"rms_norm_eps": 1},
        {"dtype": "float8"},
        {"torch_dtype": "float16"},
        {"tie_word_embeddings": 1},
        {"eos_token_id": "2"},
        {"num_attention_heads": 5},
        {"layer_types": ["sliding_attention"] * 3},
        *({name: None} for name in ELSEWHERE),
    ],
    ids=str,
)
def test_other_files_are_left_to_transformers(tmp_path: Path, fields: dict[str, Any]) -> None:
    raw = raw_of(tmp_path, "llama")
    file = write(tmp_path / "read", raw) / "config.json"
    assert read_plain_config(file) is not None
    write(tmp_path / "read", raw | fields)
    assert read_plain_config(file) is None


def test_sliding_windows_of_some_layers_are_left_to_transformers(tmp_path: Path) -> None:
    raw = raw_of(tmp_path, "qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1)
    for said in (raw, {key: value for key, value in raw.items() if key != "layer_types"}):
        directory = write(tmp_path / "read", said)
        assert read_plain_config(directory / "config.json") is None
        assert ModelConfig.from_directory(directory).windows == (None, 5, 5)


def test_no_file_no_json_and_no_mapping(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    assert read_plain_config(file) is None
    for text in ("{", "[]", "\xff"):
        file.write_text(text, encoding="latin-1")
        assert read_plain_config(file) is None


def test_a_head_is_read_as_transformers_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = {**raw_of(tmp_path, "llama"), "num_hidden_layers": 1, "draft_vocab_size": 100}
    assert plain_layers(raw) is not None
    plain = read_config(raw)
    monkeypatch.setattr("drafter_service.eagle3.config.plain_layers", lambda raw: None)
    assert read_config(raw) == plain


def test_services_on_such_files_do_without_transformers(tmp_path: Path) -> None:
    """Which takes longer to import than all else that their start does."""
    model = make_tiny_model(tmp_path / "model")
    code = (
        "import sys\n"
        "import drafter_service.__main__, target_service.__main__, target_service.pcp.__main__\n"
        "from drafter_service.assembly import make_speculator\n"
        "from drafter_service.config import DrafterConfig\n"
        "from target_service.assembly import build_target\n"
        "from target_service.config import TargetConfig\n"
        f"model = {str(model)!r}\n"
        "from pathlib import Path\n"
        "target = build_target(TargetConfig(threads=1, num_blocks=16), 'tiny', Path(model))\n"
        "make_speculator(DrafterConfig(method='draft_model', checkpoint=model), None)\n"
        "head = 'assets/smollm2-135m-instruct-eagle3'\n"
        "from drafter_service.eagle3.config import read_config, rotary_frequencies\n"
        "import json; rotary_frequencies(read_config(json.loads(Path(head, 'config.json').read_text())))\n"
        "assert 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_frequencies_are_those_of_the_families_classes(tmp_path: Path) -> None:
    assert model_config.default_frequencies(10000, 16).tolist() == pytest.approx([10.0 ** (-i / 2) for i in range(8)])
