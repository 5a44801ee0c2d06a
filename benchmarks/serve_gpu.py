"""How fast is the whole stack on a GPU, beside transformers on the same GPU, weights, prompts and dtype?

    python -m benchmarks.serve_gpu [--model NAME] [--config configs/gpu.yaml] [--tokens 128] [--rounds 3] [--streams 32]

Starts the three services as `outrider up` does, then, round by round: transformers' greedy `generate` and its assisted
generation (prompt lookup) with one prompt; the stack with one stream, drafting and not; transformers' `generate` on a
batch of all prompts (assisted generation takes no batch); the stack with as many streams. bf16, whole requests (prefill
and HTTP included), past the end token. Then a second stack, in fp32, and transformers in fp32: every answer must have
the same tokens. Everything shares the GPU under one MPS daemon, and runs in turn. What counts are the ratios. A table,
then JSON. `--device cpu` is a dry run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.serve import PROMPTS, ROOT, Served, fetch
from benchmarks.shared_gpu import has_gpu, shared_gpu

LOOKUP_TOKENS = 10  # transformers' own advice for prompt lookup
EXACT_TOKENS = 48
EXACT_PROMPTS = 4
WARM_TOKENS = 24
ENDINGS = (
    "",
    " Answer step by step.",
    " Give one example as well.",
    " Keep it short, then explain your answer in more detail.",
)


class Reference:
    """transformers' generate on `device`."""

    def __init__(self, directory: str, device: str, dtype: torch.dtype) -> None:
        self._device = device
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval().to(device)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory, padding_side="left")

    def prompts(self, count: int) -> list[list[int]]:
        """`count` conversations as token ids."""
        texts = [question + ending for ending in ENDINGS for question in PROMPTS]
        return [
            list(
                self._tokenizer.apply_chat_template(
                    [{"role": "user", "content": texts[index % len(texts)]}],
                    add_generation_prompt=True,
                    return_dict=True,
                )["input_ids"]
            )
            for index in range(count)
        ]

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], num_tokens: int, **how: Any) -> list[list[int]]:
        """Greedy tokens of all prompts, as one batch, padded on the left."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=self._device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        output = self._model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            **how,
        )
        return [[int(token) for token in row[longest:]] for row in output]


def token_ids(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["outrider"]["token_ids"])


@contextmanager
def stack(config: Path, directory: str, device: str, dtype: str) -> Iterator[Served]:
    """The config's stack in `dtype`, starting."""
    sections = yaml.safe_load(config.read_text())
    for name in ("target", "drafter"):
        sections[name]["dtype"] = dtype
        if device == "cpu":  # a dry run: what is not of a CPU goes
            sections[name] = {k: v for k, v in sections[name].items() if k not in ("device", "attention", "num_blocks")}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "config.yaml"
        path.write_text(yaml.safe_dump(sections))
        served = Served(path, directory, Path(scratch), wait=False)
        try:
            yield served
        finally:
            served.close()


def speeds(
    server: Served, reference: Reference, num_tokens: int, rounds: int, num_streams: int, console: Console
) -> dict[str, Any]:
    """Tokens per second of every way, medians over rounds, and the ratios within rounds."""
    prompts = reference.prompts(num_streams)
    last: dict[str, list[dict[str, Any]]] = {}

    def served(name: str, chosen: list[list[int]], count: int, draft_len: int | None) -> None:
        last[name] = server.complete_all(chosen, count, draft_len)

    found: dict[str, list[float]] = {}
    for number in range(-1, rounds):
        count = num_tokens if number >= 0 else WARM_TOKENS  # the first round warms everything up
        one = [prompts[number % len(prompts)]]
        ways: dict[str, tuple[int, Callable[[], Any]]] = {
            "1: generate": (1, partial(reference.generate, one, count)),
            "1: assisted": (1, partial(reference.generate, one, count, prompt_lookup_num_tokens=LOOKUP_TOKENS)),
            "1: outrider, drafting": (1, partial(served, "1", one, count, None)),
            "1: outrider, no drafts": (1, partial(served, "1 plain", one, count, 0)),
            f"{num_streams}: generate": (num_streams, partial(reference.generate, prompts, count)),
            f"{num_streams}: outrider, drafting": (num_streams, partial(served, "all", prompts, count, None)),
            f"{num_streams}: outrider, no drafts": (num_streams, partial(served, "all plain", prompts, count, 0)),
        }
        for name, (streams, call) in ways.items():
            start = time.perf_counter()
            call()
            if number >= 0:
                found.setdefault(name, []).append(streams * num_tokens / (time.perf_counter() - start))
        if number >= 0:
            console.print(", ".join(f"{name} {values[-1]:.0f}" for name, values in found.items()), highlight=False)

    def ratio(over: str, *under: str) -> float:
        best = [max(values) for values in zip(*(found[name] for name in under), strict=True)]
        return float(round(statistics.median(a / b for a, b in zip(found[over], best, strict=True)), 3))

    usage = [answer["usage"]["outrider"] for answer in last["all"]]
    accepted, many = sum(entry["accepted_tokens"] for entry in usage), num_streams
    return {
        "tok_s": {name: round(statistics.median(values), 1) for name, values in found.items()},
        "one_stream_over_better": ratio("1: outrider, drafting", "1: generate", "1: assisted"),
        "many_streams_over_generate": ratio(f"{many}: outrider, drafting", f"{many}: generate"),
        "drafting_over_not": ratio("1: outrider, drafting", "1: outrider, no drafts"),
        "drafting_over_not_many": ratio(f"{many}: outrider, drafting", f"{many}: outrider, no drafts"),
        "mean_accepted_len": round(many * num_tokens / (many * num_tokens - accepted), 3),
        "streams": many,
    }


def exact(server: Served, reference: Reference, num_tokens: int) -> dict[str, Any]:
    """In fp32: do stack and transformers give the same tokens, one stream, several, with drafts and without?"""
    prompts = reference.prompts(EXACT_PROMPTS)
    expected = [reference.generate([prompt], num_tokens)[0] for prompt in prompts]
    plain, drafting = (
        [token_ids(answer) for answer in server.complete_all(prompts, num_tokens, draft_len)] for draft_len in (0, None)
    )
    alone = token_ids(server.complete(prompts[0], num_tokens, None))
    same = [plain == expected, drafting == expected, alone == expected[0]]
    return {"identical": all(same), "no_drafts": same[0], "drafting": same[1], "alone": same[2]}


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "gpu.yaml")
    parser.add_argument("--device", default="cuda" if has_gpu() else "cpu")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=32)
    options = parser.parse_args()
    console = Console(stderr=True)
    directory = fetch(options.model)
    dtype = torch.bfloat16 if options.device != "cpu" else torch.float32
    device = options.device
    with ExitStack() as running:
        running.enter_context(shared_gpu(torch.device(device)))
        names = [str(kind).removeprefix("torch.") for kind in (dtype, torch.float32)]
        stacks = [running.enter_context(stack(options.config, directory, device, name)) for name in names]
        reference = Reference(directory, device, dtype)
        for one in stacks:
            one.wait_ready()
        result = speeds(stacks[0], reference, options.tokens, options.rounds, options.streams, console)
        reference = Reference(directory, device, torch.float32)
        result["fp32"] = exact(stacks[1], reference, min(options.tokens, EXACT_TOKENS))
    result |= {"dtype": str(dtype), "device": options.device, "tokens": options.tokens, "rounds": options.rounds}
    table = Table("streams: way", "tokens/s", title=f"{Path(directory).name}, {dtype}, greedy, {options.device}")
    for name, speed in result["tok_s"].items():
        table.add_row(name, f"{speed:.1f}")
    Console(width=100).print(table)
    for key in ("one_stream_over_better", "many_streams_over_generate", "drafting_over_not", "drafting_over_not_many"):
        print(f"{key.replace('_', ' ')}: {result[key]:.2f}")
    print(f"tokens a step: {result['mean_accepted_len']:.2f}; same tokens in fp32: {result['fp32']['identical']}")
    print(json.dumps(result))
    if not result["fp32"]["identical"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
