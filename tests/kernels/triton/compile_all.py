"""Do the kernels compile for a GPU, at the sizes that services run? Needs no GPU: a stand-in names the device.

    python -m tests.kernels.triton.compile_all [--all]

Every launcher is called as a service calls it, with tensors on the CPU; each launch is compiled down to machine code of
sm_90 instead of being run. Prints one line per compiled kernel: its name, registers, bytes spilled, bytes of shared
memory.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kernels.triton import (
    activation,
    advance,
    append_anchors,
    argmax,
    attention,
    commit_rows,
    filter_rows,
    finish_reply,
    head_inputs,
    kv_write,
    linear,
    linear_choice,
    metadata_fill,
    norm,
    prefill_inputs,
    ring_entry,
    rope,
    rope_kv_write,
    sampling,
    slot_mapping,
    take_drafts,
    take_entry,
    target_inputs,
    verify,
)
from tests.kernels.entries import make_case
from tests.kernels.triton.device import call

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
    rows, tokens = 64, 320
    starts, tables = ints(rows + 1), ints(rows, 2048)
    slot_mapping.compute_slot_mapping(longs(tokens), starts, tables, 16, 32768, longs(tokens))
    prefill_inputs.prepare_prefill_inputs(
        longs(tokens), starts, ints(rows), longs(rows), longs(rows), longs(tokens), ints(rows)
    )
    target_inputs.prepare_target_inputs(
        *(ints(99), longs(99), ints(rows), longs(7), ints(rows), longs(rows, 4), starts),
        *(torch.zeros(rows, dtype=torch.bool), longs(tokens), longs(tokens)),
    )
    target_inputs.commit_verdict(
        ints(99), longs(99), ints(rows), ints(rows), ints(rows), ints(rows), last_tokens=longs(rows)
    )
    for active in (None, torch.zeros(rows, dtype=torch.bool)):
        advance.advance_draft_step(longs(rows), ints(rows), longs(rows), tables, 16, 32768, active)
    metadata_fill.fill_metadata(
        *(ints(rows), starts, ints(rows), longs(tokens), ints(3, 99, 2048), [16, 16, 32], 32768),
        *(ints(rows + 1), ints(3, rows), ints(3, rows, 2048), longs(3, tokens)),
    )


def target_step_kernels() -> None:
    rows, tokens, width = 64, 256, 3
    flags, header = torch.zeros(rows, dtype=torch.bool), longs(8)
    seats = (ints(rows), ints(rows), ints(rows), ints(rows), ints(rows))
    outputs = (ints(rows), ints(rows), longs(rows, width), ints(rows), longs(rows), flags, ints(1))
    for reply in ((None, None, None), (header, longs(rows, 7), None), (header, longs(rows, 7), flags)):
        call(take_drafts.take_drafts, *reply, 7, 1, rows, 128256, 4, *seats, ints(99), header, *outputs)
    commit_rows.commit_rows(
        *(longs(rows, width + 1), ints(rows), ints(rows), ints(rows), ints(rows), ints(rows), ints(1)),
        *(ints(99), longs(99), ints(rows), ints(rows), ints(rows), longs(rows), longs(rows, 5 + width + 1)),
    )
    for hidden_width in (0, 3 * 576, 3 * 4096):
        hidden = torch.zeros((tokens, hidden_width), dtype=torch.bfloat16) if hidden_width else None
        for tables in (None, ints(rows, 2048)):
            call(
                ring_entry.write_ring_entry,
                *(1, tokens, ints(rows + 1), ints(rows), ints(rows), ints(rows), ints(rows), ints(rows)),
                *(longs(rows), longs(rows), torch.zeros(rows), longs(rows), longs(tokens), longs(tokens)),
                *(longs(tokens), tables, hidden, header, ints(rows + 1), ints(rows), ints(rows), ints(rows)),
                *(ints(rows), longs(rows), longs(rows), torch.zeros(rows), longs(rows), longs(tokens)),
                *(longs(tokens), longs(tokens), ints(rows, 2048), hidden),
            )


def drafter_kernels() -> None:
    """What a step of the drafter begins and ends with, in both metadata sources."""
    for with_layout in (False, True):
        case = make_case(5, with_layout)
        arguments: tuple[Any, ...] = case.arguments()
        take_entry.take_entry(*arguments)
        append_anchors.append_anchors(case.taken, ints(99), ints(99), longs(99), longs(99), ints(99))
        has_probs = torch.zeros(9, dtype=torch.bool) if with_layout else None
        finish_reply.finish_reply(
            *(case.entry.header, 9, 3, 2, longs(7, 9).t(), case.taken, case.state),
            *(case.reply_header, longs(9, 7), has_probs),
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocab: int
    window: int | None = None


LLAMA_8B = Shape(32, 8, 128, 4096, 14336, 128256)
SMOLLM2 = Shape(9, 3, 64, 576, 1536, 49152)
MISTRAL_7B = Shape(32, 8, 128, 4096, 14336, 32768, window=4096)
LLAMA_70B = Shape(64, 8, 128, 8192, 28672, 128256)


def elementwise_kernels(shape: Shape, dtype: torch.dtype) -> None:
    x, weight = torch.zeros((5, shape.hidden), dtype=dtype), torch.zeros(shape.hidden, dtype=dtype)
    norm.rms_norm(x, weight, 1e-5)
    head_inputs.head_inputs(longs(5), x, x, weight, weight, 1e-5)
    norm.rms_norm_residual(x, x, weight, 1e-5)
    activation.silu_mul(torch.zeros((5, 2 * shape.inner), dtype=dtype))
    fused = torch.zeros((5, shape.heads + 2 * shape.kv_heads, shape.head_dim), dtype=dtype)
    q, k, v = fused.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    cos = torch.zeros((5, shape.head_dim), dtype=dtype)
    cache = torch.zeros((4, 16, shape.kv_heads, shape.head_dim), dtype=dtype)
    kv_write.write_kv(k, v, longs(5), cache, cache)
    rope.apply_rope(q, k, cos, cos)
    rope_kv_write.rope_kv_write(q, k, v, cos, cos, longs(5), cache, cache)


def sampling_kernels(shape: Shape) -> None:
    vocab = shape.vocab
    logits, rows = torch.zeros((10, vocab)), longs(10)
    ones = torch.ones(10)
    for count in (1, 10):
        for ids in (None, longs(vocab)):
            argmax.argmax(logits[:count], ids, longs(count, 2), longs(count))
    sampling.gumbel_noise(rows, rows, 1, 33)
    sampling.gumbel_sample(logits, ones, rows, rows, 1)
    sampling.filter_logits(logits, ones, rows.to(torch.int32), ones, ones)
    filter_rows.filter_many_rows(logits, ones, rows.to(torch.int32), ones, ones)
    drafts, starts, probs = longs(2, 4), ints(3), torch.zeros((2, 4, vocab))
    verify.verify_greedy(logits, starts, drafts)
    some = torch.zeros(2, dtype=torch.bool)
    for given, has in ((None, None), (probs, None), (probs, some)):
        verify.verify(logits, starts, drafts, ones[:2], rows[:2], rows[:2], some, given, has)


def attention_kernels(shape: Shape, dtype: torch.dtype, steps: Sequence[tuple[int, int]]) -> None:
    """steps: (rows, query tokens of each)."""
    # As on an H200.
    tiling = attention.choose_tiling(torch.device("cpu"), shape.kv_heads, shape.head_dim, dtype.itemsize)
    tiling = replace(tiling, num_programs=396)
    cache = torch.zeros((4, 16, shape.kv_heads, shape.head_dim), dtype=dtype)
    for rows, query_len in steps:
        q = torch.zeros((rows * query_len, shape.heads, shape.head_dim), dtype=dtype)
        attention.attend(
            *(q, cache, cache, ints(rows + 1), ints(rows), ints(rows, 2048), shape.head_dim**-0.5, shape.window),
            *(query_len, 32768, tiling),
        )


def linear_kernels() -> None:
    """Every tiling that is chosen for a weight."""
    counters = ints(9999)
    for (outs, ins, gated), steps in linear_choice.measured().items():
        weight = torch.zeros((1, ins), dtype=torch.bfloat16).expand(outs, ins)
        for rows, tiling in steps:
            if tiling is not None:
                x = torch.zeros((rows, ins), dtype=torch.bfloat16)
                linear.skinny_linear(x, weight, None, tiling, counters, gated)


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
    """Compile the kernels of one model shape, or with --all of several; 1 if one spills registers in bfloat16."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="several models' shapes, float32 too (minutes)")
    everything = parser.parse_args().all
    triton.runtime.driver.set_active(Hopper())
    half, single = torch.bfloat16, torch.float32
    jobs: list[tuple[str, Callable[[], None]]] = [("metadata", metadata_kernels), ("target step", target_step_kernels)]
    jobs.append(("drafter step", drafter_kernels))
    shapes = [LLAMA_8B, SMOLLM2, MISTRAL_7B, LLAMA_70B] if everything else [LLAMA_8B]
    steps = [(1, 1), (64, 1), (64, 5), (4, 16), (4, 512)] if everything else [(64, 5), (4, 512)]
    for shape in shapes:
        jobs.append(("sampling", partial(sampling_kernels, shape)))
        for dtype in (half, single) if everything else (half,):
            kind = str(dtype).removeprefix("torch.")
            jobs.append((f"elementwise {kind}", partial(elementwise_kernels, shape, dtype)))
            jobs.append((f"attention {kind}", partial(attention_kernels, shape, dtype, steps)))
    spilled = 0
    for label, launches in jobs:
        for name, kernel in compiled(launches):
            registers, stack, shared = resources(kernel)
            # Products in float32 serve equality tests: there, tiles that do not fit the registers are no fault.
            spilled += stack > 0 and label != "attention float32"
            print(f"{label:22} {name:20} {registers:4} registers {stack:6} spilled {shared:7} shared", flush=True)
    print(f"{spilled} kernels spill" if spilled else "no kernel spills that should not")
    return int(spilled > 0)


if __name__ == "__main__":
    sys.exit(main())
