"""The messages on the bus, wire version 1. Grammar and rules: docs/protocol.md. In msgpack, or in JSON for who reads that.

A requester (an ingress, the Python client) publishes a `Request` to the stream REQ. A worker answers on the requester's
frame address with `FromWorker` (accepted, frame, ok, wait, no); the requester speaks to workers with `ToWorker` (attach,
release). Both are batches: one message per step or wake-up and address, whatever number of requests it speaks of.
"""

import hashlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from shared.subjects import encode_token, reads_json

Item = TypeVar("Item")

WIRE_VERSION = "1"

HEADER_WIRE = "Hr-Wire"
HEADER_REPLY = "Hr-Reply"  # the frame address: JetStream keeps the publisher's own reply subject for its ack
HEADER_QUEUE_DEADLINE = "Hr-Queue-Deadline"  # unix ms
HEADER_QUEUE_MS = "Hr-Queue-Ms"  # what was left of it when published, ms
HEADER_GENERATION_MS = "Hr-Generation-Ms"  # counted from accepted, ms
HEADER_DEADLINE = "Hr-Deadline"  # unix ms: detached work that has not ended by then is given up
HEADER_KEEP = "Hr-Keep"  # whole seconds for which the result of detached work is kept
HEADER_RESUME = "Hr-Resume"  # "1" on a re-publish
HEADER_REASON = "Hr-Reason"  # why a request is in the DLQ
HEADER_MSG_ID = "Nats-Msg-Id"
HEADER_TTL = "Nats-TTL"  # whole seconds


CHOICES_MAX = 128

# What senders say of themselves ends up in subjects, in acks and in `digest`, which has four bytes for an id.
Token = Annotated[int, Meta(ge=0, lt=1 << 32)]
Count = Annotated[int, Meta(ge=0)]
Rid = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]{1,64}\Z")]
WorkerId = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]{1,64}\Z")]
ADDRESS = r"\Atok\.[A-Za-z0-9_=-]{1,384}\.[A-Za-z0-9_-]{1,64}\Z"
Address = Annotated[str, Meta(pattern=ADDRESS)]
AckSubject = Annotated[str, Meta(pattern=r"\A(\$JS\.ACK\.[!-~]{1,1024})?\Z")]


class Malformed(msgspec.DecodeError):
    """Bytes that are no message of this wire: somebody else's, of another version, or damaged."""


def new_id() -> str:
    """128 random bits as 32 hex digits: a rid, a sid, a claim, a client."""
    return secrets.token_hex(16)


def copy_id(rid: str, version: str, k: int) -> str:
    """The Nats-Msg-Id of a copy; 0: of the first one for a version that the request was not published for."""
    return f"{rid}.{encode_token(version)}.{k}"


class Grammar(msgspec.Struct, omit_defaults=True):
    """What an output must be. `body` is of the kind: a JSON schema, a regular expression, a JSON list of strings, a grammar
    (EBNF as llama.cpp has it, or Lark), a `shared.tools.ToolGrammar` as JSON; any JSON object has none."""

    kind: str  # json_schema | json_object | regex | choice | grammar | tools
    body: str = ""
    strict: bool = True  # of a schema: refuse keywords that cannot be enforced; else leave them out


class Sampling(msgspec.Struct, omit_defaults=True):
    """How to choose tokens. The requester fixes `seed` at admission, so that any worker draws the same tokens."""

    max_tokens: int | None = None  # None: up to the model's length
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0  # 64 bits, unsigned
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] = 1  # choices
    stop: list[str] = []
    include_stop: bool = False  # the stop string that ends an output is its last text; else it is cut off
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None  # None: none; k >= 0: of the chosen token and of the k most likely
    echo: bool = False  # the tokens of each choice begin with those of the prompt
    grammar: Grammar | None = None
    shown: list[str] = []  # special tokens whose text is part of the output all the same


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """One turn of a conversation, as the chat template takes it."""

    role: str
    content: str | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class Embedding(msgspec.Struct, omit_defaults=True):
    """What to make vectors of: each input is a choice of the answer, which ends without a token and with its vector."""

    inputs: list[str | list[int]]  # texts, or their token ids with those that the model wants around them
    first: int = 0  # the place of the first one among all that the caller gave, for errors
    dimensions: int = 0  # of a vector; 0: the model's


class Input(msgspec.Struct, omit_defaults=True):
    """What to continue: exactly one of messages, prompt, token ids and embedding is set. `tools` go with messages."""

    messages: list[ChatMessage] | None = None
    prompt: str | None = None
    token_ids: list[int] | None = None
    tools: list[dict[str, Any]] | None = (
        None  # as the chat template takes them: {"type": "function", "function": {...}}
    )
    embedding: Embedding | None = None  # `Sampling.n` is the number of its inputs


class StoredInput(msgspec.Struct, frozen=True):
    """An input that is too large for the bus: an object of the request's tenant and rid (shared.claim_check), by no path."""

    place: Literal["inputs", "job-inputs", "dead-inputs"]
    id: Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    size: Annotated[int, Meta(gt=0)]  # bytes
    sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class Request(msgspec.Struct, omit_defaults=True):
    """The body of a message in REQ. `model` and `version` are resolved: no alias, no pin; an empty version is the subject's.

    With `stored`, the input and what is large of the sampling are in the object store.
    """

    rid: Rid
    model: str
    version: str
    input: Input
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    movable: bool = False  # the route chose the version: until the first token another one may take its place
    framing: bytes = b""  # what another requester needs to know to go on with the answer; workers do not look into it
    stored: StoredInput | None = None


class TopLogprob(msgspec.Struct, array_like=True, gc=False):
    id: int
    logprob: float
    bytes: bytes


class Logprob(msgspec.Struct, array_like=True):
    """Of one token: its own log probability and the most likely ones, best first."""

    id: int
    logprob: float | None  # None: of the prompt's first token
    bytes: bytes
    top: list[TopLogprob] = []
    special: bool = False  # it adds nothing to the text, whatever its bytes


class Usage(msgspec.Struct, array_like=True, gc=False):
    prompt_tokens: int
    completion_tokens: int  # of all choices
    cached_tokens: int = 0


class WireError(msgspec.Struct, array_like=True, gc=False):
    """An error of `shared.errors`, by its code."""

    code: str
    message: str
    param: str | None = None


# -- worker -> requester, on the frame address -------------------------------------------------------------------------


class Accepted(msgspec.Struct, tag="a", array_like=True, gc=False):
    """A worker holds the message. Repeated every second until somebody attaches."""

    rid: str
    claim: str
    seq: Count  # of the message in REQ
    ack: AckSubject  # its ack subject; only for owners that are trusted
    queued_ms: int
    version: str = ""  # which the message is for; "": not told


class Frame(msgspec.Struct, tag="f", array_like=True):
    """Tokens `index`, `index + 1`, ... of one choice: `ids` and, one for each, `text` (what that token added)."""

    rid: str
    claim: str
    sid: str
    choice: Count
    index: Count
    ids: list[Token]
    text: list[str]
    logprobs: list[Logprob] | None = None  # one for each of `ids`
    finish: str | None = None  # "stop" | "length": this choice is complete
    usage: Usage | None = None  # with the finish of the last choice
    error: WireError | None = None  # ends the request
    vector: bytes = b""  # with the finish of a choice that is embedded: its numbers, float32, little-endian


def is_even(frame: Frame) -> bool:
    """Whether a frame has as many texts, and log probabilities if any, as ids."""
    count = len(frame.ids)
    return len(frame.text) == count and (frame.logprobs is None or len(frame.logprobs) == count)


class Ok(msgspec.Struct, tag="o", array_like=True):
    """Answer to attach: this claim sends to `sid` what follows the attach's ids; if it gave a digest, all from 0 on."""

    rid: str
    claim: str
    sid: str
    seq: Count
    ack: AckSubject
    remaining_ms: int  # of the generation deadline


class Wait(msgspec.Struct, tag="w", array_like=True, gc=False):
    """Answer to attach: claimed but not started, and this requester cannot say what to start from."""

    rid: str
    claim: str
    sid: str


class No(msgspec.Struct, tag="n", array_like=True, gc=False):
    """Answer to attach, or said by a draining worker: not here."""

    rid: str
    sid: str


class FromWorker(msgspec.Struct, array_like=True):
    worker: WorkerId
    items: list[Accepted | Frame | Ok | Wait | No]


# -- requester -> worker -----------------------------------------------------------------------------------------------


class Attach(msgspec.Struct, tag="t", array_like=True):
    """Send me this request's tokens from my own next, under the fresh `sid`.

    `ids` (per choice) is all that the requester has. A requester that only knows a position (Last-Event-ID) gives
    `next` and `digest` (per choice) instead, leaves `ids` None, and is sent everything of a generation that meets them.
    `deaths`: workers that died with the request since its last token.
    """

    rid: str
    sid: str
    reply: Address
    ids: list[list[Token]] | None
    next: list[Count] | None = None
    digest: list[str] | None = None
    deaths: int = 0


class Release(msgspec.Struct, tag="r", array_like=True, gc=False):
    """Stop sending under `sid`. `done`: the requester needs the request no more; else fenced: another claim serves it.

    `usage`: what the request came to, for a claim that was made when it had ended: its worker died before it was accounted for.
    """

    rid: str
    sid: str
    reply: Address
    done: bool
    usage: Usage | None = None


class ToWorker(msgspec.Struct, array_like=True):
    items: list[Attach | Release]


# -- about a request, as a core request to everybody who may have it ---------------------------------------------------


class Assign(msgspec.Struct, array_like=True):
    """The controller to one worker: serve this version, and claim its requests or only be ready to.

    `term` is of the leader that says so: a worker does not listen to one that has been replaced.
    """

    model: str
    version: str
    claim: bool
    term: Count


class About(msgspec.Struct, array_like=True):
    """Which request is meant, and for whom. Who does not have it says nothing."""

    rid: str
    tenant: str


class Found(msgspec.Struct, array_like=True):
    """Answer to a find: the request without its input, and where its message is, or was."""

    seq: int
    request: Request


CANCELLED, FINISHED = b"cancelled", b"finished"  # answers to a cancel


def _decoder(decode: Callable[[bytes], Item]) -> Callable[[bytes], Item]:
    """`decode`, with Malformed for everything that it can raise."""

    def checked(data: bytes) -> Item:
        try:
            return decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Malformed(str(error)) from None
        except RecursionError:
            raise Malformed("it is nested too deeply") from None

    return checked


def _either(kind: type[Item]) -> Callable[[bytes], Item]:
    """A decoder of an array in either encoding: in JSON it begins with a bracket, in msgpack nothing that is an array does."""
    from_msgpack, from_json = msgspec.msgpack.Decoder(kind).decode, msgspec.json.Decoder(kind).decode
    return _decoder(lambda data: from_json(data) if is_json(data) else from_msgpack(data))


def is_json(data: bytes) -> bool:
    """Whether an array is encoded as JSON."""
    return data[:1] == b"["


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
encode_json = msgspec.json.Encoder().encode
decode_from_worker = _either(FromWorker)
decode_to_worker = _either(ToWorker)
decode_about = _either(About)
decode_assign = _decoder(msgspec.msgpack.Decoder(Assign).decode)
decode_found = _decoder(msgspec.msgpack.Decoder(Found).decode)
_decode_request_msgpack = _decoder(msgspec.msgpack.Decoder(Request).decode)
_decode_request_json = _decoder(msgspec.json.Decoder(Request).decode)


def decode_request(data: bytes, headers: Mapping[str, str], version: str = "") -> Request:
    """The body of a message in REQ or in the DLQ. `version` is that of its subject, for a body that leaves it empty: its
    publisher did not know it, and the server's mapping chose one. Raises Malformed."""
    as_json = headers.get("Content-Type", "").startswith("application/json")
    request = (_decode_request_json if as_json else _decode_request_msgpack)(data)
    if as_json:
        encode_request(request)  # it goes on as msgpack
    if not request.version:
        request.version = version
    return request


def encode_request(request: Request) -> bytes:
    """The body of a message in REQ. Raises Malformed for what msgpack has no room for: a long integer, deep nesting."""
    try:
        return encode(request)
    except (OverflowError, RecursionError) as error:
        raise Malformed(str(error)) from None


def encoder_for(address: str) -> Callable[[Any], bytes]:
    """How what is sent to a frame address is encoded: the address says it, so that whoever sends knows it."""
    return encode_json if reads_json(address) else encode


def answer_to(question: bytes, answer: Any) -> bytes:
    """`answer` in the encoding that it was asked in."""
    return encode_json(answer) if is_json(question) else encode(answer)


def encode_batches(
    batch: Callable[[list[Item]], Any],
    items: list[Item],
    bytes_max: int,
    encode: Callable[[Any], bytes] = encode,
) -> Iterator[bytes]:
    """`batch(items)` encoded, in as many parts as keep each within `bytes_max`; a single item may be over it."""
    data = encode(batch(items))
    if len(data) <= bytes_max or len(items) == 1:
        yield data
        return
    half = len(items) // 2
    yield from encode_batches(batch, items[:half], bytes_max, encode)
    yield from encode_batches(batch, items[half:], bytes_max, encode)


def digest(ids: Sequence[int]) -> str:
    """16 hex digits over the ids of one choice: what `Attach.digest` and an SSE id carry."""
    raw = b"".join(token.to_bytes(4, "little") for token in ids)
    return hashlib.blake2b(raw, digest_size=8).hexdigest()
