from protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DrafterCommand(_message.Message):
    __slots__ = ("hello", "open", "admit", "plan", "release")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    hello: DrafterHello
    open: OpenChannel
    admit: _common_pb2.AdmitRequest
    plan: _common_pb2.StepPlan
    release: _common_pb2.Release
    def __init__(self, hello: _Optional[_Union[DrafterHello, _Mapping]] = ..., open: _Optional[_Union[OpenChannel, _Mapping]] = ..., admit: _Optional[_Union[_common_pb2.AdmitRequest, _Mapping]] = ..., plan: _Optional[_Union[_common_pb2.StepPlan, _Mapping]] = ..., release: _Optional[_Union[_common_pb2.Release, _Mapping]] = ...) -> None: ...

class DrafterEvent(_message.Message):
    __slots__ = ("info", "opened", "admitted", "report", "released", "fault")
    INFO_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    info: DrafterInfo
    opened: ChannelOpened
    admitted: _common_pb2.Admitted
    report: DraftReport
    released: _common_pb2.Released
    fault: DraftFault
    def __init__(self, info: _Optional[_Union[DrafterInfo, _Mapping]] = ..., opened: _Optional[_Union[ChannelOpened, _Mapping]] = ..., admitted: _Optional[_Union[_common_pb2.Admitted, _Mapping]] = ..., report: _Optional[_Union[DraftReport, _Mapping]] = ..., released: _Optional[_Union[_common_pb2.Released, _Mapping]] = ..., fault: _Optional[_Union[DraftFault, _Mapping]] = ...) -> None: ...

class DrafterHello(_message.Message):
    __slots__ = ("gateway_id",)
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    def __init__(self, gateway_id: _Optional[str] = ...) -> None: ...

class DrafterInfo(_message.Message):
    __slots__ = ("instance_id", "drafter_id", "method", "max_draft_len", "version", "vocab_size")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_ID_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_LEN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    drafter_id: str
    method: str
    max_draft_len: int
    version: str
    vocab_size: int
    def __init__(self, instance_id: _Optional[str] = ..., drafter_id: _Optional[str] = ..., method: _Optional[str] = ..., max_draft_len: _Optional[int] = ..., version: _Optional[str] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class OpenChannel(_message.Message):
    __slots__ = ("target_address",)
    TARGET_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    target_address: str
    def __init__(self, target_address: _Optional[str] = ...) -> None: ...

class ChannelOpened(_message.Message):
    __slots__ = ("target_address", "ok", "channel_id", "channel_epoch", "kind", "target_instance_id", "detail")
    TARGET_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_EPOCH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TARGET_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    target_address: str
    ok: bool
    channel_id: str
    channel_epoch: int
    kind: str
    target_instance_id: str
    detail: str
    def __init__(self, target_address: _Optional[str] = ..., ok: bool = ..., channel_id: _Optional[str] = ..., channel_epoch: _Optional[int] = ..., kind: _Optional[str] = ..., target_instance_id: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class DraftReport(_message.Message):
    __slots__ = ("seq", "channel_id", "missed", "cold_request_ids", "num_drafted", "metadata_builds", "metadata_launches", "wait_ms", "prefill_ms", "draft_ms", "total_ms", "capacity")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    COLD_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    METADATA_BUILDS_FIELD_NUMBER: _ClassVar[int]
    METADATA_LAUNCHES_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    seq: int
    channel_id: str
    missed: bool
    cold_request_ids: _containers.RepeatedScalarFieldContainer[str]
    num_drafted: int
    metadata_builds: int
    metadata_launches: int
    wait_ms: float
    prefill_ms: float
    draft_ms: float
    total_ms: float
    capacity: _common_pb2.Capacity
    def __init__(self, seq: _Optional[int] = ..., channel_id: _Optional[str] = ..., missed: bool = ..., cold_request_ids: _Optional[_Iterable[str]] = ..., num_drafted: _Optional[int] = ..., metadata_builds: _Optional[int] = ..., metadata_launches: _Optional[int] = ..., wait_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., draft_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., capacity: _Optional[_Union[_common_pb2.Capacity, _Mapping]] = ...) -> None: ...

class DraftFault(_message.Message):
    __slots__ = ("kind", "detail", "seq", "request_id")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    kind: str
    detail: str
    seq: int
    request_id: str
    def __init__(self, kind: _Optional[str] = ..., detail: _Optional[str] = ..., seq: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...
