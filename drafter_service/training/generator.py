"""How does the target write a lot of text quickly?

Many sequences at once over a dense cache, one token each a step. A prompt is run token by token through the same step
as the text that follows it (its next token is given instead of sampled), so one captured graph does everything and a
seat whose text is finished takes the next job at once. Prompts are short; the tokens this wastes are fewer than a
prefill path would cost in idle seats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from drafter_service.training.dense_attention import decode_plans, dense_cache
from engine.decoder import Decoder

_LOOP_WINDOW = 64


@dataclass(frozen=True, slots=True)
class Job:
    """One text to write. temperature 0: greedy. min_p: tokens below this share of the likeliest are never sampled.

    tag: whatever the asker wants back with the result.
    """

    prompt: tuple[int, ...]
    max_new: int
    temperature: float
    min_p: float = 0.0
    tag: object = None


@dataclass(frozen=True, slots=True)
class Written:
    """A finished text. tokens: what came after the prompt, a stop token included. reason: stop | length | loop."""

    job: Job
    tokens: tuple[int, ...]
    reason: str


class BatchGenerator:
    """Runs jobs on `num_seats` sequences of at most `max_len` tokens.

    Owns the dense KV cache: num_seats * max_len * 2 * layers * KV heads * head_dim values of the decoder's dtype.
    stop_loops: end a text whose last 64 tokens repeat the ones up to 64 before (small models, decoding greedily, end
    there).
    """

    def __init__(
        self,
        decoder: Decoder,
        num_seats: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        stop_loops: bool,
        burst: int = 16,
    ) -> None:
        self._decoder = decoder
        self._num_seats, self._max_len, self._burst = num_seats, max_len, burst
        self._device, self._stop_loops = device, stop_loops
        self._cache = dense_cache(decoder.config, num_seats, max_len, dtype, device)
        self._tokens = torch.zeros((num_seats, max_len), dtype=torch.int64, device=device)
        self._positions = torch.zeros(num_seats, dtype=torch.int64, device=device)
        self._prompt_lens = torch.ones(num_seats, dtype=torch.int64, device=device)
        self._limits = torch.ones(num_seats, dtype=torch.int64, device=device)
        self._temperatures = torch.zeros((num_seats, 1), device=device)
        self._log_min_p = torch.full((num_seats, 1), float("-inf"), device=device)
        self._done = torch.ones(num_seats, dtype=torch.bool, device=device)
        self._stops = torch.tensor(sorted(decoder.config.eos_token_ids), dtype=torch.int64, device=device)
        self._plans = decode_plans(decoder.config, self._positions)
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._graph: torch.cuda.CUDAGraph | None = None
        self.steps = 0
        self.tokens_written = 0

    @torch.inference_mode()
    def run(self, jobs: Iterable[Job], should_stop: Callable[[], bool] = lambda: False) -> Iterator[Written]:
        """Yield texts as they finish. `jobs` is asked again after every burst, so it may depend on what was yielded
        (an iterator that has run dry is asked again too).

        Ends when `jobs` has run dry and every seat is done, or soon after `should_stop()` (texts under way are
        dropped).
        """
        source = iter(jobs)
        seats: list[Job | None] = [None] * self._num_seats
        finished: list[Written] = []
        while True:
            self._fill(seats, source)
            stop = should_stop()
            busy = any(seats) and not stop
            if busy:
                for _ in range(self._burst):
                    self._step()
            yield from finished  # a GPU works on the burst while the asker takes these
            if not busy and (stop or not finished):
                self._done.fill_(True)
                return
            finished = list(self._harvest(seats)) if busy else []

    def _fill(self, seats: list[Job | None], source: Iterator[Job]) -> None:
        """Give every free seat the next job, as far as there are any."""
        taken: list[int] = []
        for seat, held in enumerate(seats):
            if held is not None:
                continue
            job = next(source, None)
            if job is None:
                break
            if not 0 < len(job.prompt) < self._max_len:
                raise ValueError(f"a prompt of {len(job.prompt)} tokens in texts of at most {self._max_len}")
            seats[seat] = job
            taken.append(seat)
        if not taken:
            return
        held_jobs = [job for seat in taken if (job := seats[seat]) is not None]
        width = max(len(job.prompt) for job in held_jobs)
        prompts = torch.zeros((len(taken), width), dtype=torch.int64)
        for row, job in enumerate(held_jobs):
            prompts[row, : len(job.prompt)] = torch.tensor(job.prompt)
        index = torch.tensor(taken, device=self._device)
        self._tokens[index, :width] = prompts.to(self._device)
        self._positions[index] = 0
        self._done[index] = False

        def put(target: torch.Tensor, values: list[float]) -> None:
            target.view(-1)[index] = torch.tensor(values, device=self._device, dtype=torch.float64).to(target.dtype)

        put(self._prompt_lens, [len(job.prompt) for job in held_jobs])
        put(self._limits, [min(self._max_len, len(job.prompt) + job.max_new) for job in held_jobs])
        put(self._temperatures, [job.temperature for job in held_jobs])
        log_min_p = torch.tensor([max(job.min_p, 1e-30) for job in held_jobs], dtype=torch.float64).log()
        self._log_min_p.view(-1)[index] = log_min_p.to(self._device, torch.float32)

    def _step(self) -> None:
        self.steps += 1
        if self._device.type != "cuda":
            self._run_step()
            return
        if self._graph is None:
            self._capture()
        assert self._graph is not None
        self._graph.replay()

    def _capture(self) -> None:
        """Record the step once. Warm-up and capture run on finished seats, which they leave as they were."""
        saved = self._done.clone()
        self._done.fill_(True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._run_step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)
        with torch.cuda.graph(graph):
            self._run_step()
        self._done.copy_(saved)
        self._graph = graph

    def _run_step(self) -> None:
        """One token for every seat: a prompt's own next token, or one sampled; in place, without the host."""
        ids = self._tokens.gather(1, self._positions[:, None])[:, 0]
        output = self._decoder.forward(ids, self._positions, self._plans, self._cache)
        logits = self._decoder.logits(output.hidden).float()
        # Gumbel-max: argmax(logits + temperature * noise); the cut of min_p is in the same units.
        logits.masked_fill_(logits < logits.amax(1, keepdim=True) + self._log_min_p * self._temperatures, float("-inf"))
        noise = torch.empty_like(logits).exponential_(generator=self._generator).log_()
        sampled = logits.addcmul_(noise, self._temperatures, value=-1.0).argmax(1)
        following = self._positions + 1
        in_prompt = following < self._prompt_lens
        slot = following.clamp(max=self._max_len - 1)[:, None]
        given = self._tokens.gather(1, slot)[:, 0]
        running = ~self._done
        token = torch.where(running & ~in_prompt, sampled, given)
        self._tokens.scatter_(1, slot, token[:, None])
        stopped = (token[:, None] == self._stops).any(1) & ~in_prompt
        self._positions.copy_(torch.where(running, following, self._positions))
        self._done |= stopped | (following + 1 >= self._limits)

    def _harvest(self, seats: list[Job | None]) -> Iterator[Written]:
        looping = self._looping() if self._stop_loops else torch.zeros_like(self._done)
        ended = self._done | looping
        self._done |= looping
        held = torch.tensor([job is not None for job in seats], device=self._device)
        index = (ended & held).nonzero()[:, 0]
        if not index.numel():
            return
        rows = self._tokens[index].cpu().numpy()
        lengths = (self._positions[index] + 1).tolist()
        loops = looping[index].tolist()
        stops = set(self._stops.tolist())
        for seat, row, length, loop in zip(index.tolist(), rows, lengths, loops, strict=True):
            job = seats[seat]
            assert job is not None
            seats[seat] = None
            tokens = tuple(int(token) for token in row[len(job.prompt) : length])
            self.tokens_written += len(tokens)
            stopped = bool(tokens) and tokens[-1] in stops
            yield Written(job, tokens, "stop" if stopped else "loop" if loop else "length")

    def _looping(self) -> torch.Tensor:
        """[B] bool: the last W tokens equal the W tokens d before them, for some d in 1..W (W = 64), all of them
        sampled.
        """
        window = _LOOP_WINDOW
        if self._max_len < 2 * window:
            return torch.zeros_like(self._done)
        offsets = torch.arange(-2 * window + 1, 1, device=self._device)
        tail = self._tokens.gather(1, (self._positions[:, None] + offsets).clamp(min=0)).to(torch.int32)
        shifted = tail.unfold(1, window, 1)
        same = (shifted[:, :-1] == shifted[:, -1:]).all(-1).any(-1)
        return same & ~self._done & (self._positions - self._prompt_lens >= 2 * window)
