"""Do the kernels compile for a GPU, at the sizes that services run? Needs no GPU: a stand-in names the device.

    python -m tests.kernels.triton.compile_all

Every launcher is called as a service calls it, with tensors on the CPU; each launch is compiled down to machine code of
sm_90 instead of being run. Prints one line per compiled kernel: its name, registers, bytes spilled, bytes of shared
memory.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kernels.triton import (
    activation,
    advance,
    kv_write,
    metadata_fill,
    norm,
    prefill_inputs,
    rope,
    rope_kv_write,
    sampling,
    slot_mapping,
    target_inputs,
    verify,
)

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Hopper:
    """What Triton asks of a driver in order to compile."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def longs(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def metadata_kernels() -> None:
    for rows, tokens in ((1, 5), (64, 320)):
        starts, tables = ints(rows + 1), ints(rows, 2048)
        slot_mapping.compute_slot_mapping(longs(tokens), starts, tables, 16, 32768, longs(tokens))
        prefill_inputs.prepare_prefill_inputs(
            longs(tokens), starts, ints(rows), longs(rows), longs(rows), longs(tokens), ints(rows)
        )
        target_inputs.prepare_target_inputs(
            *(ints(99), longs(99), ints(rows), longs(7), ints(rows), longs(rows, 4), starts),
            *(torch.zeros(rows, dtype=torch.bool), longs(tokens), longs(tokens)),
        )
        target_inputs.commit_verdict(ints(99), longs(99), *(ints(rows) for _ in range(4)), longs(rows))
        for active in (None, torch.zeros(rows, dtype=torch.bool)):
            advance.advance_draft_step(longs(rows), ints(rows), longs(rows), tables, 16, 32768, active)
        metadata_fill.fill_metadata(
            *(ints(rows), starts, ints(rows), longs(tokens), ints(3, 99, 2048), [16, 16, 32], 32768),
            *(ints(rows + 1), ints(3, rows), ints(3, rows, 2048), longs(3, tokens)),
        )


def elementwise_kernels() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for heads, kv_heads, dim, hidden, inner in ((32, 8, 128, 4096, 14336), (9, 3, 64, 576, 1536)):
            x, weight = torch.zeros((5, hidden), dtype=dtype), torch.zeros(hidden, dtype=dtype)
            norm.rms_norm(x, weight, 1e-5)
            norm.rms_norm_residual(x, x, weight, 1e-5)
            activation.silu_mul(torch.zeros((5, 2 * inner), dtype=dtype))
            fused = torch.zeros((5, heads + 2 * kv_heads, dim), dtype=dtype)
            q, k, v = fused.split([heads, kv_heads, kv_heads], dim=1)
            cos = torch.zeros((5, dim), dtype=dtype)
            cache = torch.zeros((4, 16, kv_heads, dim), dtype=dtype)
            kv_write.write_kv(k, v, longs(5), cache, cache)
            rope.apply_rope(q, k, cos, cos)
            rope_kv_write.rope_kv_write(q, k, v, cos, cos, longs(5), cache, cache)


def sampling_kernels() -> None:
    for vocab in (128256, 49152, 997):
        logits, rows = torch.zeros((10, vocab)), longs(10)
        ones = torch.ones(10)
        sampling.gumbel_noise(rows, rows, 1, 33)
        sampling.gumbel_sample(logits, ones, rows, rows, 1)
        sampling.filter_logits(logits, ones, rows.to(torch.int32), ones, ones)
        drafts, starts, probs = longs(2, 4), ints(3), torch.zeros((2, 4, vocab))
        verify.verify_greedy(logits, starts, drafts)
        some = torch.zeros(2, dtype=torch.bool)
        for given, has in ((None, None), (probs, None), (probs, some)):
            verify.verify(logits, starts, drafts, ones[:2], rows[:2], rows[:2], some, given, has)


def resources(kernel: Any) -> tuple[int, int, int]:
    """(registers a thread, bytes spilled or indexed in local memory, bytes of shared memory) of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [_CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers = max(int(number) for number in re.findall(r"REG:(\d+)", text))
    stack = max(int(number) for number in re.findall(r"STACK:(\d+)", text))
    return registers, stack, int(kernel.metadata.shared)


def compiled(launches: Callable[[], None]) -> Iterator[tuple[str, Any]]:
    """Each different kernel that `launches` would have launched, compiled, with its name."""
    kernels: dict[int, tuple[str, Any]] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        kernels[id(kernel)] = (self.__name__, kernel)
        return kernel

    JITFunction.run = compile_only
    try:
        launches()
    finally:
        JITFunction.run = run
    yield from kernels.values()


def main() -> int:
    """Compile everything; 1 if a kernel spills registers."""
    triton.runtime.driver.set_active(Hopper())
    spilled = 0
    for launches in (metadata_kernels, elementwise_kernels, sampling_kernels):
        for name, kernel in compiled(launches):
            registers, stack, shared = resources(kernel)
            spilled += stack > 0
            print(f"{name:20} {registers:4} registers {stack:6} spilled {shared:7} shared")
    print(f"{spilled} kernels spill" if spilled else "no kernel spills")
    return int(spilled > 0)


if __name__ == "__main__":
    sys.exit(main())
