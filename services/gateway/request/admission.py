"""Enqueue at the door: from a caller's request to the one that travels inside the fleet.

Model, bounds, prompt text to token ids, length, seed, tenant and salt: after this an engine needs
nothing but the message.
"""

import asyncio
import secrets
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from opentelemetry import trace
from opentelemetry.context import Context

from inferfleet_proto.internal.v1 import engine_pb2
from inferfleet_proto.v1 import inference_pb2
from services.common.block_hash import effective_salt
from services.common.errors import InvalidArgumentError
from services.common.rpc.continuation import StreamLedger
from services.common.text import chat_ids, render_chat
from services.gateway.answers.plan import AnswerPlan, plan_answer
from services.gateway.answers.tools import read_tools
from services.gateway.models.catalog import Catalog, ModelView
from services.gateway.models.text_store import ModelText, TextStore
from services.gateway.request.checks import check_chat, check_request, refuse

T = TypeVar("T")
# Shorter texts are done before a thread would have woken up.
INLINE_CHARS = 2048


@dataclass(frozen=True)
class Admitted:
    """A request that may be sent to a balancer."""

    model: ModelView
    text: ModelText
    prompt_token_ids: Sequence[int]
    wire: bytes
    """A serialised EngineRequest."""
    plan: AnswerPlan
    """How its answer is read."""


class Door:
    """Turns public requests into internal ones; keeps no state of its own."""

    def __init__(
        self, catalog: Catalog, texts: TextStore, pool: Executor, tracer: trace.Tracer
    ) -> None:
        self._catalog = catalog
        self._texts = texts
        self._pool = pool
        self._tracer = tracer

    async def admit(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        tenant: str,
        request_id: str,
        context: Context,
        avoid: Collection[tuple[str, str]] = (),
    ) -> Admitted:
        """Check and complete a request; the caller's message is not changed.

        Args:
            avoid: model and revision of those behind an alias that could not take it.

        Raises:
            FleetError: as the contract says; nothing was sent anywhere.
        """
        sticky = request.routing.session_id or request_id
        model = self._catalog.find(request.model, f"{tenant}\0{sticky}", avoid)
        check_request(request, model.vocab_size)
        text = await self._texts.get(model)
        ids, plan = await self._prompt(request, model, text, context)
        _check_length(request, len(ids), model.max_model_len)
        inner = inference_pb2.GenerateRequest()
        inner.CopyFrom(request)
        inner.model = model.name
        inner.request_id = request_id
        inner.token_ids.ids[:] = ids
        if not inner.sampling.HasField("seed"):
            inner.sampling.seed = secrets.randbits(64)
        if plan.constraint is not None:
            inner.constraint.CopyFrom(plan.constraint)
        envelope = engine_pb2.EngineRequest(
            request=inner,
            tenant=tenant,
            salt=effective_salt(tenant),
            model_revision=model.pinned,
            shown_token_ids=plan.visible_ids,
        )
        return Admitted(model, text, ids, envelope.SerializeToString(), plan)

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest
    ) -> inference_pb2.TokenizeResponse:
        """Answer the public Tokenize."""
        text = await self._texts.get(self._catalog.find(request.model))
        kind = request.WhichOneof("prompt")
        if kind is None:
            refuse("prompt", "one of text and chat is needed")
        if kind == "chat":
            check_chat(request.chat)
            rendered = await self._render(text, request.chat)
        else:
            rendered = request.text
        ids = await self._ids(text, request, rendered)
        return inference_pb2.TokenizeResponse(token_ids=ids, rendered=rendered)

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest
    ) -> inference_pb2.DetokenizeResponse:
        """Answer the public Detokenize."""
        model = self._catalog.find(request.model)
        highest = max(request.token_ids, default=0)
        if highest >= model.vocab_size:
            refuse("token_ids", f"{highest} is outside the vocabulary of {model.vocab_size}")
        text = await self._texts.get(model)
        decoded = text.tokenizer.decode(
            request.token_ids, skip_special_tokens=not request.keep_special_tokens
        )
        return inference_pb2.DetokenizeResponse(text=decoded)

    async def _prompt(
        self,
        request: inference_pb2.GenerateRequest,
        model: ModelView,
        text: ModelText,
        context: Context,
    ) -> tuple[Sequence[int], AnswerPlan]:
        """The prompt's token ids, and for a chat what its answer needs."""
        kind = request.WhichOneof("prompt")
        plan = AnswerPlan()
        if kind == "token_ids":
            return request.token_ids.ids, plan
        rendered = request.text
        if kind == "chat":
            use = read_tools(request.chat)
            _check_contents(request.chat, text, model.max_model_len)
            with self._tracer.start_as_current_span("render", context=context):
                rendered = await self._render(text, request.chat)
            engine = model.engines[0]
            profile = text.profile.configured(engine.tool_parser, engine.reasoning_parser)
            plan = plan_answer(request, use, profile, rendered, text.tokenizer.token_bytes)
        _check_text_length(rendered, text, model.max_model_len, _field_of(request))
        with self._tracer.start_as_current_span("tokenize", context=context) as span:
            ids = await self._ids(text, request, rendered)
            span.set_attribute("inferfleet.prompt_tokens", len(ids))
        if not ids:
            refuse(_field_of(request), "has no tokens")
        return ids, plan

    async def _ids(
        self,
        text: ModelText,
        request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
        rendered: str,
    ) -> list[int]:
        if request.WhichOneof("prompt") == "chat":
            own = await self._run(len(rendered), lambda: chat_ids(text.template, request.chat))
            if own is not None:
                return own
        plain = request.WhichOneof("prompt") == "text"
        return await self._encode(text, rendered, add_special_tokens=plain)

    async def _render(self, text: ModelText, chat: inference_pb2.Chat) -> str:
        size = sum(len(message.content) for message in chat.messages)
        size += sum(tool.ByteSize() for tool in chat.tools)
        return await self._run(size, lambda: render_chat(text.template, chat))

    async def _encode(
        self, text: ModelText, rendered: str, *, add_special_tokens: bool
    ) -> list[int]:
        encode = text.tokenizer.encode
        return await self._run(
            len(rendered), lambda: encode(rendered, add_special_tokens=add_special_tokens)
        )

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def resumed(admitted: Admitted, ledger: StreamLedger, engine_id: str) -> tuple[bytes, bool]:
    """The request for whoever carries a broken stream on, and whether its tokens will be exact.

    Only an engine of the lost one's numerics may go on once the caller has tokens.
    """
    envelope = engine_pb2.EngineRequest.FromString(admitted.wire)
    known = ledger.continuation()
    if known is None:
        return admitted.wire, True
    envelope.continuation.CopyFrom(known)
    for engine in admitted.model.engines:
        if engine.engine_id == engine_id:
            envelope.numerics_id = engine.numerics_id
            return envelope.SerializeToString(), engine.deterministic
    return envelope.SerializeToString(), False


def _field_of(request: inference_pb2.GenerateRequest) -> str:
    kind = str(request.WhichOneof("prompt"))
    return "token_ids.ids" if kind == "token_ids" else kind


def _check_text_length(text: str, known: ModelText, max_model_len: int, field: str) -> None:
    """Refuse, before the work of tokenising it, a text that cannot fit whatever its tokens."""
    least = len(text.encode()) // max(known.tokenizer.max_token_bytes, 1)
    if least >= max_model_len:
        _too_long(field, f"at least {least}", max_model_len)


def _check_contents(chat: inference_pb2.Chat, known: ModelText, max_model_len: int) -> None:
    """The same before the template is rendered.

    What a template may leave out, e.g. reasoning in earlier answers, is not counted.
    """
    whole = (m for m in chat.messages if m.role in ("system", "user"))
    size = sum(len(message.content.encode()) for message in whole)
    least = size // max(known.tokenizer.max_token_bytes, 1)
    if least >= max_model_len:
        _too_long("chat", f"at least {least}", max_model_len)


def _check_length(
    request: inference_pb2.GenerateRequest, prompt_tokens: int, max_model_len: int
) -> None:
    if prompt_tokens >= max_model_len:
        _too_long(_field_of(request), str(prompt_tokens), max_model_len)


def _too_long(field: str, tokens: str, max_model_len: int) -> NoReturn:
    raise InvalidArgumentError.for_field(
        field,
        f"the prompt has {tokens} tokens and the model's context holds {max_model_len}, "
        "of which one is needed for output",
        reason="CONTEXT_LENGTH_EXCEEDED",
        prompt_tokens=tokens,
        max_model_len=str(max_model_len),
    )
