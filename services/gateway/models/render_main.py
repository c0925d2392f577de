"""A process that renders chats: a template that loops or takes all memory ends this process only.

It writes an empty frame when it is ready. Then it reads a `Job` from stdin and writes an `Outcome`
to stdout, repeatedly. Frames are msgpack behind their length in 4 bytes.
`services.gateway.models.render_process` starts it.
"""

import functools
import os
import resource
import signal
import struct
import sys

import msgspec

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import FleetError
from services.common.rpc.membership import MAX_RECEIVE_BYTES
from services.common.service.child_process import die_with_parent
from services.common.text import ChatTemplate, TextAssets, render_prompt
from services.common.text.control_tokens import ControlTokens

MEMORY_BYTES = 512 * 1024 * 1024
MAX_TEXT_BYTES = MAX_RECEIVE_BYTES
# With the marked text: a trusted character has three bytes.
MAX_ANSWER_BYTES = 4 * MAX_TEXT_BYTES + 64 * 1024
MAX_TEMPLATES = 8
# Lower priority than the gateway's own threads.
_NICE = 5


class Job(msgspec.Struct, frozen=True):
    """A chat to render."""

    source: str
    """Of the template."""
    special_tokens: tuple[tuple[str, str], ...]
    control: tuple[tuple[str, int], ...]
    """The tokenizer's control tokens: text and id."""
    in_normalized: bool
    """As of ControlTokens."""
    chat: bytes
    """A serialised Chat."""


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """A RenderedChat as bytes, or the problem with it."""

    text: bytes = b""
    marked: bytes | None = None
    field: str = ""
    problem: str = ""


def main() -> int:
    """Serve jobs until stdin closes."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal signals the whole group
    os.nice(_NICE)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    _write(b"")
    while head := sys.stdin.buffer.read(4):
        (length,) = struct.unpack("<I", head)
        job = msgspec.msgpack.decode(sys.stdin.buffer.read(length), type=Job)
        _write(msgspec.msgpack.encode(_outcome(job)))
    return 0


def _outcome(job: Job) -> Outcome:
    chat = inference_pb2.Chat.FromString(job.chat)
    try:
        template = _template(job.source, job.special_tokens)
        rendered = render_prompt(template, _control(job.control, job.in_normalized), chat)
        raw = to_bytes(rendered.text)
        marked = None if rendered.marked is None else to_bytes(rendered.marked)
    except FleetError as error:
        field = error.violations[0].field if error.violations else "chat"
        return Outcome(field=field, problem=error.message.removeprefix(f"{field}: "))
    except MemoryError:
        return Outcome(field="chat", problem="the model's chat template needs too much memory")
    if len(raw) > MAX_TEXT_BYTES:
        problem = f"the model's chat template makes more than {MAX_TEXT_BYTES} bytes of it"
        return Outcome(field="chat", problem=problem)
    return Outcome(raw, marked)


@functools.lru_cache(MAX_TEMPLATES)
def _template(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    assets = TextAssets.of(
        tokenizer_json=b"", chat_template=source, special_tokens=dict(special_tokens)
    )
    return ChatTemplate(assets)


@functools.lru_cache(MAX_TEMPLATES)
def _control(items: tuple[tuple[str, int], ...], in_normalized: bool) -> ControlTokens:
    return ControlTokens(dict(items), in_normalized=in_normalized)


def to_bytes(text: str) -> bytes:
    """A text, in which trusted characters are lone surrogates."""
    return text.encode("utf-8", "surrogatepass")


def from_bytes(raw: bytes) -> str:
    """The inverse of `to_bytes`.

    Raises:
        ValueError: these are not the bytes of a text.
    """
    return raw.decode("utf-8", "surrogatepass")


def _write(frame: bytes) -> None:
    sys.stdout.buffer.write(struct.pack("<I", len(frame)) + frame)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    raise SystemExit(main())
