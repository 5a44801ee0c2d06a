"""How does one GPU, in torch's own context, share memory with other processes and wait for them?

Memory comes from cuMemAlloc: plain device memory that can be exported whatever allocator torch is set to (torch's
expandable segments cannot). A mapping of another GPU's memory is a tensor of the reader's device: that is where the
kernels run that use it, over peer access.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

import torch

from engine.channel.stream_driver import DeviceExport, DevicePage
from engine.cuda.library import (
    EVENT_DISABLE_TIMING,
    HOST_REGISTER_DEVICEMAP,
    HOST_REGISTER_PORTABLE,
    IPC_HANDLE_BYTES,
    IPC_LAZY_ENABLE_PEER_ACCESS,
    STREAM_NON_BLOCKING,
    STREAM_WAIT_GEQ,
    STREAM_WRITE_DEFAULT,
    CudaLibrary,
    IpcMemHandle,
    Uuid,
)
from engine.cuda.streams import current_stream_of, device_index
from engine.errors import ChannelError

_log = logging.getLogger(__name__)

# The driver hands small allocations out of common blocks of this size and exports whole blocks: ours share with nobody.
BLOCK_BYTES = 2 << 20
LOW_32_BITS = 0xFFFFFFFF


class CudaDevice:
    """The StreamDriver of a CUDA device. Keeps the device's primary context, which is torch's, alive."""

    def __init__(self, device: torch.device, library: CudaLibrary | None = None) -> None:
        """ChannelError: not a CUDA device, or there is none of that number."""
        if device.type != "cuda" or not torch.cuda.is_available():
            raise ChannelError(f"kind: cuda_ipc needs a CUDA device, and {device} is none here")
        torch.cuda.init()
        index = device_index(device)
        self.device = torch.device("cuda", index)
        self._current_stream = current_stream_of(self.device)
        self._library = library or CudaLibrary()
        self._ordinal = _ordinal(self._library, index)
        self.uuid = _uuid(self._library, self._ordinal)
        with torch.cuda.device(self.device):
            torch.cuda.current_stream()  # torch makes the context, with its own settings
        context = c_void_p()
        self._library.call("cuDevicePrimaryCtxRetain", byref(context), self._ordinal)
        self._context = context.value
        # What was taken and not given back: (the function that gives it back, its argument).
        self.held: set[tuple[str, int]] = set()
        context_end = weakref.finalize(self, _quietly, self._library, "cuDevicePrimaryCtxRelease_v2", self._ordinal)
        context_end.atexit = False  # which would wait for streams that wait for nobody any more

    def allocate(self, num_bytes: int) -> DeviceExport:
        """See StreamDriver.allocate."""
        size = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
        address = c_uint64()
        with self._in_context():
            try:
                self._library.call("cuMemAlloc_v2", byref(address), size)
            except ChannelError as error:
                raise ChannelError(f"kind: cuda_ipc needs {size} bytes of {self.device}: {error}") from error
            release = self._holding("cuMemFree_v2", address.value)
            block = _Block(address.value, num_bytes, release)
            handle = IpcMemHandle()
            self._library.call("cuIpcGetMemHandle", byref(handle), address.value)
            self._zero(address.value, size)
        return DeviceExport(self._wrap(block), bytes(handle.data))

    def open(self, handle: bytes, num_bytes: int, uuid: str, on_closed: Callable[[], None]) -> torch.Tensor:
        """See StreamDriver.open."""
        if len(handle) != IPC_HANDLE_BYTES:
            raise ChannelError(f"handle: must have {IPC_HANDLE_BYTES} bytes, got {len(handle)}")
        if not self.can_reach(uuid):
            raise ChannelError(f"device_uuid: memory of {uuid!r} is out of reach of {self.device} ({self.uuid})")
        address = c_uint64()
        with self._in_context():
            self._library.call(
                "cuIpcOpenMemHandle_v2",
                byref(address),
                IpcMemHandle.from_buffer_copy(handle),
                IPC_LAZY_ENABLE_PEER_ACCESS,
            )
            release = self._holding("cuIpcCloseMemHandle", address.value)

            def close() -> None:
                release()
                on_closed()

            block = _Block(address.value, num_bytes, close)
            size = c_size_t()
            self._library.call("cuMemGetAddressRange_v2", byref(c_uint64()), byref(size), address.value)
        if size.value < num_bytes:
            raise ChannelError(f"handle: has {size.value} bytes, the description says {num_bytes}")
        return self._wrap(block)

    def can_reach(self, uuid: str) -> bool:
        """Whether kernels on this device can use memory of device `uuid`: it is this one, or a peer visible here."""
        if uuid == self.uuid:
            return True
        count = c_int()
        self._library.call("cuDeviceGetCount", byref(count))
        for index in range(count.value):
            other = _ordinal(self._library, index)
            if _uuid(self._library, other) == uuid:
                answer = c_int()
                self._library.call("cuDeviceCanAccessPeer", byref(answer), self._ordinal, other)
                return bool(answer.value)
        return False

    def register(self, buffer: mmap.mmap) -> DevicePage:
        """See StreamDriver.register."""
        first = ctypes.c_char.from_buffer(buffer)  # keeps the mapping alive and in its place
        host = ctypes.addressof(first)
        address = c_uint64()
        with self._in_context():
            self._library.call(
                "cuMemHostRegister_v2", host, len(buffer), HOST_REGISTER_PORTABLE | HOST_REGISTER_DEVICEMAP
            )
            page = _Page(address, first, self._holding("cuMemHostUnregister", host))
            self._library.call("cuMemHostGetDevicePointer_v2", byref(address), host, 0)
        return page

    def current_stream(self) -> Hashable:
        """See StreamDriver.current_stream. The driver's handle: torch's streams last as long as the process."""
        return self._current_stream()

    def wait_value(self, stream: Hashable, page: DevicePage, offset: int, value: int) -> None:
        """See StreamDriver.wait_value."""
        self._enqueue("cuStreamWaitValue32_v2", stream, page, ((offset, value),), STREAM_WAIT_GEQ)

    def write_values(self, stream: Hashable, page: DevicePage, values: Sequence[tuple[int, int]]) -> None:
        """See StreamDriver.write_values."""
        self._enqueue("cuStreamWriteValue32_v2", stream, page, values, STREAM_WRITE_DEFAULT)

    def mark(self, stream: Hashable) -> Callable[[], bool]:
        """See StreamDriver.mark."""
        assert isinstance(stream, int)
        # Not torch's: see recording.py.
        event = c_void_p()
        with self._in_context():
            self._library.call("cuEventCreate", byref(event), EVENT_DISABLE_TIMING)
            mark = _Mark(self._in_context, self._library, event)
            self._library.call("cuEventRecord", event, stream)
        return mark

    def _zero(self, address: int, num_bytes: int) -> None:
        """At once, in a stream of its own: any other may be waiting for a peer. torch's come from a pool, again and
        again.
        """
        stream = c_void_p()
        self._library.call("cuStreamCreate", byref(stream), STREAM_NON_BLOCKING)
        try:
            self._library.call("cuMemsetD8Async", address, 0, num_bytes, stream)
            self._library.call("cuStreamSynchronize", stream)
        finally:
            self._library.call("cuStreamDestroy_v2", stream)

    def _enqueue(
        self, function: str, stream: Hashable, page: DevicePage, values: Sequence[tuple[int, int]], flags: int
    ) -> None:
        assert isinstance(stream, int)
        assert isinstance(page, _Page)
        current = c_void_p()
        self._library.call("cuCtxGetCurrent", byref(current))
        with nullcontext() if current.value == self._context else self._in_context():
            capturing = c_int()
            self._library.call("cuStreamIsCapturing", stream, byref(capturing))
            if capturing.value:
                # The number would be frozen into the graph, and every replay but the first find it reached.
                raise ChannelError("channel: waits and publications cannot be captured in a graph")
            for offset, value in values:
                self._library.call(function, stream, page.address.value + offset, value & LOW_32_BITS, flags)

    def _wrap(self, block: _Block) -> torch.Tensor:
        """The block as a tensor that claims this device, whichever the memory lies on, and keeps the block alive."""
        with torch.inference_mode(False):
            tensor = torch.as_tensor(block, device=self.device)
        if tensor.data_ptr() != block.address:  # torch made a copy, which no other process would see
            raise ChannelError(f"torch {torch.__version__} cannot wrap memory of another device as a tensor")
        return tensor

    @contextmanager
    def _in_context(self) -> Iterator[None]:
        """Make our context the calling thread's for a while: any thread may come here, also one that has none yet."""
        self._library.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._library.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def _holding(self, function: str, argument: int) -> Callable[[], None]:
        """Note that something is held; the function returned gives it back, by `function(argument)`."""
        self.held.add((function, argument))

        def release() -> None:
            self.held.discard((function, argument))
            try:
                with self._in_context():
                    self._library.call(function, argument)
            except ChannelError as error:
                self.held.add((function, argument))
                _log.warning("%s: not released: %s", self.device, error)

        return release


class _Block:
    """Device memory at `address`; `free` is called when nobody holds it any more, a tensor over it included."""

    def __init__(self, address: int, num_bytes: int, free: Callable[[], None]) -> None:
        self.address = address
        self._num_bytes = num_bytes
        weakref.finalize(self, _aside, free).atexit = False  # a process that ends gives everything back

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self._num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 2}


class _Page:
    """See DevicePage."""

    def __init__(self, address: c_uint64, mapping: object, unregister: Callable[[], None]) -> None:
        self.address = address
        self._mapping = mapping
        self._close = weakref.finalize(self, unregister)
        self._close.atexit = False

    def close(self) -> None:
        self._close()


class _Mark:
    """A point of a stream: calling it tells whether the stream has passed it. ChannelError: the device has failed."""

    def __init__(
        self, in_context: Callable[[], AbstractContextManager[None]], library: CudaLibrary, event: c_void_p
    ) -> None:
        self._in_context = in_context
        self._library = library
        self._event = event
        weakref.finalize(self, _destroy_event, in_context, library, event).atexit = False

    def __call__(self) -> bool:
        with self._in_context():
            return self._library.is_ready("cuEventQuery", self._event)


def _destroy_event(
    in_context: Callable[[], AbstractContextManager[None]], library: CudaLibrary, event: c_void_p
) -> None:
    try:
        with in_context():
            library.call("cuEventDestroy_v2", event)
    except ChannelError as error:
        _log.warning("%s", error)


def _aside(free: Callable[[], None]) -> None:
    """Call it in a thread of its own: giving memory back waits for all streams of the process, those too that wait for
    a peer, and the last view may go in the thread that steps.
    """
    threading.Thread(target=free, name="give-back", daemon=True).start()


def _ordinal(library: CudaLibrary, index: int) -> int:
    device = c_int()
    library.call("cuDeviceGet", byref(device), index)
    return device.value


def _uuid(library: CudaLibrary, ordinal: int) -> str:
    """As nvidia-smi writes it."""
    raw = Uuid()
    library.call("cuDeviceGetUuid_v2", byref(raw), ordinal)
    digits = bytes(raw.data).hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _quietly(library: CudaLibrary, function: str, argument: int) -> None:
    try:
        library.call(function, argument)
    except ChannelError as error:
        _log.warning("%s", error)
