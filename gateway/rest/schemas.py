"""Which JSON do the two generation endpoints take?

Field by field what OpenAI documents, plus what local engines usually add (`top_k`, `min_p`, `repetition_penalty`,
`stop_token_ids`, `ignore_eos`) and Outrider's `draft_len`. A field that OpenAI knows and this server cannot honour is
accepted only with the value that asks for nothing; an unknown field is an error. `null` is the same as leaving a
field out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LEN = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_MESSAGES = 4096
TOKEN_ID_LIMIT = 2**31


def fault(path: str, detail: str) -> PydanticCustomError:
    """A fault inside a field; `path` goes behind the field's own name (`[3].text`)."""
    return PydanticCustomError("field_fault", "{detail}", {"path": path, "detail": detail})


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < TOKEN_ID_LIMIT


def _check_token_ids(value: list[Any], path: str) -> list[int]:
    for index, token_id in enumerate(value):
        if not _is_token_id(token_id):
            raise fault(f"{path}[{index}]", "must be a token id")
    return value


def _check_prompt(value: object) -> list[str | list[int]]:
    """One prompt or several, each a text or token ids; becomes a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise fault("", "must be a string, a list of strings, a list of token ids, or a list of such lists")
    if not value:
        raise fault("", "must not be empty")
    if isinstance(value[0], int):
        return [_check_token_ids(value, "")]
    if len(value) > MAX_CHOICES:
        raise fault("", f"must be at most {MAX_CHOICES} prompts, got {len(value)}")
    prompts: list[str | list[int]] = []
    for index, part in enumerate(value):
        if isinstance(part, str) and isinstance(value[0], str):
            prompts.append(part)
        elif isinstance(part, list) and isinstance(value[0], list):
            prompts.append(_check_token_ids(part, f"[{index}]"))
        else:
            raise fault(f"[{index}]", "must be a string or a list of token ids, of the same kind as the others")
    return prompts


def _check_stop(value: object) -> list[str] | None:
    if value is None:
        return None
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list):
        raise fault("", "must be a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise fault("", f"must have at most {MAX_STOP_STRINGS} strings")
    for index, string in enumerate(strings):
        path = "" if isinstance(value, str) else f"[{index}]"
        if not isinstance(string, str):
            raise fault(path, "must be a string")
        if not 1 <= len(string) <= MAX_STOP_LEN:
            raise fault(path, f"must have 1 to {MAX_STOP_LEN} characters")
    return strings


def _check_logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise fault("", "must be an object from token ids to numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise fault("", f"must have at most {MAX_LOGIT_BIAS} entries")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and _is_token_id(int(key))):
            raise fault("", f"its keys must be token ids, not {key[:40]!r}")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise fault(f".{int(key)}", "must be a number from -100 to 100")
        biases[int(key)] = float(bias)
    return biases


def _check_content(value: object) -> str:
    """A message's content: a text, or text parts, which are joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise fault("", "must be a string or a list of text parts")
    texts: list[str] = []
    for index, part in enumerate(value):
        if not isinstance(part, dict):
            raise fault(f"[{index}]", "must be an object")
        if part.get("type") != "text":
            raise fault(f"[{index}].type", "only parts of type 'text' are supported")
        if not isinstance(part.get("text"), str):
            raise fault(f"[{index}].text", "must be a string")
        unknown = sorted(set(part) - {"type", "text"})
        if unknown:
            raise fault(f"[{index}].{unknown[0]}", "is not a field of a text part")
        texts.append(part["text"])
    return "".join(texts)


_STRING = {"type": "string"}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
Prompt = Annotated[
    list[str | list[int]],
    PlainValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                _STRING,
                {"type": "array", "items": _STRING},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS},
            ]
        }
    ),
]
Stop = Annotated[
    list[str] | None,
    PlainValidator(_check_stop),
    WithJsonSchema({"anyOf": [_STRING, {"type": "array", "items": _STRING, "maxItems": MAX_STOP_STRINGS}]}),
]
LogitBias = Annotated[
    dict[int, float] | None,
    PlainValidator(_check_logit_bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]
Content = Annotated[
    str,
    PlainValidator(_check_content),
    WithJsonSchema(
        {
            "anyOf": [
                _STRING,
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": _STRING},
                        "required": ["type", "text"],
                    },
                },
            ]
        }
    ),
]
TokenId = Annotated[int, Field(ge=0, lt=TOKEN_ID_LIMIT)]


class Schema(BaseModel):
    """Base of all: strict types, no unknown fields, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @classmethod
    def unsupported_fields(cls) -> frozenset[str]:
        """Fields of OpenAI's API that are accepted only where they ask for nothing."""
        return frozenset()


class StreamOptions(Schema):
    """Of a streamed answer."""

    include_usage: bool | None = Field(None, description="One more chunk at the end, with the whole request's usage.")
    include_obfuscation: bool | None = Field(None, description="Accepted; nothing is obfuscated.")


class GenerationRequest(Schema):
    """What both endpoints share."""

    model: str | None = Field(None, min_length=1, max_length=1024, description="Left out: the model served.")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    temperature: float | None = Field(None, ge=0, le=2, description="Default 1; 0 takes the most likely token.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=TOKEN_ID_LIMIT, description="0 or -1: off.")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="Choice i uses seed + i.")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: LogitBias = None
    stop: Stop = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool | None = Field(None, description="The model's own end tokens do not end the text.")
    draft_len: int | None = Field(
        None, ge=0, description="Tokens drafted a step, at most `max_draft_len` of `/v1/models`; 0: no speculation."
    )
    # Accepted and without effect here.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None

    @classmethod
    def unsupported_fields(cls) -> frozenset[str]:
        """See Schema."""
        return frozenset({"service_tier", "store"})


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: Prompt
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="Default 16, as in OpenAI's API.")
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, description="That many most likely tokens.")
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Only equal to n.")

    @classmethod
    def unsupported_fields(cls) -> frozenset[str]:
        """See Schema."""
        return super().unsupported_fields() | {"echo", "suffix"}


Role = Literal["system", "developer", "user", "assistant"]


def template_role(role: str) -> str:
    """The word that chat templates know for `role`: "developer" is OpenAI's newer one for "system"."""
    return "system" if role == "developer" else role


class ChatMessage(Schema):
    """One message of a conversation."""

    role: Role
    content: Content
    name: str | None = Field(None, max_length=256)
    # An assistant's answer may be sent back as it came.
    refusal: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ChatCompletionRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="Default: up to the model's length.")
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Handed to the model's chat template.")
    response_format: dict[str, Any] | None = Field(None, description='Only `{"type": "text"}`.')
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    audio: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None

    @classmethod
    def unsupported_fields(cls) -> frozenset[str]:
        """See Schema."""
        return super().unsupported_fields() | {
            "response_format",
            "tools",
            "tool_choice",
            "functions",
            "function_call",
            "modalities",
            "audio",
            "prediction",
            "reasoning_effort",
            "verbosity",
            "web_search_options",
        }
