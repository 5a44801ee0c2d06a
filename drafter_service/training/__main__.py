"""How is training started? `python -m drafter_service.training train | eval | prompts`, see --help of each.

Exit codes: 0 done; 2 something given cannot be used (one line on stderr says what); 3 the sitting ended before the
training did (give the same command again).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from drafter_service.training.chat_format import load_chat_format
from drafter_service.training.evaluate import evaluate, load_for_evaluation
from drafter_service.training.interviews import InterviewOptions
from drafter_service.training.loss import LossOptions
from drafter_service.training.options import TrainOptions, default_device
from drafter_service.training.prompt_sets import SET_NAMES, parse_sets, training_prompts
from drafter_service.training.report import print_table, results_json
from drafter_service.training.session import EvaluationOptions, run_training
from drafter_service.training.stack_evaluation import evaluate_stack
from drafter_service.training.step_cost import measure_step_cost
from engine.errors import ConfigError, OutriderError

_WRITING_SHARE, _TRAINING_SHARE = 0.35, 0.6
NOT_COMPLETE = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parsed = _parser().parse_args(arguments)
    try:
        commands = {"train": _train, "eval": _eval, "prompts": _prompts}
        return commands[parsed.command](parsed)
    except OutriderError as error:
        print(f"{error.kind}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130


def _train(args: argparse.Namespace) -> int:
    defaults = TrainOptions()
    options = replace(
        defaults,
        generate_minutes=_first(args.generate_minutes, args.minutes * _WRITING_SHARE),
        train_minutes=_first(args.train_minutes, args.minutes * _TRAINING_SHARE),
        generate_tokens=args.generate_tokens,
        train_steps=args.train_steps,
        num_seats=args.num_seats,
        max_len=args.max_len,
        batch_tokens=max(args.batch_tokens, args.max_len),
        learning_rate=args.learning_rate,
        muon=args.muon,
        draft_vocab_size=args.draft_vocab_size,
        intermediate_size=args.intermediate_size,
        max_bytes=args.max_bytes,
        seed=args.seed,
        sitting_minutes=args.sitting_minutes,
        interview=replace(InterviewOptions(), max_answer=min(InterviewOptions().max_answer, args.max_len // 2)),
        loss=LossOptions(args.draft_steps, args.step_decay, args.dead_weight),
    )
    sets = () if args.no_eval else tuple(item.first(args.num_prompts) for item in parse_sets(args.prompt_set))
    evaluation = EvaluationOptions(sets, (0.0, 1.0), args.draft_len, args.max_tokens)
    outcome = run_training(args.model, args.out, args.prompts, options, evaluation, _device(args.device))
    if outcome.results:
        print_table(outcome.results, None, f"Acceptance, draft_len {args.draft_len}")
    facts = {name: value for name, value in outcome.report["facts"].items() if name != "table"}
    summary: dict[str, object] = {
        "complete": outcome.complete,
        "out": str(args.out),
        **facts,
        **results_json(outcome.results, None),
    }
    if outcome.report["held_out"]:
        summary["held_out_accepted_len"] = [outcome.report["held_out"][index]["accepted_len"] for index in (0, -1)]
    print(json.dumps(summary))
    return 0 if outcome.complete else NOT_COMPLETE


def _eval(args: argparse.Namespace) -> int:
    sets = [item.first(args.num_prompts) for item in parse_sets(args.prompt_set)]
    if args.stack:
        stack_results = evaluate_stack(args.stack, sets, args.temperature, args.draft_len, args.max_tokens, args.seed)
        print_table(stack_results, None, f"{args.stack}, draft_len {args.draft_len}, one stream")
        return _write_json(results_json(stack_results, None), args.json)
    if args.model is None or args.drafter is None:
        raise ConfigError("model", "--model and --drafter are needed, or --stack URL")
    device = _device(args.device)
    head, target = load_for_evaluation(args.model, args.drafter, torch.float32, device)
    chat = load_chat_format(args.model)
    seats = args.num_seats or (256 if device.type == "cuda" else 16)
    results = evaluate(
        head, target, chat, sets, args.temperature, args.draft_len, args.max_tokens, seats, seed=args.seed
    )
    head.pack()
    cost = measure_step_cost(head, target, args.draft_len) if args.draft_len else None
    print_table(results, cost, f"Acceptance, draft_len {args.draft_len}")
    return _write_json(results_json(results, cost), args.json)


def _prompts(args: argparse.Namespace) -> int:
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in training_prompts(args.per_generator)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} prompts in {args.out}", file=sys.stderr)
    return 0


def _write_json(content: dict[str, object], path: Path | None) -> int:
    """To the file where one is named, and on stdout as the last line."""
    text = json.dumps(content)
    if path is not None:
        path.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def _first(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else float(value)


def _device(name: str | None) -> torch.device:
    if name is None:
        return default_device()
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError("device", f"{name!r} is not a device") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m drafter_service.training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="write training text with the target, train a head, measure it")
    defaults, loss = TrainOptions(), LossOptions()
    train.add_argument("--model", type=Path, required=True, help="the target: a Hugging Face directory")
    train.add_argument("--out", type=Path, required=True, help="where the head goes; OUT/work keeps the run's state")
    train.add_argument("--prompts", type=Path, nargs="*", default=[], help="own prompts: text, one a line, or JSONL")
    train.add_argument("--minutes", type=float, default=20.0, help="wall time of the whole run (default 20)")
    train.add_argument("--generate-minutes", type=float, help="of which writing (default 35 %%)")
    train.add_argument("--train-minutes", type=float, help="of which training (default 60 %%)")
    train.add_argument("--generate-tokens", type=int, default=0, help="end writing after so many answer tokens instead")
    train.add_argument("--train-steps", type=int, default=0, help="end training after so many steps instead")
    train.add_argument("--sitting-minutes", type=float, default=0.0, help="stop then, to be continued (exit code 3)")
    train.add_argument("--num-seats", type=int, default=0, help="texts written at once (default: by memory)")
    train.add_argument("--max-len", type=int, default=defaults.max_len, help="longest conversation, in tokens")
    train.add_argument("--batch-tokens", type=int, default=defaults.batch_tokens)
    train.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    train.add_argument(
        "--muon",
        action=argparse.BooleanOptionalAction,
        default=defaults.muon,
        help="inner matrices by Muon rather than AdamW (default: yes)",
    )
    train.add_argument("--draft-steps", type=int, default=loss.num_steps, help="draft steps unrolled in training")
    train.add_argument("--step-decay", type=float, default=loss.step_decay)
    train.add_argument("--dead-weight", type=float, default=loss.dead_weight)
    train.add_argument("--draft-vocab-size", type=int, default=0, help="default: as large as --max-bytes allows")
    train.add_argument("--intermediate-size", type=int, default=0, help="the layer's MLP width (default: the target's)")
    train.add_argument("--max-bytes", type=int, default=defaults.max_bytes, help="of the bf16 checkpoint")
    train.add_argument("--no-eval", action="store_true", help="do not measure the head at the end")
    measure = commands.add_parser("eval", help="measure a head on prompt sets")
    measure.add_argument("--model", type=Path, help="the target: a Hugging Face directory")
    measure.add_argument("--drafter", type=Path, help="the head's directory")
    measure.add_argument("--stack", metavar="URL", help="measure a running stack instead, e.g. http://127.0.0.1:8000")
    measure.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    measure.add_argument("--num-seats", type=int, default=0, help="answers written at once")
    measure.add_argument("--json", type=Path, help="write the results there too")
    for command in (train, measure):
        command.add_argument("--device", help="cpu, cuda, ... (default: a GPU where there is one)")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--draft-len", type=int, default=4, help="drafts a step when measuring (default 4)")
        command.add_argument("--max-tokens", type=int, default=256, help="longest answer when measuring (default 256)")
        command.add_argument("--num-prompts", type=int, default=0, help="of each set, evenly spread (default: all)")
        names = ", ".join(SET_NAMES)
        command.add_argument(
            "--prompt-set", nargs="+", default=list(SET_NAMES), help=f"{names}, or NAME=FILE (default: all three)"
        )
    prompts = commands.add_parser("prompts", help="make training prompts from public generators and writing tasks")
    prompts.add_argument("--out", type=Path, required=True)
    prompts.add_argument("--per-generator", type=int, default=120)
    return parser


if __name__ == "__main__":
    sys.exit(main())
