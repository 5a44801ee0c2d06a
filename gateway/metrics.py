"""What does the gateway count and time, and under which Prometheus names?

One `GatewayMetrics` per gateway, on a registry that is passed in. Only the target loop, the drafter link and the
dispatcher write to it. Children of labelled metrics are looked up once, because the loop writes to them every step.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway.messages import Capacity, StepResult

_STEP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class GatewayMetrics:
    """All metrics of one gateway. Times in seconds. max_draft_len: positions that acceptance is counted at."""

    def __init__(self, registry: CollectorRegistry, max_draft_len: int) -> None:
        self.registry = registry
        self.drafts = Counter(
            "outrider_drafts", "Rows in which at least one draft token was verified", registry=registry
        )
        self.draft_tokens = Counter("outrider_draft_tokens", "Draft tokens verified", registry=registry)
        self.accepted_tokens = Counter(
            "outrider_accepted_tokens", "Draft tokens accepted, after trimming", registry=registry
        )
        self._accepted_at = Counter(
            "outrider_accepted_tokens_per_position",
            "Draft tokens accepted, after trimming, by their position in the draft (0: the first)",
            ["position"],
            registry=registry,
        )
        self._accepted_children = [self._accepted_at.labels(str(position)) for position in range(max_draft_len)]
        self.proposed_tokens = Counter(
            "outrider_proposed_tokens", "Draft tokens proposed by the drafter", registry=registry
        )
        self.missed_drafts = Counter(
            "outrider_missed_drafts", "Steps whose drafts did not come within the deadline", registry=registry
        )
        self.prompt_tokens = Counter("outrider_prompt_tokens", "Prompt tokens of started requests", registry=registry)
        self.cached_tokens = Counter(
            "outrider_cached_tokens", "Prompt tokens found in the prefix cache", registry=registry
        )
        self.generated_tokens = Counter("outrider_generated_tokens", "Tokens given out", registry=registry)
        self._finished = Counter("outrider_requests", "Requests ended, by how", ["outcome"], registry=registry)
        self.preemptions = Counter(
            "outrider_preemptions", "Placements given up because blocks ran out", registry=registry
        )
        self.resumptions = Counter(
            "outrider_resumptions", "Placements lost with the target and taken up again", registry=registry
        )
        self.steps = Counter("outrider_steps", "Steps whose verdict came", registry=registry)
        self.step_rows = Histogram(
            "outrider_step_rows",
            "Rows of a step",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
            registry=registry,
        )
        self._step_time = Histogram(
            "outrider_step_seconds",
            "Time of a step by service and part; gateway: total is from a verdict to the next plan, round_trip from a "
            "plan to its verdict",
            ["service", "part"],
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
        time = self._step_time.labels
        self.target_wait = time("target", "wait")
        self.target_forward = time("target", "forward")
        self.target_verify = time("target", "verify")
        self.target_total = time("target", "total")
        self.target_collectives = time("target", "collectives")
        self.drafter_wait = time("drafter", "wait")
        self.drafter_prefill = time("drafter", "prefill")
        self.drafter_draft = time("drafter", "draft")
        self.drafter_total = time("drafter", "total")
        self.gateway_total = time("gateway", "total")
        self.round_trip = time("gateway", "round_trip")
        self.rank_tokens = Counter(
            "outrider_rank_tokens", "Tokens run, by rank of a target that has several", ["rank"], registry=registry
        )
        self.rank_attention_work = Counter(
            "outrider_rank_attention_work",
            "Query-key pairs attended, by rank of a target that has several",
            ["rank"],
            registry=registry,
        )
        self.rank_imbalance = Histogram(
            "outrider_rank_imbalance_ratio",
            "Largest over mean of the ranks' shares of a step: tokens, attention_work (1: level)",
            ["of"],
            buckets=(1.01, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0),
            registry=registry,
        )
        self.waiting = Gauge("outrider_waiting_requests", "Requests in the queue", registry=registry)
        self.running = Gauge("outrider_running_requests", "Requests placed on the target", registry=registry)
        self.cache_use = Gauge(
            "outrider_cache_use_ratio", "Share of the target's cache blocks in use (0 to 1)", registry=registry
        )
        self.free_seats = Gauge("outrider_free_seats", "Seats free on the target", registry=registry)
        self.target_up = Gauge("outrider_target_up", "1 while the target is connected", registry=registry)
        self.drafter_up = Gauge("outrider_drafter_up", "1 while drafting is possible", registry=registry)
        self.request_latency = Histogram(
            "outrider_request_seconds",
            "From a request's submission to its last token",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.time_to_first_token = Histogram(
            "outrider_time_to_first_token_seconds",
            "From a request's submission to its first token",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.queue_time = Histogram(
            "outrider_queue_seconds",
            "From a request's submission to its first placement",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )

    def observe_step(self, result: StepResult, num_rows: int, round_trip_s: float) -> None:
        """One step's verdict."""
        self.steps.inc()
        self.step_rows.observe(num_rows)
        self.target_wait.observe(result.wait_ms / 1e3)
        self.target_forward.observe(result.forward_ms / 1e3)
        self.target_verify.observe(result.verify_ms / 1e3)
        self.target_total.observe(result.total_ms / 1e3)
        self.round_trip.observe(round_trip_s)
        if result.drafts_missed:
            self.missed_drafts.inc()
        if result.rank_loads:
            self._observe_ranks(result)

    def _observe_ranks(self, result: StepResult) -> None:
        self.target_collectives.observe(result.collective_ms / 1e3)
        shares = {"tokens": self.rank_tokens, "attention_work": self.rank_attention_work}
        for (name, counter), values in zip(shares.items(), zip(*result.rank_loads, strict=True), strict=True):
            for rank, value in enumerate(values):
                counter.labels(str(rank)).inc(value)
            if total := sum(values):
                self.rank_imbalance.labels(name).observe(max(values) * len(values) / total)

    def set_load(self, num_waiting: int, num_running: int) -> None:
        """Requests in the queue and on the target."""
        self.waiting.set(num_waiting)
        self.running.set(num_running)

    def set_capacity(self, capacity: Capacity | None, usable_blocks: int) -> None:
        """What the target has left; None: there is no target."""
        self.free_seats.set(0 if capacity is None else capacity.free_seats)
        self.cache_use.set(0 if capacity is None else 1 - capacity.free_blocks / usable_blocks)

    def count_start(self, queued_s: float, prompt_len: int, cached_len: int) -> None:
        """One request's first placement has begun."""
        self.queue_time.observe(queued_s)
        self.prompt_tokens.inc(prompt_len)
        self.cached_tokens.inc(cached_len)

    def count_row(self, num_drafted: int, num_accepted: int) -> None:
        """One verified row, already trimmed."""
        if num_drafted:
            self.drafts.inc()
            self.draft_tokens.inc(num_drafted)
        if num_accepted:
            self.accepted_tokens.inc(num_accepted)
            for child in self._accepted_children[:num_accepted]:
                child.inc()

    def count_end(self, outcome: str) -> None:
        """One request ended: "stop", "length", "cancelled", or the error's class name."""
        self._finished.labels(outcome).inc()
