"""Scripts of the fake engine: what one Run streams, as a function of the request."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

from inferfleet_proto.internal.v1 import engine_pb2
from inferfleet_proto.v1 import inference_pb2
from services.common.errors import FleetError

if TYPE_CHECKING:
    from tests.doubles.fake_engine import FakeEngine

Event = inference_pb2.GenerateResponse
Script = Callable[[engine_pb2.EngineRequest, "FakeEngine"], AsyncIterator[Event]]
EOS = 258


async def numbered_tokens(
    request: engine_pb2.EngineRequest, engine: "FakeEngine"
) -> AsyncIterator[Event]:
    """Tokens that depend on seed, choice and position alone; resumes what a request continues."""
    for event in stream_of(request, engine.info):
        yield event


def stream_of(request: engine_pb2.EngineRequest, info: engine_pb2.EngineInfo) -> Iterator[Event]:
    """The events of `numbered_tokens`."""
    inner = request.request
    prompt_tokens, max_tokens = len(inner.token_ids.ids), inner.stop.max_tokens or 4
    known = {choice.index: choice for choice in request.continuation.choices}
    num_choices = max(inner.sampling.n, 1)
    yield Event(
        started=inference_pb2.Started(
            request_id=inner.request_id,
            model=inner.model,
            prompt_tokens=prompt_tokens,
            seed=inner.sampling.seed,
            engine_id=info.engine_id,
        )
    )
    for choice in range(num_choices):
        so_far = known.get(choice, engine_pb2.ContinuedChoice())
        if not so_far.finished:
            yield from _numbered_choice(choice, so_far, inner.sampling.seed, max_tokens)
    usage = inference_pb2.Usage(prompt_tokens=prompt_tokens, completion_tokens=1)
    if not known:
        usage.completion_tokens = max_tokens * num_choices
    yield Event(summary=inference_pb2.Summary(usage=usage, exact=True, engine_id=info.engine_id))


def _numbered_choice(
    choice: int, so_far: engine_pb2.ContinuedChoice, seed: int, max_tokens: int
) -> Iterator[Event]:
    text, sent = "", so_far.sent_text_bytes
    for position in range(max_tokens):
        token = _token(seed, choice, position)
        piece = f"{token} " + ("the end." if position == max_tokens - 1 else "")
        unsent = piece[max(sent - len(text), 0) :]
        text += piece
        if position >= len(so_far.token_ids):
            delta = {"choice": choice, "text": unsent, "token_ids": [token], "num_tokens": 1}
            yield Event(delta=delta)
    yield Event(finished={"choice": choice, "reason": "FINISH_REASON_MAX_TOKENS"})


def _token(seed: int, choice: int, position: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{choice}/{position}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % 1000


async def say_hello(
    request: engine_pb2.EngineRequest, engine: "FakeEngine"
) -> AsyncIterator[Event]:
    """`engine.reply`, one character per Delta and one token per byte, up to max_tokens."""
    inner = request.request
    n = inner.sampling.n if inner.sampling.HasField("n") else 1
    most = inner.stop.max_tokens if inner.stop.HasField("max_tokens") else 10**6
    yield engine.started(request)
    total = 0
    for choice in range(n):
        sent = 0
        for character in engine.reply:
            ids = list(character.encode())
            if sent + len(ids) > most:
                break
            sent += len(ids)
            yield engine.delta(request, choice, character, ids)
        full = sent >= most
        if not full:
            yield engine.delta(request, choice, "", [EOS])
        reason = "MAX_TOKENS" if full else "EOS"
        yield Event(finished={"choice": choice, "reason": f"FINISH_REASON_{reason}"})
        total += sent + (not full)
    yield engine.summary(request, total)


async def hold_after_first(
    request: engine_pb2.EngineRequest, engine: "FakeEngine"
) -> AsyncIterator[Event]:
    """One character, then nothing until the stream is cancelled."""
    yield engine.started(request)
    yield engine.delta(request, 0, "H", [72])
    await asyncio.Event().wait()


def fail_with(error: FleetError, *, after: int = 0) -> Script:
    """A script that streams `after` characters and then raises `error`."""

    async def script(
        request: engine_pb2.EngineRequest, engine: "FakeEngine"
    ) -> AsyncIterator[Event]:
        if after:
            yield engine.started(request)
        for _ in range(after):
            yield engine.delta(request, 0, "x", [120])
        raise error

    return script
