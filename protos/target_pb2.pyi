from protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RowStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_STATUS_UNSPECIFIED: _ClassVar[RowStatus]
    ROW_STATUS_OK: _ClassVar[RowStatus]
    ROW_STATUS_STARVED: _ClassVar[RowStatus]
    ROW_STATUS_UNKNOWN: _ClassVar[RowStatus]
    ROW_STATUS_SKIPPED: _ClassVar[RowStatus]
ROW_STATUS_UNSPECIFIED: RowStatus
ROW_STATUS_OK: RowStatus
ROW_STATUS_STARVED: RowStatus
ROW_STATUS_UNKNOWN: RowStatus
ROW_STATUS_SKIPPED: RowStatus

class TargetCommand(_message.Message):
    __slots__ = ("hello", "admit", "plan", "release")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    hello: TargetHello
    admit: _common_pb2.AdmitRequest
    plan: _common_pb2.StepPlan
    release: _common_pb2.Release
    def __init__(self, hello: _Optional[_Union[TargetHello, _Mapping]] = ..., admit: _Optional[_Union[_common_pb2.AdmitRequest, _Mapping]] = ..., plan: _Optional[_Union[_common_pb2.StepPlan, _Mapping]] = ..., release: _Optional[_Union[_common_pb2.Release, _Mapping]] = ...) -> None: ...

class TargetEvent(_message.Message):
    __slots__ = ("info", "admitted", "result", "released", "fault")
    INFO_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    info: TargetInfo
    admitted: _common_pb2.Admitted
    result: StepResult
    released: _common_pb2.Released
    fault: Fault
    def __init__(self, info: _Optional[_Union[TargetInfo, _Mapping]] = ..., admitted: _Optional[_Union[_common_pb2.Admitted, _Mapping]] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ..., released: _Optional[_Union[_common_pb2.Released, _Mapping]] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ...) -> None: ...

class TargetHello(_message.Message):
    __slots__ = ("gateway_id",)
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    def __init__(self, gateway_id: _Optional[str] = ...) -> None: ...

class TargetInfo(_message.Message):
    __slots__ = ("instance_id", "model", "vocab_size", "max_model_len", "block_size", "num_blocks", "num_seats", "max_step_tokens", "eos_token_ids", "max_verify_len")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEATS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_VERIFY_LEN_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    model: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    num_seats: int
    max_step_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_verify_len: int
    def __init__(self, instance_id: _Optional[str] = ..., model: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_seats: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_verify_len: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class RowResult(_message.Message):
    __slots__ = ("request_id", "epoch", "status", "token_ids", "num_accepted", "num_drafted", "context_len", "logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    status: RowStatus
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_accepted: int
    num_drafted: int
    context_len: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., status: _Optional[_Union[RowStatus, str]] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_accepted: _Optional[int] = ..., num_drafted: _Optional[int] = ..., context_len: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class RankLoad(_message.Message):
    __slots__ = ("num_tokens", "attention_work")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_WORK_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    attention_work: int
    def __init__(self, num_tokens: _Optional[int] = ..., attention_work: _Optional[int] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("seq", "rows", "capacity", "wait_ms", "forward_ms", "verify_ms", "total_ms", "drafts_missed", "launch_ms", "collective_ms", "ranks")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_MS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_MISSED_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_MS_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_MS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    rows: _containers.RepeatedCompositeFieldContainer[RowResult]
    capacity: _common_pb2.Capacity
    wait_ms: float
    forward_ms: float
    verify_ms: float
    total_ms: float
    drafts_missed: bool
    launch_ms: float
    collective_ms: float
    ranks: _containers.RepeatedCompositeFieldContainer[RankLoad]
    def __init__(self, seq: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[RowResult, _Mapping]]] = ..., capacity: _Optional[_Union[_common_pb2.Capacity, _Mapping]] = ..., wait_ms: _Optional[float] = ..., forward_ms: _Optional[float] = ..., verify_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., drafts_missed: bool = ..., launch_ms: _Optional[float] = ..., collective_ms: _Optional[float] = ..., ranks: _Optional[_Iterable[_Union[RankLoad, _Mapping]]] = ...) -> None: ...

class Fault(_message.Message):
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

class AttachRequest(_message.Message):
    __slots__ = ("drafter_id", "instance_id", "host_id", "kinds", "hidden_layers", "max_draft_len", "draft_probs", "metadata_source", "block_size", "num_blocks", "vocab_size", "device_uuid")
    DRAFTER_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_LEN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBS_FIELD_NUMBER: _ClassVar[int]
    METADATA_SOURCE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    drafter_id: str
    instance_id: str
    host_id: str
    kinds: _containers.RepeatedScalarFieldContainer[str]
    hidden_layers: _containers.RepeatedScalarFieldContainer[int]
    max_draft_len: int
    draft_probs: bool
    metadata_source: str
    block_size: int
    num_blocks: int
    vocab_size: int
    device_uuid: str
    def __init__(self, drafter_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., host_id: _Optional[str] = ..., kinds: _Optional[_Iterable[str]] = ..., hidden_layers: _Optional[_Iterable[int]] = ..., max_draft_len: _Optional[int] = ..., draft_probs: bool = ..., metadata_source: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., vocab_size: _Optional[int] = ..., device_uuid: _Optional[str] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("channel", "target_instance_id", "dtype", "hidden_size", "max_model_len")
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    TARGET_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    channel: _common_pb2.ChannelDescriptor
    target_instance_id: str
    dtype: str
    hidden_size: int
    max_model_len: int
    def __init__(self, channel: _Optional[_Union[_common_pb2.ChannelDescriptor, _Mapping]] = ..., target_instance_id: _Optional[str] = ..., dtype: _Optional[str] = ..., hidden_size: _Optional[int] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class DetachRequest(_message.Message):
    __slots__ = ("channel_id", "epoch")
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    channel_id: str
    epoch: int
    def __init__(self, channel_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class DetachReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RingEntry(_message.Message):
    __slots__ = ("channel_id", "epoch", "seq", "num_rows", "num_tokens", "tensors")
    class TensorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    channel_id: str
    epoch: int
    seq: int
    num_rows: int
    num_tokens: int
    tensors: _containers.ScalarMap[str, bytes]
    def __init__(self, channel_id: _Optional[str] = ..., epoch: _Optional[int] = ..., seq: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_tokens: _Optional[int] = ..., tensors: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class ReplyEntry(_message.Message):
    __slots__ = ("channel_id", "epoch", "seq", "num_rows", "tensors")
    class TensorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    channel_id: str
    epoch: int
    seq: int
    num_rows: int
    tensors: _containers.ScalarMap[str, bytes]
    def __init__(self, channel_id: _Optional[str] = ..., epoch: _Optional[int] = ..., seq: _Optional[int] = ..., num_rows: _Optional[int] = ..., tensors: _Optional[_Mapping[str, bytes]] = ...) -> None: ...
