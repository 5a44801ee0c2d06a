"""What happens, in order, in a `train` run?

Write the corpus, train the head, export it, measure it, report. Each phase's state is on disk under `OUT/work`, so the
same command goes on where an earlier sitting stopped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from drafter_service.eagle3.checkpoint import save_head
from drafter_service.eagle3.config import default_hidden_layers
from drafter_service.training.chat_format import load_chat_format
from drafter_service.training.corpus import Conversation, split_held_out
from drafter_service.training.evaluate import SetResult, evaluate
from drafter_service.training.interviews import read_prompts
from drafter_service.training.options import TrainOptions, target_dtype
from drafter_service.training.prompt_sets import PromptSet
from drafter_service.training.report import markdown_table, results_json, write_model_card, write_report
from drafter_service.training.target_view import TargetView
from drafter_service.training.trainer import Trainer, new_trainer, read_checkpoint
from drafter_service.training.writing import write_corpus
from engine.decoder import Decoder
from engine.errors import ModelError

_SMALLEST_CORPUS = 4


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """What the head is measured on at the end of a run."""

    sets: tuple[PromptSet, ...] = ()
    temperatures: tuple[float, ...] = (0.0, 1.0)
    draft_len: int = 4
    max_new: int = 256


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """complete: False when the sitting's time ran out first; give the same command again."""

    complete: bool
    report: Mapping[str, Any]
    results: tuple[SetResult, ...]


def run_training(
    model: Path,
    out: Path,
    prompt_files: Sequence[Path],
    options: TrainOptions,
    evaluation: EvaluationOptions,
    device: torch.device,
) -> RunOutcome:
    """See the file's first words. ModelError and ConfigError name what cannot be used."""
    started = time.monotonic()
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    given = read_prompts(prompt_files)
    decoder = Decoder.load(model, target_dtype(device), device)
    check_target(decoder, options)
    chat = load_chat_format(model)
    fingerprint = options.fingerprint(model)
    content = read_checkpoint(work / "checkpoint.pt", fingerprint)

    def time_is_up() -> bool:
        return bool(options.sitting_minutes) and time.monotonic() - started > options.sitting_minutes * 60

    clock = _PhaseClock(work / "phases.json")
    corpus, written = write_corpus(decoder, chat, given, work, options, clock.seconds("writing"), time_is_up)
    clock.add("writing", written.seconds)
    if not written.complete:
        return RunOutcome(False, {"complete": False, "facts": asdict(written), "held_out": []}, ())
    release_memory(device)
    if len(corpus) < _SMALLEST_CORPUS:
        raise ModelError(
            f"the target wrote {len(corpus)} conversations in {clock.seconds('writing'):.0f} s, too few to train on: "
            "give more minutes, or prompts of your own if it never ends a user turn"
        )
    training, held_out = split_held_out(corpus)
    target = TargetView(decoder, default_hidden_layers(decoder.config.num_layers))
    trainer = new_trainer(target, training, rope_of(model), options, fingerprint, content)
    complete = trainer.train(training, held_out, work / "checkpoint.pt", time_is_up)
    head = trainer.exported(torch.bfloat16)
    save_head(head, out)
    results: tuple[SetResult, ...] = ()
    if complete and evaluation.sets:
        # In fp32, from the file's weights: what a service computes.
        release_memory(device)
        exact = TargetView(Decoder.load(model, torch.float32, device), target.hidden_layers)
        exported = head.float()
        exported.attach_embedding(exact.decoder.embed_weight)
        seats = 256 if device.type == "cuda" else 16
        results = tuple(
            evaluate(
                exported,
                exact,
                chat,
                evaluation.sets,
                evaluation.temperatures,
                evaluation.draft_len,
                evaluation.max_new,
                seats,
            )
        )
    facts = _facts(model, out, trainer, corpus, options, evaluation, results, clock.seconds("writing"), len(given))
    report = {
        "complete": complete,
        "options": asdict(options),
        "facts": facts,
        "tokens_per_second_writing": written.tokens_per_second,
        "curve": trainer.state.curve,
        "held_out": trainer.state.held_out,
        "evaluation": results_json(results, None),
    }
    write_report(out, report)
    write_model_card(out, facts)
    return RunOutcome(complete, report, results)


def check_target(decoder: Decoder, options: TrainOptions) -> None:
    """ModelError when a head for this target cannot be trained."""
    config = decoder.config
    if not config.eos_token_ids:
        raise ModelError("the target names no end token (eos_token_id): its answers would never end")
    if config.max_model_len < options.max_len:
        raise ModelError(
            f"the target takes {config.max_model_len} tokens; training texts are {options.max_len}: lower it"
        )


def rope_of(model: Path) -> dict[str, Any]:
    """The target's rotary parameters, which the head's layer shares."""
    rope = dict(AutoConfig.from_pretrained(model, local_files_only=True).rope_parameters)
    return {name: value for name, value in rope.items() if value is not None}


def release_memory(device: torch.device) -> None:
    """Give freed GPU memory back, so that the next phase can plan with it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


class _PhaseClock:
    """Seconds spent on each phase over all sittings, kept in a small file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, float] = {}
        if path.exists():
            try:
                self._seconds = {str(name): float(value) for name, value in json.loads(path.read_text()).items()}
            except (ValueError, AttributeError) as error:
                raise ModelError(f"{path}: cannot be read ({error}); remove it to begin anew") from error

    def seconds(self, phase: str) -> float:
        return self._seconds.get(phase, 0.0)

    def add(self, phase: str, seconds: float) -> None:
        self._seconds[phase] = self.seconds(phase) + seconds
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._seconds))
        os.replace(temporary, self._path)


def _facts(
    model: Path,
    out: Path,
    trainer: Trainer,
    corpus: Sequence[Conversation],
    options: TrainOptions,
    evaluation: EvaluationOptions,
    results: Sequence[SetResult],
    generate_seconds: float,
    num_given: int,
) -> dict[str, Any]:
    config, state = trainer.head.config, trainer.state
    corpus_tokens = sum(item.tokens.size for item in corpus)
    device = trainer.target.decoder.device
    return {
        "base_model": model.name,
        "model_name": model.name,
        "license": "apache-2.0",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "hidden_layers": ", ".join(str(layer) for layer in trainer.target.hidden_layers),
        "draft_vocab_size": config.draft_vocab_size,
        "parameters": trainer.num_parameters,
        "file_bytes": (out / "model.safetensors").stat().st_size,
        "conversations": len(corpus),
        "corpus_tokens": corpus_tokens,
        "answer_tokens": sum(item.num_answer_tokens for item in corpus),
        "greedy_share": sum(item.greedy for item in corpus) / max(1, len(corpus)),
        "temperatures": ", ".join(f"{t:g}" for t, _ in options.interview.answer_temperatures if t),
        "given": num_given,
        "composed_share": sum(share for _, share in options.interview.composed),
        "optimizer": "Muon for the inner matrices and AdamW for the rest" if options.muon else "AdamW",
        "coverage": trainer.vocab.coverage,
        "train_steps": state.steps,
        "batch_tokens": options.batch_tokens,
        "epochs": state.tokens / max(1, corpus_tokens),
        "num_steps": options.loss.num_steps,
        "learning_rate": options.learning_rate,
        "generate_seconds": generate_seconds,
        "train_seconds": state.seconds,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU",
        "max_new": evaluation.max_new,
        "draft_len": evaluation.draft_len,
        "table": markdown_table(results) if results else "Not measured yet.",
    }
