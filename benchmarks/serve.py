"""How fast is the whole stack, beside transformers' own generate on the same weights, dtype and machine?

    python -m benchmarks.serve [--model NAME] [--tokens 96] [--rounds 3] [--config configs/quickstart.yaml]

Starts the three services, then alternates, round by round, so that a machine whose speed drifts slows all of them
alike: transformers' greedy generate; the stack with draft_len 0, one stream; the same with the default draft_len;
eight streams with draft_len 0. Every answer is compared with transformers' tokens. Figures are whole-request tokens
per second (prefill included); what counts are the ratios. A table, then JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.console import Console
from rich.table import Table

from gateway.stack.settings import free_ports

ROOT = Path(__file__).resolve().parent.parent
READY_DEADLINE_S = 180.0
NUM_STREAMS = 8
PROMPTS = (
    "Explain why the sky is blue to a child.",
    "Write a Python function that merges two sorted lists.",
    "List five things to check before a long bicycle tour.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it take? Show your steps.",
    "Summarise the plot of Romeo and Juliet.",
    "What is the difference between a list and a tuple in Python?",
    "Write a short letter asking a neighbour to water my plants.",
    "Name three causes of inflation and explain each.",
)


class Served:
    """A running stack and its REST address. wait: until it serves; else the caller does.

    All requests share one client, from any thread, whose connections stay open: making a client, which reads the
    system's certificates, takes tens of milliseconds, and would count as the server's.
    """

    def __init__(self, config: Path, model: str, directory: Path, wait: bool = True) -> None:
        sections = yaml.safe_load(config.read_text())
        ports = free_ports(4)
        sections["model"] = model
        sections["target"]["listen"] = sections["gateway"]["target"] = f"127.0.0.1:{ports[0]}"
        sections["drafter"]["listen"] = sections["gateway"]["drafter"] = f"127.0.0.1:{ports[1]}"
        sections["gateway"].update(rest=f"127.0.0.1:{ports[2]}", grpc=f"127.0.0.1:{ports[3]}")
        path = directory / "bench.yaml"
        path.write_text(yaml.safe_dump(sections))
        self.rest = f"http://127.0.0.1:{ports[2]}"
        self._log = open(directory / "stack.log", "wb")  # noqa: SIM115 - closed in `close`, with the process that writes it
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gateway.cli", "up", str(path)], cwd=ROOT, stdout=self._log, stderr=subprocess.STDOUT
        )
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.Client(base_url=self.rest, timeout=300, limits=limits)
        self._model = ""
        self._log_path = directory / "stack.log"
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Until it serves; ends the program with the stack's last words when it does not."""
        end = time.monotonic() + READY_DEADLINE_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                if self._client.get("/health").status_code == 200:
                    self._model = str(self._client.get("/v1/models").json()["data"][0]["id"])
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)  # between two polls of another process
        self.close()
        raise SystemExit(f"the stack did not come up:\n{self._log_path.read_text(errors='replace')[-3000:]}")

    def complete(
        self, prompt_ids: list[int], num_tokens: int, draft_len: int | None, ignore_eos: bool = True
    ) -> dict[str, Any]:
        """One greedy completion, by default past the end token; returns token ids and usage."""
        body: dict[str, Any] = {"prompt": prompt_ids, "max_tokens": num_tokens, "temperature": 0}
        body["ignore_eos"] = ignore_eos
        if draft_len is not None:
            body["draft_len"] = draft_len
        answer = self._client.post("/v1/completions", json=body | {"model": self._model})
        answer.raise_for_status()
        return dict(answer.json())

    def complete_all(self, prompts: list[list[int]], num_tokens: int, draft_len: int | None) -> list[dict[str, Any]]:
        """`complete` for all of them at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, num_tokens, draft_len), prompts))

    def metrics(self) -> dict[str, float]:
        """What `GET /metrics` tells, by sample."""
        lines = self._client.get("/metrics").text.splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def close(self) -> None:
        """Stop all services."""
        self._client.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(10)
        self._log.close()


class Transformers:
    """transformers' generate, fp32, greedy."""

    def __init__(self, directory: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.prompts = [
            list(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
                )["input_ids"]
            )
            for text in PROMPTS
        ]

    def generate(self, prompt_ids: list[int], num_tokens: int) -> list[int]:
        ids = self._torch.tensor([prompt_ids])
        with self._torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        return [int(token) for token in output[0, len(prompt_ids) :]]


def fetch(model: str) -> str:
    """The model's directory on this machine."""
    command = [sys.executable, "-m", "engine.fetch", model]
    fetched = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return fetched.stdout.strip().splitlines()[-1]


def _token_ids(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["outrider"]["token_ids"])


def measure(served: Served, reference: Transformers, num_tokens: int, rounds: int, console: Console) -> dict[str, Any]:
    """Alternate the four ways, `rounds` times. Speeds in tokens per second, per round."""
    speeds: dict[str, list[float]] = {"transformers": [], "draft_len_0": [], "drafting": [], "eight_streams": []}
    identical, accepted, drafted, verify_steps, tokens = True, 0, 0, 0, 0
    reference.generate(reference.prompts[0], 8)
    served.complete(reference.prompts[0], 8, None)
    for index in range(rounds):
        prompt = reference.prompts[index % len(reference.prompts)]
        start = time.perf_counter()
        expected = reference.generate(prompt, num_tokens)
        speeds["transformers"].append(num_tokens / (time.perf_counter() - start))
        for name, draft_len in (("draft_len_0", 0), ("drafting", None)):
            start = time.perf_counter()
            answer = served.complete(prompt, num_tokens, draft_len)
            speeds[name].append(num_tokens / (time.perf_counter() - start))
            identical &= _token_ids(answer) == expected
        usage = answer["usage"]["outrider"]
        accepted, drafted = accepted + usage["accepted_tokens"], drafted + usage["drafted_tokens"]
        tokens += num_tokens
        verify_steps += num_tokens - usage["accepted_tokens"]
        start = time.perf_counter()
        served.complete_all(reference.prompts[:NUM_STREAMS], num_tokens, 0)
        speeds["eight_streams"].append(NUM_STREAMS * num_tokens / (time.perf_counter() - start))
        console.print(f"round {index + 1} of {rounds}: " + ", ".join(f"{k} {v[-1]:.1f}" for k, v in speeds.items()))

    def ratio(over: str, under: str) -> float:
        return statistics.median(a / b for a, b in zip(speeds[over], speeds[under], strict=True))

    return {
        "tok_s": {name: round(statistics.median(values), 2) for name, values in speeds.items()},
        "draft_len_0_over_transformers": round(ratio("draft_len_0", "transformers"), 3),
        "drafting_over_draft_len_0": round(ratio("drafting", "draft_len_0"), 3),
        "eight_streams_over_one": round(ratio("eight_streams", "draft_len_0"), 3),
        "mean_accepted_len": round(tokens / verify_steps, 3),
        "accepted_tokens": accepted,
        "drafted_tokens": drafted,
        "identical": identical,
        "tokens": num_tokens,
        "rounds": rounds,
    }


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    console = Console(stderr=True)
    directory = fetch(options.model)
    with tempfile.TemporaryDirectory() as scratch:
        served = Served(options.config, directory, Path(scratch))
        try:
            result = measure(served, Transformers(directory), options.tokens, options.rounds, console)
        finally:
            served.close()
    table = Table("way", "tokens/s", title=f"{os.path.basename(directory)}, fp32, {os.cpu_count()} cores, greedy")
    for name, speed in result["tok_s"].items():
        table.add_row(name.replace("_", " "), f"{speed:.1f}")
    Console().print(table)
    for key in (
        "draft_len_0_over_transformers",
        "drafting_over_draft_len_0",
        "eight_streams_over_one",
        "mean_accepted_len",
    ):
        print(f"{key.replace('_', ' ')}: {result[key]:.2f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
