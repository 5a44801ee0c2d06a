from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AdmitStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADMIT_STATUS_UNSPECIFIED: _ClassVar[AdmitStatus]
    ADMIT_STATUS_OK: _ClassVar[AdmitStatus]
    ADMIT_STATUS_NO_SEAT: _ClassVar[AdmitStatus]
    ADMIT_STATUS_INVALID: _ClassVar[AdmitStatus]
ADMIT_STATUS_UNSPECIFIED: AdmitStatus
ADMIT_STATUS_OK: AdmitStatus
ADMIT_STATUS_NO_SEAT: AdmitStatus
ADMIT_STATUS_INVALID: AdmitStatus

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "seeded", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "num_logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SEEDED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    seeded: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    num_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., seeded: bool = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., num_logprobs: _Optional[int] = ...) -> None: ...

class AdmitRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "token_ids", "prompt_len", "max_total_len", "sampling", "channel_id", "mid_stream")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_LEN_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    MID_STREAM_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_len: int
    max_total_len: int
    sampling: SamplingParams
    channel_id: str
    mid_stream: bool
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_len: _Optional[int] = ..., max_total_len: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., channel_id: _Optional[str] = ..., mid_stream: bool = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("request_id", "epoch", "status", "cached_len", "field", "detail", "capacity")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CACHED_LEN_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    status: AdmitStatus
    cached_len: int
    field: str
    detail: str
    capacity: Capacity
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., status: _Optional[_Union[AdmitStatus, str]] = ..., cached_len: _Optional[int] = ..., field: _Optional[str] = ..., detail: _Optional[str] = ..., capacity: _Optional[_Union[Capacity, _Mapping]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("request_id", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Released(_message.Message):
    __slots__ = ("request_id", "epoch", "capacity")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    capacity: Capacity
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., capacity: _Optional[_Union[Capacity, _Mapping]] = ...) -> None: ...

class Capacity(_message.Message):
    __slots__ = ("free_seats", "free_blocks")
    FREE_SEATS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    free_seats: int
    free_blocks: int
    def __init__(self, free_seats: _Optional[int] = ..., free_blocks: _Optional[int] = ...) -> None: ...

class RowPlan(_message.Message):
    __slots__ = ("request_id", "epoch", "context_len", "query_len", "verify_len", "draft_len", "samples")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    QUERY_LEN_FIELD_NUMBER: _ClassVar[int]
    VERIFY_LEN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LEN_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    context_len: int
    query_len: int
    verify_len: int
    draft_len: int
    samples: bool
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., context_len: _Optional[int] = ..., query_len: _Optional[int] = ..., verify_len: _Optional[int] = ..., draft_len: _Optional[int] = ..., samples: bool = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("seq", "channel_id", "channel_epoch", "rows", "drafts_from_seq", "deadline_ms", "ahead")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FROM_SEQ_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    seq: int
    channel_id: str
    channel_epoch: int
    rows: _containers.RepeatedCompositeFieldContainer[RowPlan]
    drafts_from_seq: int
    deadline_ms: int
    ahead: int
    def __init__(self, seq: _Optional[int] = ..., channel_id: _Optional[str] = ..., channel_epoch: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[RowPlan, _Mapping]]] = ..., drafts_from_seq: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., ahead: _Optional[int] = ...) -> None: ...

class RegionDescriptor(_message.Message):
    __slots__ = ("name", "kind", "handle", "offset", "shape", "dtype", "device_uuid")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    handle: bytes
    offset: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    device_uuid: str
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., handle: _Optional[bytes] = ..., offset: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., device_uuid: _Optional[str] = ...) -> None: ...

class ChannelDescriptor(_message.Message):
    __slots__ = ("channel_id", "epoch", "kind", "control", "regions", "depth", "max_rows", "max_tokens", "max_draft_len", "hidden_width", "vocab_size", "max_blocks_per_row", "block_size", "num_blocks", "draft_probs")
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_LEN_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_WIDTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_PER_ROW_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBS_FIELD_NUMBER: _ClassVar[int]
    channel_id: str
    epoch: int
    kind: str
    control: RegionDescriptor
    regions: _containers.RepeatedCompositeFieldContainer[RegionDescriptor]
    depth: int
    max_rows: int
    max_tokens: int
    max_draft_len: int
    hidden_width: int
    vocab_size: int
    max_blocks_per_row: int
    block_size: int
    num_blocks: int
    draft_probs: bool
    def __init__(self, channel_id: _Optional[str] = ..., epoch: _Optional[int] = ..., kind: _Optional[str] = ..., control: _Optional[_Union[RegionDescriptor, _Mapping]] = ..., regions: _Optional[_Iterable[_Union[RegionDescriptor, _Mapping]]] = ..., depth: _Optional[int] = ..., max_rows: _Optional[int] = ..., max_tokens: _Optional[int] = ..., max_draft_len: _Optional[int] = ..., hidden_width: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_blocks_per_row: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., draft_probs: bool = ...) -> None: ...
