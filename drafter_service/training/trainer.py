"""How is a head trained on a corpus, and how does a later sitting go on?

Steps of fixed shapes (see `step_runner`) on batches that another thread prepares, a cosine over the phase's wall time
(or its number of steps). The checkpoint holds weights, optimiser, the draft vocabulary, feature scales and how far the
phase is.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drafter_service.eagle3.head import Eagle3Head
from drafter_service.training.acceptance import measure, total
from drafter_service.training.corpus import Conversation, make_batch, token_counts
from drafter_service.training.head_optimizer import HeadOptimizer
from drafter_service.training.head_setup import (
    DraftVocab,
    choose_draft_vocab,
    fold_scale,
    head_config,
    initial_head,
    largest_draft_vocab,
)
from drafter_service.training.options import TrainOptions
from drafter_service.training.prefetch import Prefetch
from drafter_service.training.progress import PhaseProgress
from drafter_service.training.step_inputs import StepInputs, epoch_inputs, step_shapes
from drafter_service.training.step_runner import StepRunner, StepStatistics
from drafter_service.training.target_view import TargetView
from engine.errors import ModelError

_AVERAGED_STEPS = 20
_BATCHES_AHEAD = 8
_HELD_OUT_DRAFT_LEN = 4


@dataclass(slots=True)
class TrainingState:
    """What a checkpoint holds beside the weights. curve: points of the training curve, for the report."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    epoch: int = 0
    batches_into_epoch: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)
    held_out: list[dict[str, float]] = field(default_factory=list)


class Trainer:
    """Owns the head in training. `target` is only read."""

    def __init__(
        self,
        target: TargetView,
        head: Eagle3Head,
        vocab: DraftVocab,
        feature_rms: torch.Tensor,
        options: TrainOptions,
        fingerprint: str,
    ) -> None:
        self.target, self.head, self.vocab, self.feature_rms = target, head, vocab, feature_rms
        self.state = TrainingState()
        self._options, self._fingerprint = options, fingerprint
        self._device = target.decoder.device
        self._shapes = step_shapes(options.batch_tokens, options.max_len, options.loss.num_steps)
        self._optimizer = HeadOptimizer(head, options.weight_decay, options.clip, options.muon)
        draft_ids = torch.from_numpy(vocab.target_ids).to(self._device)
        self._runner = StepRunner(target, head, self._optimizer, feature_rms, draft_ids, self._shapes, options.loss)

    @property
    def num_parameters(self) -> int:
        """Values that are trained."""
        return sum(parameter.numel() for parameter in self.head.parameters() if parameter.requires_grad)

    def exported(self, dtype: torch.dtype) -> Eagle3Head:
        """The head as a service takes it."""
        return fold_scale(self.head, self.feature_rms, dtype)

    def train(
        self,
        corpus: Sequence[Conversation],
        held_out: Sequence[Conversation],
        checkpoint: Path,
        should_stop: Callable[[], bool],
    ) -> bool:
        """Go on until the phase is complete (True) or should_stop() (False); the checkpoint is written either way."""
        options, state = self._options, self.state
        before, started, last_saved = state.seconds, time.monotonic(), time.monotonic()
        if not state.held_out:
            self.watch(held_out)
        steps_before, tokens_before = state.steps, state.tokens
        with PhaseProgress("training") as progress, Prefetch(self._batches(corpus), _BATCHES_AHEAD) as batches:
            for epoch, inputs in batches:
                if self._fraction() >= 1 or should_stop():
                    break
                if epoch > state.epoch:
                    state.epoch, state.batches_into_epoch = epoch, 0
                self._step(inputs)
                state.seconds = before + time.monotonic() - started
                if (state.steps - steps_before) % _AVERAGED_STEPS == 0:
                    point = self._point(self._runner.take_statistics())
                    state.curve.append(point)
                    rate = (state.tokens - tokens_before) / max(1e-6, state.seconds - before)
                    progress.update(
                        self._fraction(),
                        f"step {state.steps}, loss {point['loss']:.3f}, accepted length {point['accepted_len']:.2f}, "
                        f"{rate:,.0f} tok/s, epoch {state.epoch + 1}",
                    )
                if time.monotonic() - last_saved > options.checkpoint_seconds:
                    self.watch(held_out)
                    self.save(checkpoint)
                    progress.line(f"checkpoint, held-out accepted length {state.held_out[-1]['accepted_len']:.3f}")
                    last_saved = time.monotonic()
        rest = self._runner.take_statistics()
        if rest.steps:
            state.curve.append(self._point(rest))
        self.watch(held_out)
        self.save(checkpoint)
        return self._fraction() >= 1

    def watch(self, held_out: Sequence[Conversation]) -> None:
        """Add a point: accepted length on the held-out conversations with greedy answers."""
        greedy = [item for item in held_out if item.greedy] or list(held_out)
        dtype = self.target.decoder.dtype
        counts = measure(
            self.exported(dtype), self.target, greedy, _HELD_OUT_DRAFT_LEN, self._options.max_len, self._device
        )
        length = total(counts, _HELD_OUT_DRAFT_LEN).mean_accepted_len
        self.state.held_out.append({"step": self.state.steps, "seconds": self.state.seconds, "accepted_len": length})

    def save(self, path: Path) -> None:
        """Write the checkpoint, atomically."""
        temporary = path.with_suffix(".tmp")
        content = {
            "fingerprint": self._fingerprint,
            "head": {name: tensor for name, tensor in self.head.state_dict().items() if name != "embed_tokens"},
            "optimizer": self._optimizer.state(),
            "target_ids": self.vocab.target_ids,
            "coverage": self.vocab.coverage,
            "feature_rms": self.feature_rms,
            "state": {name: getattr(self.state, name) for name in TrainingState.__slots__},
        }
        torch.save(content, temporary)
        os.replace(temporary, path)

    def restore(self, content: dict[str, Any]) -> None:
        """Take over what `read_checkpoint` gave."""
        missing, unexpected = self.head.load_state_dict(content["head"], strict=False)
        if unexpected or any(name != "embed_tokens" for name in missing):
            raise ModelError(f"checkpoint of another head: {', '.join([*missing, *unexpected][:4])}")
        self._optimizer.restore(content["optimizer"])
        self._runner.refresh()
        self.state = TrainingState(**content["state"])

    def _batches(self, corpus: Sequence[Conversation]) -> Iterator[tuple[int, StepInputs]]:
        """Epoch after epoch, from where the state is; with each batch the epoch it is of."""
        epoch, skip = self.state.epoch, self.state.batches_into_epoch
        while True:
            for inputs in epoch_inputs(corpus, self._shapes, self._options.seed + epoch, skip):
                yield epoch, inputs
            epoch, skip = epoch + 1, 0

    def _step(self, inputs: StepInputs) -> None:
        self._runner.run(inputs, self._options.learning_rate * self._schedule())
        self.state.steps += 1
        self.state.batches_into_epoch += 1
        self.state.tokens += inputs.num_tokens

    def _fraction(self) -> float:
        options = self._options
        if options.train_steps:
            return self.state.steps / options.train_steps
        return self.state.seconds / (options.train_minutes * 60)

    def _schedule(self) -> float:
        """Factor on the learning rate: linear warm-up, then a cosine to 2 %."""
        done = min(1.0, self._fraction())
        warmup = self._options.warmup
        if done < warmup:
            return max(0.02, done / warmup)
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup)))

    def _point(self, sums: StepStatistics) -> dict[str, float]:
        """Averages over some steps."""
        loss = sums.loss / sums.steps
        if not math.isfinite(loss):
            raise ModelError(f"training diverged at step {self.state.steps}, loss {loss}: lower the learning rate")
        per_step = [alive / max(1.0, tried) for alive, tried in zip(sums.alive[1:], sums.tried, strict=True)]
        point = {"step": float(self.state.steps), "seconds": self.state.seconds, "loss": loss}
        point["cross_entropy"] = sums.cross_entropy[0] / sums.steps
        # As if every text position were an anchor, at the usual draft_len.
        reached = 1.0
        point["accepted_len"] = 1.0
        for rate in per_step[:_HELD_OUT_DRAFT_LEN]:
            reached *= rate
            point["accepted_len"] += reached
        return point


def read_checkpoint(path: Path, fingerprint: str) -> dict[str, Any] | None:
    """A checkpoint's content, None if there is none. ModelError if it is of another run or not readable."""
    if not path.exists():
        return None
    try:
        # The optimiser's state and numpy arrays are more than weights; the file is the user's own.
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    except (OSError, RuntimeError, EOFError) as error:
        raise ModelError(f"{path}: cannot be read ({error}); remove it to begin anew") from error
    if content.get("fingerprint") != fingerprint:
        raise ModelError(f"{path}: of a run with other options or another model; choose another --out or remove it")
    return content


def new_trainer(
    target: TargetView,
    corpus: Sequence[Conversation],
    rope: dict[str, Any],
    options: TrainOptions,
    fingerprint: str,
    content: dict[str, Any] | None,
) -> Trainer:
    """A trainer at the beginning, or where a checkpoint's `content` left off."""
    decoder = target.decoder
    config = decoder.config
    inner = options.intermediate_size or config.intermediate_size
    if content is None:
        size = options.draft_vocab_size or largest_draft_vocab(config, inner, options.max_bytes)
        counts = token_counts(corpus, config.vocab_size)
        vocab = choose_draft_vocab(counts, size, config.eos_token_ids)
        feature_rms = captured_rms(target, corpus, options)
    else:
        vocab = DraftVocab(np.asarray(content["target_ids"]), float(content["coverage"]))
        feature_rms = content["feature_rms"].to(decoder.device)
    head = initial_head(
        head_config(config, rope, vocab.target_ids.size, inner),
        decoder,
        vocab,
        feature_rms,
        decoder.device,
        options.seed,
    )
    trainer = Trainer(target, head, vocab, feature_rms, options, fingerprint)
    if content is not None:
        trainer.restore(content)
    return trainer


def captured_rms(target: TargetView, corpus: Sequence[Conversation], options: TrainOptions) -> torch.Tensor:
    """Root mean square of every captured feature over some answers: [A * H] float32, never near 0."""
    sample = sorted(corpus[: min(len(corpus), 64)], key=lambda item: item.tokens.size)
    squares, rows = torch.zeros(()), 0
    for start in range(0, len(sample), 16):
        batch = make_batch(sample[start : start + 16], options.max_len)
        token_ids = torch.from_numpy(batch.token_ids).to(target.decoder.device)
        _, captured = target.run(token_ids)
        chosen = captured[torch.from_numpy(batch.answers.reshape(-1)).to(captured.device)].float()
        squares = squares.to(captured.device) + chosen.square().sum(0)
        rows += chosen.shape[0]
    rms = (squares / max(1, rows)).sqrt()
    parts = rms.view(3, -1)
    return torch.maximum(parts, parts.median(1, keepdim=True).values * 0.05).clamp(min=1e-6).reshape(-1)
