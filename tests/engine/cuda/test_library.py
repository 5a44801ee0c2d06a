"""The calls of the driver as ctypes sees them, against NVIDIA's own header (Triton's package has a copy)."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint32, c_uint64, c_void_p
from pathlib import Path

import pytest

from engine.cuda import library
from engine.cuda.library import IpcMemHandle, Uuid

TYPES: dict[str, object] = {
    "CUresult": c_int,
    "CUdevice": c_int,
    "CUdevice*": POINTER(c_int),
    "CUevent": c_void_p,
    "CUevent*": POINTER(c_void_p),
    "CUstreamCaptureStatus*": POINTER(c_int),
    "int": c_int,
    "int*": POINTER(c_int),
    "unsigned int": c_uint,
    "unsigned char": c_ubyte,
    "float*": POINTER(c_float),
    "cuuint32_t": c_uint32,
    "size_t": c_size_t,
    "size_t*": POINTER(c_size_t),
    "CUdeviceptr": c_uint64,
    "CUdeviceptr*": POINTER(c_uint64),
    "CUcontext": c_void_p,
    "CUcontext*": POINTER(c_void_p),
    "CUstream": c_void_p,
    "CUstream*": POINTER(c_void_p),
    "void*": c_void_p,
    "const void*": c_void_p,
    "const char**": POINTER(c_char_p),
    "CUipcMemHandle": IpcMemHandle,
    "CUipcMemHandle*": POINTER(IpcMemHandle),
    "CUuuid*": POINTER(Uuid),
}
# First versions that a newer one of the same arguments stands beside: every driver has them.
FIRST_VERSIONS = {"cuEventElapsedTime"}
CONSTANTS = {
    "CU_IPC_HANDLE_SIZE": library.IPC_HANDLE_BYTES,
    "CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS": library.IPC_LAZY_ENABLE_PEER_ACCESS,
    "CU_MEMHOSTREGISTER_PORTABLE": library.HOST_REGISTER_PORTABLE,
    "CU_MEMHOSTREGISTER_DEVICEMAP": library.HOST_REGISTER_DEVICEMAP,
    "CU_STREAM_WAIT_VALUE_GEQ": library.STREAM_WAIT_GEQ,
    "CUDA_ERROR_NOT_READY": library.NOT_READY,
    "CU_STREAM_WRITE_VALUE_DEFAULT": library.STREAM_WRITE_DEFAULT,
}


@pytest.fixture(scope="module")
def header() -> str:
    triton = importlib.util.find_spec("triton")
    path = Path(triton.origin or "").parent / "backends/nvidia/include/cuda.h" if triton is not None else Path()
    if not path.is_file():
        pytest.skip("no cuda.h: triton is not installed, or ships none")
    return path.read_text(errors="replace")


@pytest.mark.parametrize("name", sorted(library._SIGNATURES))
def test_every_call_is_declared_so(header: str, name: str) -> None:
    base = name.removesuffix("_v2")
    renamed = re.search(rf"^#define {base}\s+(?:__CUDA_API_PT[DS][SZ]\()?(\w+)\)?\s*$", header, re.MULTILINE)
    assert (renamed[1] if renamed and name not in FIRST_VERSIONS else base) == name
    declared = re.search(rf"^CUresult CUDAAPI {base}\(([^)]*)\);", header, re.MULTILINE)
    assert declared is not None
    arguments = [re.sub(r"\s*\b\w+$", "", argument.strip()) for argument in declared[1].split(",")]
    assert [TYPES[re.sub(r"\s+\*", "*", argument)] for argument in arguments] == list(library._SIGNATURES[name])


@pytest.mark.parametrize("name", sorted(CONSTANTS))
def test_constants_are_the_headers(header: str, name: str) -> None:
    found = re.search(rf"\b{name}\s*=?\s*(0x[0-9a-fA-F]+|\d+)", header)
    assert found is not None
    assert int(found[1], 0) == CONSTANTS[name]


def test_structures_have_the_headers_sizes() -> None:
    assert ctypes.sizeof(IpcMemHandle) == 64
    assert ctypes.sizeof(Uuid) == 16
