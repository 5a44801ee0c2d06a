"""How are a run's results told: the table on the terminal, the JSON, the model card?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from drafter_service.training.evaluate import SetResult
from drafter_service.training.stack_evaluation import StackResult
from drafter_service.training.step_cost import StepCost

_CARD = """---
base_model: {base_model}
library_name: outrider
license: {license}
tags: [eagle3, speculative-decoding]
---

# EAGLE-3 head for {model_name}

Drafts tokens for {model_name}; the output stays the target's own. Original EAGLE-3 layout (`config.json`,
`model.safetensors` in bf16): one decoder layer of hidden size {hidden_size} and MLP width {intermediate_size}, the
outputs of target layers {hidden_layers} fused, a draft vocabulary of {draft_vocab_size:,} tokens. {parameters:,}
parameters, {file_bytes:,} bytes. The token embedding is the target's and not in the file.

## Data

{conversations:,} conversations with {answer_tokens:,} answer tokens, every answer written by the target itself,
greedily ({greedy_share:.0%} of the conversations) or at temperatures {temperatures}. The questions are the target's
own, sampled from an empty user turn or a few first words; put together from parts written for this project
(at least {composed_share:.0%} of those that were not given); or given ({given}). Many have the forms in which the sets
below are asked (a fenced signature after "Complete the following Python function.", a word problem with an instruction
such as "Give the result as your final answer. Do not include units.", the template's own system message), so
acceptance on requests in quite other forms may be lower. No prompt of the sets is among them. The draft vocabulary
holds {coverage:.1%} of the answer tokens.

## Recipe

{train_steps} training steps of about {batch_tokens:,} tokens, padding included ({epochs:.1f} passes over the data),
{num_steps} draft steps unrolled, soft targets over the draft vocabulary, {optimizer},
learning rate {learning_rate:g} with a cosine. Writing the data took {generate_seconds:.0f} s, training
{train_seconds:.0f} s, on {device}.

## Acceptance

Tokens committed per verify step (the target's own included) and share of steps that accept draft 1, 2, ...;
answers of up to {max_new} tokens, `draft_len` {draft_len}. Chat is MT-Bench (both turns), code HumanEval, mathematics
GSM-Symbolic.

{table}

`outrider eval-drafter --model DIR --drafter DIR` measures this table again.
"""


def result_rows(
    results: Sequence[SetResult] | Sequence[StackResult], cost: StepCost | None
) -> tuple[list[str], list[list[str]]]:
    """Column heads and rows, as text."""
    draft_len = max((result.draft_len for result in results), default=0)
    heads = ["prompts", "temperature", "accepted length", *(f"draft {index + 1}" for index in range(draft_len))]
    stack = any(isinstance(result, StackResult) for result in results)
    heads += ["tok/s", "tok/s without", "speed-up", "identical"] if stack else ["in vocabulary"]
    if cost is not None:
        heads.append("expected speed-up")
    rows = []
    for result in results:
        row = [result.prompt_set, f"{result.temperature:g}", f"{result.mean_accepted_len:.2f}"]
        row += [f"{rate:.1%}" for rate in result.per_position]
        if isinstance(result, StackResult):
            same = "" if result.identical is None else "yes" if result.identical else "NO"
            row += [f"{result.tok_s:.1f}", f"{result.tok_s_no_draft:.1f}", f"{result.speedup:.2f} x", same]
        else:
            row.append(f"{result.vocab_coverage:.1%}")
        if cost is not None:
            row.append(f"{cost.speedup(result.mean_accepted_len):.2f} x")
        rows.append(row)
    return heads, rows


def print_table(results: Sequence[SetResult] | Sequence[StackResult], cost: StepCost | None, title: str) -> None:
    """The table on stdout."""
    heads, rows = result_rows(results, cost)
    table = Table(title=title, title_justify="left")
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=max(100, 12 * len(heads))).print(table)


def markdown_table(results: Sequence[SetResult] | Sequence[StackResult], cost: StepCost | None = None) -> str:
    """The same as markdown."""
    heads, rows = result_rows(results, cost)
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def results_json(results: Sequence[SetResult] | Sequence[StackResult], cost: StepCost | None) -> dict[str, Any]:
    """What `eval-drafter` writes: results, and the step cost where it was measured."""
    listed = []
    for result in results:
        item = asdict(result)
        if isinstance(result, StackResult):
            item["speedup"] = result.speedup
        elif cost is not None:
            item["expected_speedup"] = cost.speedup(result.mean_accepted_len)
        listed.append(item)
    return {"results": listed, "step_cost": None if cost is None else asdict(cost)}


def write_report(directory: Path, report: Mapping[str, Any]) -> None:
    """`training_report.json` in the head's directory."""
    (directory / "training_report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def write_model_card(directory: Path, facts: Mapping[str, Any]) -> None:
    """`README.md` in the head's directory, filled from the facts (see the template's names)."""
    (directory / "README.md").write_text(_CARD.format_map(facts), encoding="utf-8")
