"""Which calls of the CUDA driver are used, and what becomes of their errors?

The few functions of libcuda.so.1 that torch does not offer, through ctypes: the driver's binary interface is fixed, so
nothing here is tied to a version of CUDA or of torch. Names carry the suffix that cuda.h maps them to. Every failure
is a ChannelError with the call's name and the driver's own words.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint32, c_uint64, c_void_p

from engine.errors import ChannelError

IPC_HANDLE_BYTES = 64
IPC_LAZY_ENABLE_PEER_ACCESS = 1
HOST_REGISTER_PORTABLE = 1
HOST_REGISTER_DEVICEMAP = 2
STREAM_WAIT_GEQ = 0  # cyclic: waits until (int32)(*address - value) >= 0
STREAM_WRITE_DEFAULT = 0  # behind a memory barrier for all earlier work of the stream
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
NOT_READY = 600
LIBRARY = "libcuda.so.1"


class IpcMemHandle(ctypes.Structure):
    """CUipcMemHandle; passed by value."""

    _fields_ = (("data", c_ubyte * IPC_HANDLE_BYTES),)


class Uuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = (("data", c_ubyte * 16),)


_SIGNATURES: dict[str, tuple[object, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGetUuid_v2": (POINTER(Uuid), c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuIpcGetMemHandle": (POINTER(IpcMemHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), IpcMemHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostGetDevicePointer_v2": (POINTER(c_uint64), c_void_p, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cuEventDestroy_v2": (c_void_p,),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemsetD8Async": (c_uint64, c_ubyte, c_size_t, c_void_p),
    "cuStreamIsCapturing": (c_void_p, POINTER(c_int)),
    "cuStreamWaitValue32_v2": (c_void_p, c_uint64, c_uint32, c_uint),
    "cuStreamWriteValue32_v2": (c_void_p, c_uint64, c_uint32, c_uint),
}


class CudaLibrary:
    """libcuda, loaded and initialised. Holds no state of any device; one per user is fine."""

    def __init__(self) -> None:
        """ChannelError: no driver here, one too old, or one that does not start."""
        if sys.platform != "linux":
            raise ChannelError("kind: cuda_ipc needs Linux")
        try:
            # CDLL (not PyDLL): the interpreter lock is released while the driver works.
            library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise ChannelError(f"kind: cuda_ipc needs the CUDA driver: {error}") from error
        self._functions: dict[str, Callable[..., int]] = {}
        for name, arguments in _SIGNATURES.items():
            try:
                function = getattr(library, name)
            except AttributeError as error:
                raise ChannelError(f"kind: cuda_ipc needs a newer CUDA driver: {LIBRARY} has no {name}") from error
            function.argtypes = arguments
            function.restype = c_int
            self._functions[name] = function
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        """Call one function of _SIGNATURES. ChannelError when it does not succeed."""
        status = self._functions[name](*arguments)
        if status:
            raise ChannelError(f"{name}: {self.describe(status)}")

    def is_ready(self, name: str, *arguments: object) -> bool:
        """Call a function that may answer that something is still under way: False. ChannelError as for `call`."""
        status = self._functions[name](*arguments)
        if status not in (0, NOT_READY):
            raise ChannelError(f"{name}: {self.describe(status)}")
        return status == 0

    def describe(self, status: int) -> str:
        """The driver's name of an error, and its explanation."""
        texts = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            text = c_char_p()
            known = self._functions[function](status, ctypes.byref(text)) == 0
            texts.append(text.value.decode(errors="replace") if known and text.value is not None else "")
        return f"{texts[0] or f'CUDA error {status}'} ({texts[1] or 'unknown'})"
