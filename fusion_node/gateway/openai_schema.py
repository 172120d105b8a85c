"""The OpenAI API's chat completions as types: what a request may say, and what an answer says.

Every field is bounded. A field falls in one of three classes: *supported*, a field of ChatRequest; *ignored*, which
changes nothing about an answer; and *unsupported*, which is accepted only with the value that means "not wanted". What
is in none of them is refused by name, because a misspelt ``max_token`` that is silently ignored costs its author more.

Source: OpenAI API reference, "Create chat completion"; top_k, min_p and repetition_penalty as vLLM's server has them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from fusion_node.client.sampling import SamplingParams
from fusion_node.client.tokenizer import ChatMessage
from fusion_node.gateway.errors import ApiError, bad_request, unsupported

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_STOP_CHARACTERS = 256
"""A stop string is compared with the end of the text after every token."""

DEFAULT_MAX_TOKENS = 1024
"""Of an answer whose request does not say. The model's whole context, which the API's reference suggests, would make
every node reserve KV for it, and leave no room for the next user."""

DEFAULT_TEMPERATURE = 1.0

NOT_WANTED: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
}
"""Unsupported fields, and the values beside null that do not ask for them."""

IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
)

Name = Annotated[str, Meta(min_length=1, max_length=256)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class ContentPart(Struct, frozen=True):
    """A part of a message's content; only ``text`` is supported."""

    type: Annotated[str, Meta(max_length=64)]
    text: str | None = None

    def __repr__(self) -> str:
        return "ContentPart(…)"  # what people write is in no log, not even by accident


class Message(Struct, frozen=True):
    """One message. Fields that only an answer carries (refusal, annotations) may be sent back, and are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Meta(min_length=1, max_length=MAX_PARTS)] | None = None
    tool_calls: Raw | UnsetType = UNSET
    function_call: Raw | UnsetType = UNSET
    audio: Raw | UnsetType = UNSET

    def __repr__(self) -> str:
        return f"Message(role={self.role!r}, …)"


class StreamOptions(Struct, frozen=True):
    """How to stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatRequest(Struct, frozen=True):
    """The supported fields of a chat completion request; null is the same as absent."""

    model: Name
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return self.stream_options is not None and self.stream_options.include_usage is True

    def sampling(self, *, seed: int) -> SamplingParams:
        """How to sample.

        Args:
            seed: used when the request has none.
        """
        stop = self.stop
        return SamplingParams(
            max_tokens=self.max_completion_tokens or self.max_tokens or DEFAULT_MAX_TOKENS,
            temperature=DEFAULT_TEMPERATURE if self.temperature is None else self.temperature,
            # Nothing but the most probable token is left by the smallest top_p, as by 0.
            top_p=1.0 if self.top_p is None else max(self.top_p, 1e-9),
            # 0 and -1 mean "all" in vLLM's and llama.cpp's servers.
            top_k=self.top_k if self.top_k is not None and self.top_k > 0 else None,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            seed=seed if self.seed is None else self.seed,
            stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        )

    def conversation(self) -> list[ChatMessage]:
        """The messages as chat templates take them.

        Raises:
            ApiError: a message holds what is not supported.
        """
        return [_plain(message, f"messages[{index}]") for index, message in enumerate(self.messages)]


class StageUsage(Struct, frozen=True):
    """One node's part in an answer, times by its own clock except the round trip."""

    peer: str
    layers: str
    round_trip_ms: float
    compute_ms_per_step: float


class GuessesUsage(Struct, frozen=True):
    """Guesses that were made so many tokens ahead, where all tokens before were as guessed."""

    guessed: int
    right: int


class SpeculationUsage(Struct, frozen=True):
    """How tokens were guessed.

    ``acceptance`` is the share of first guesses that were right; ``by_depth`` has their counts by how many tokens ahead
    they were made, from 1 on.
    """

    mode: str
    acceptance: float | None
    rows_per_token: float
    depth: float
    latency_ms: float
    price_ms: float
    by_depth: tuple[GuessesUsage, ...] = ()


class FusionUsage(Struct, frozen=True):
    """How the swarm made an answer: an extension of the API, inside ``usage``."""

    plan: tuple[StageUsage, ...]
    time_to_first_token_s: float | None
    tokens_per_s: float | None
    seed: int
    speculation: SpeculationUsage | UnsetType = UNSET


class PromptTokensDetails(Struct, frozen=True):
    """Tokens of the prompt whose KV the nodes had from an earlier answer."""

    cached_tokens: int


class Usage(Struct, frozen=True):
    """Token counts; the end-of-sequence token is not counted."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    fusion: FusionUsage


class AnswerMessage(Struct, frozen=True):
    """The assistant's message."""

    content: str
    role: str = "assistant"
    refusal: None = None


class Choice(Struct, frozen=True):
    """The one answer."""

    message: AnswerMessage
    finish_reason: str
    index: int = 0
    logprobs: None = None


class Completion(Struct, frozen=True):
    """An answer that is not streamed."""

    id: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: Usage
    system_fingerprint: str
    object: str = "chat.completion"


class Delta(Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to the message."""

    role: str | None = None
    content: str | None = None


class ChunkChoice(Struct, frozen=True):
    """A chunk's part of the one answer."""

    delta: Delta
    finish_reason: str | None = None
    index: int = 0
    logprobs: None = None


class Chunk(Struct, frozen=True):
    """One event of a stream."""

    id: str
    created: int
    model: str
    choices: tuple[ChunkChoice, ...]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"


_REQUEST = msgspec.json.Decoder(ChatRequest)
_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_SUPPORTED = frozenset(ChatRequest.__struct_fields__)
_PATH = re.compile(r" - at `\$\.?(.*)`$")
_NOTHING = (b"null", b"[]", b"{}")


def parse_chat_request(body: bytes) -> ChatRequest:
    """Reads a request.

    Raises:
        ApiError: with status 400, when it is not one that this gateway can answer.
    """
    try:
        fields = _FIELDS.decode(body)
        for name, raw in fields.items():
            if name not in _SUPPORTED and name not in IGNORED:
                _check_not_wanted(name, msgspec.json.decode(raw))
        request = _REQUEST.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the request body is not JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise bad_request("the request body is nested too deeply", code="invalid_json") from None
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options needs stream: true", param="stream_options")
    return request


def _check_not_wanted(name: str, value: Any) -> None:
    if value is None:
        return
    allowed = NOT_WANTED.get(name)
    if allowed is None:
        shown = name[:64]
        raise ApiError(400, f"there is no field {shown!r}: leave it out", param=shown, code="unknown_parameter")
    # 1 == True in Python, and not in JSON.
    if any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed):
        return
    only = " or ".join(msgspec.json.encode(each).decode() for each in allowed)
    raise unsupported(name, f"{name} is not supported yet: leave it out" + (f", or send {only}" if only else ""))


def _invalid(error: msgspec.ValidationError) -> ApiError:
    text = str(error)
    path = _PATH.search(text)
    message = text if path is None else text[: path.start()]
    return bad_request(message if path is None else f"{path[1]}: {message}", param=path[1] if path else None)


def _plain(message: Message, at: str) -> ChatMessage:
    if message.role in ("tool", "function"):
        raise unsupported(f"{at}.role", f"{at}: messages of the role {message.role!r} are not supported yet")
    for name in ("tool_calls", "function_call", "audio"):
        raw = getattr(message, name)
        if raw is not UNSET and bytes(raw) not in _NOTHING:
            raise unsupported(f"{at}.{name}", f"{at}: {name} is not supported yet")
    # Templates know "system", which is what OpenAI's newer name stands for.
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": _text(message.content, f"{at}.content")}


def _text(content: str | list[ContentPart] | None, at: str) -> str:
    if content is None:
        raise bad_request(f"{at} is missing", param=at)
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.type != "text":
            raise unsupported(
                f"{at}[{index}].type", f"{at}[{index}]: content of the type {part.type!r} is not supported, only 'text'"
            )
        if part.text is None:
            raise bad_request(f"{at}[{index}].text is missing", param=f"{at}[{index}].text")
        texts.append(part.text)
    return "\n".join(texts)
