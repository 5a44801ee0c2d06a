"""What is the least time that memory leaves for a step, and how busy was the GPU?

The floor of a step is the bytes that it cannot avoid reading (weights once, the KV cache of its rows once) over the
bandwidth of a copy, read plus written, measured in the same run. `BusySampler` asks the driver which share of the time
a kernel ran.
"""

from __future__ import annotations

import statistics
import threading
import time
from types import TracebackType
from typing import Any

import torch

from drafter_service.eagle3.config import Eagle3Config
from engine.model_config import ModelConfig

COPY_BYTES = 1 << 30
HOST_COPY_BYTES = 1 << 27
SAMPLE_S = 0.1


def copy_bandwidth(device: torch.device, repeats: int = 20) -> float:
    """Bytes per second, read plus written, of a copy that no cache holds."""
    if device.type != "cuda":
        return _host_copy_bandwidth(repeats)
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    target.copy_(source)
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1e3)
    del source, target
    torch.cuda.empty_cache()
    return 2.0 * COPY_BYTES / statistics.median(times)


def _host_copy_bandwidth(repeats: int) -> float:
    source = torch.ones(HOST_COPY_BYTES, dtype=torch.uint8)
    target = source.clone()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return 2.0 * HOST_COPY_BYTES / statistics.median(times)


def _layer_weights(hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, layer_input: int) -> int:
    return (layer_input * (heads + 2 * kv_heads) + heads * hidden) * head_dim + 3 * hidden * inner


def target_step_bytes(model: ModelConfig, item_size: int, rows: int, context_len: int) -> int:
    """Weights of all layers and of the output layer, and the KV cache of `rows` rows of `context_len` tokens."""
    layer = _layer_weights(
        model.hidden_size,
        model.intermediate_size,
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        model.hidden_size,
    )
    weights = model.num_layers * layer + model.vocab_size * model.hidden_size
    kv = 2 * model.num_layers * rows * context_len * model.num_kv_heads * model.head_dim
    return (weights + kv) * item_size


def proposal_bytes(head: Eagle3Config, item_size: int, rows: int, context_len: int, draft_len: int) -> int:
    """An EAGLE-3 head's: `fc` once, its layer, its output layer and its KV cache once per draft.

    Of the draft prefill only the keys and values count, which the first draft's layer reads again.
    """
    layer = _layer_weights(
        head.hidden_size,
        head.intermediate_size,
        head.num_heads,
        head.num_kv_heads,
        head.head_dim,
        2 * head.hidden_size,
    )
    fc = head.num_captured * head.target_hidden_size * head.hidden_size
    kv = 2 * rows * context_len * head.num_kv_heads * head.head_dim
    return (fc + draft_len * (layer + head.draft_vocab_size * head.hidden_size + kv)) * item_size


class BusySampler:
    """`with` it: meanwhile a thread samples the driver's utilisation of GPU `index` (share of time with a kernel).

    `share` afterwards: the mean, 0..1; None where there is no GPU, or no NVML package to ask.
    """

    def __init__(self, index: int | None = 0) -> None:
        self.share: float | None = None
        self._values: list[float] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._nvml: Any = None
        try:
            import pynvml
        except ModuleNotFoundError:
            return
        if index is None:
            return
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError:
            return
        self._nvml = pynvml

    def __enter__(self) -> BusySampler:
        if self._nvml is not None:
            self._values = []
            self._stop.clear()
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            kept = self._values[2:]  # the driver's first values look back to before we began
            self.share = round(statistics.fmean(kept), 3) if kept else None

    def memory_used(self) -> int | None:
        """Bytes of the GPU's memory that are taken, by whomever."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used) if self._nvml is not None else None

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._values.append(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100)
