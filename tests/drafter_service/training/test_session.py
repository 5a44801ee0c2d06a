"""A whole training run with a tiny random target: text, training, checkpoint, measuring, report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafter_service.eagle3.checkpoint import load_head
from drafter_service.eagle3.config import default_hidden_layers
from drafter_service.training.__main__ import main
from drafter_service.training.acceptance import measure, total
from drafter_service.training.corpus import load_shards
from drafter_service.training.interviews import InterviewOptions
from drafter_service.training.loss import LossOptions
from drafter_service.training.options import TrainOptions
from drafter_service.training.prompt_sets import PromptSet
from drafter_service.training.session import EvaluationOptions, rope_of, run_training
from drafter_service.training.target_view import TargetView
from drafter_service.training.trainer import new_trainer
from engine.decoder import Decoder
from engine.errors import ModelError
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")
NO_EVALUATION = EvaluationOptions()
# Greedy answers to given prompts: a random target hardly ever ends a user turn of its own.
INTERVIEW = InterviewOptions(given_share=1.0, answer_temperatures=((0.0, 1.0),), max_answer=48, second_turn_share=0.0)
OPTIONS = TrainOptions(
    generate_tokens=40 * 40,
    train_steps=200,
    num_seats=16,
    max_len=96,
    batch_tokens=512,
    learning_rate=3e-3,
    draft_vocab_size=320,
    interview=INTERVIEW,
    loss=LossOptions(num_steps=3),
)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    words = ["tell", "me", "the", "name", "of", "a", "sea", "stone", "and", "two", "cats"]
    lines = [json.dumps({"prompt": " ".join(words[(i * j) % 11] for j in range(1, 5 + i % 4))}) for i in range(60)]
    path.write_text("\n".join(dict.fromkeys(lines)) + "\n")
    return path


def own_text_length(
    out: Path, target: TargetView, trained: bool, options: TrainOptions, rope: dict[str, object]
) -> float:
    """Accepted length on the texts that the target wrote for the training, of the file's head or of a new one."""
    corpus = load_shards(out / "work")
    if trained:
        head = load_head(out, torch.float32, CPU)
        head.attach_embedding(target.decoder.embed_weight)
    else:
        head = new_trainer(target, corpus, rope, options, "", None).exported(torch.float32)
    return total(measure(head, target, corpus, 3, options.max_len, CPU), 3).mean_accepted_len


def test_loss_falls_and_acceptance_rises_on_the_targets_own_text(prompts: Path, tmp_path: Path) -> None:
    """The target's weights are wider than usual: its distributions are sharp, so that there is something to learn."""
    tiny_directory = make_tiny_model(tmp_path / "sharp", num_hidden_layers=5, initializer_range=0.4)
    target = TargetView(Decoder.load(tiny_directory, torch.float32, CPU), default_hidden_layers(5))
    out = tmp_path / "head"
    sets = (PromptSet("mine", (("tell me the name", "and two cats"), ("stone",))),)
    evaluation = EvaluationOptions(sets, (0.0, 1.0), 3, 16)
    outcome = run_training(tiny_directory, out, [prompts], OPTIONS, evaluation, CPU)
    assert outcome.complete
    curve = outcome.report["curve"]
    assert curve[-1]["cross_entropy"] < 0.7 * curve[0]["cross_entropy"]
    untrained = own_text_length(out, target, False, OPTIONS, rope_of(tiny_directory))
    trained = own_text_length(out, target, True, OPTIONS, rope_of(tiny_directory))
    assert trained > untrained + 0.2, (untrained, trained)
    # What the files say.
    raw = json.loads((out / "config.json").read_text())
    assert raw["draft_vocab_size"] == 320
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    assert [result.temperature for result in outcome.results] == [0.0, 1.0]
    assert all(1.0 <= result.mean_accepted_len <= 4.0 for result in outcome.results)
    card = (out / "README.md").read_text()
    assert "| mine | 0 |" in card
    assert "{" not in card.replace("`{", "")
    assert json.loads((out / "training_report.json").read_text())["complete"] is True


def test_a_run_goes_on_where_it_stopped(
    tiny_directory: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice 20 steps with a stop between equal 40 steps at once: weights, optimiser, schedule and data order."""
    from drafter_service.training import trainer as trainer_module

    short = replace(OPTIONS, train_steps=40, generate_tokens=400)
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert run_training(tiny_directory, whole, [prompts], short, NO_EVALUATION, CPU).complete
    (halves / "work").mkdir(parents=True)
    for path in (whole / "work").glob("corpus-*"):
        (halves / "work" / path.name).write_bytes(path.read_bytes())
    original = trainer_module.Trainer._step
    taken = 0

    def interrupted(self: trainer_module.Trainer, batch: object) -> object:
        nonlocal taken
        taken += 1
        if taken == 21:
            self.save(halves / "work" / "checkpoint.pt")
            raise KeyboardInterrupt
        return original(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer_module.Trainer, "_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_training(tiny_directory, halves, [prompts], short, NO_EVALUATION, CPU)
    monkeypatch.setattr(trainer_module.Trainer, "_step", original)
    outcome = run_training(tiny_directory, halves, [prompts], short, NO_EVALUATION, CPU)
    assert outcome.complete
    assert outcome.report["facts"]["train_steps"] == 40
    one, other = (load_head(path, torch.float32, CPU).state_dict() for path in (whole, halves))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_of_another_run_is_refused(tiny_directory: Path, prompts: Path, tmp_path: Path) -> None:
    short = replace(OPTIONS, train_steps=2, generate_tokens=200)
    out = tmp_path / "head"
    run_training(tiny_directory, out, [prompts], short, NO_EVALUATION, CPU)
    other = replace(short, learning_rate=1e-4)
    with pytest.raises(ModelError, match="other options"):
        run_training(tiny_directory, out, [prompts], other, NO_EVALUATION, CPU)
    # More steps are no other run: it is extended.
    longer = run_training(tiny_directory, out, [prompts], replace(short, train_steps=4), NO_EVALUATION, CPU)
    assert longer.report["facts"]["train_steps"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--model", "/nowhere", "--out", "OUT", "--no-eval"], "not a model directory"),
        (["train", "--model", "TINY", "--out", "OUT", "--no-eval", "--max-len", "4096"], "takes 512 tokens"),
        (["train", "--model", "TINY", "--out", "OUT", "--no-eval", "--max-len", "8"], "max_len"),
        (["train", "--model", "TINY", "--out", "OUT", "--no-eval", "--prompts", "/no/file"], "prompts: /no/file"),
        (["train", "--model", "TINY", "--out", "OUT", "--prompt-set", "riddles"], "'riddles' is not one of chat"),
        (["eval", "--model", "TINY", "--drafter", "/nowhere", "--prompt-set", "a=SET"], "/nowhere/config.json"),
        (["eval", "--prompt-set", "a=SET"], "--model and --drafter are needed"),
        (["eval", "--stack", "http://127.0.0.1:9", "--prompt-set", "a=SET"], "127.0.0.1:9"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(
    arguments: list[str], message: str, tiny_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_set = tmp_path / "set.jsonl"
    own_set.write_text('"one"\n')
    replaced = {"TINY": str(tiny_directory), "OUT": str(tmp_path / "out"), "a=SET": f"a={own_set}"}
    assert main([replaced.get(argument, argument) for argument in arguments]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in last


def test_a_family_that_the_engine_does_not_know_is_refused(
    tiny_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "gpt2"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert main(["train", "--model", str(other), "--out", str(tmp_path / "out"), "--no-eval"]) == 2
    assert "gpt2" in capsys.readouterr().err


def test_eval_measures_the_written_head_and_prints_json(
    tiny_directory: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, own_set = tmp_path / "head", tmp_path / "set.jsonl"
    own_set.write_text('{"turns": ["tell me", "two cats"]}\n"stone and sea"\n')
    short = replace(OPTIONS, train_steps=2, generate_tokens=200)
    run_training(tiny_directory, out, [prompts], short, NO_EVALUATION, CPU)
    command = ["eval", "--model", str(tiny_directory), "--drafter", str(out), "--prompt-set", f"mine={own_set}"]
    assert main([*command, "--max-tokens", "12", "--draft-len", "2", "--json", str(tmp_path / "result.json")]) == 0
    printed = capsys.readouterr().out
    assert "accepted length" in printed
    content = json.loads(printed.strip().splitlines()[-1])
    assert content == json.loads((tmp_path / "result.json").read_text())
    assert [(item["prompt_set"], item["temperature"]) for item in content["results"]] == [("mine", 0.0), ("mine", 1.0)]
    assert content["step_cost"]["verify"] > 0
    assert content["results"][0]["expected_speedup"] > 0
    assert len(content["results"][0]["per_position"]) == 2


def test_models_of_another_shape_are_told_apart(tiny_directory: Path, prompts: Path, tmp_path: Path) -> None:
    from drafter_service.training.evaluate import load_for_evaluation

    out = tmp_path / "head"
    short = replace(OPTIONS, train_steps=1, generate_tokens=200)
    run_training(tiny_directory, out, [prompts], short, NO_EVALUATION, CPU)
    wider = make_tiny_model(tmp_path / "wider", hidden_size=32, head_dim=8)
    with pytest.raises(ModelError, match="made for a target of vocabulary 512 and hidden size 64"):
        load_for_evaluation(wider, out, torch.float32, CPU)
