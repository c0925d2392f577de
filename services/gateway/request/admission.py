"""Turns a public request into the EngineRequest that balancers and engines receive.

Resolves the model, checks bounds, tokenizes the prompt, and adds seed, tenant and salt: an engine
needs nothing but this message.
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
from services.common.text import RenderedChat, rendered_ids, text_ids
from services.gateway.answers.plan import AnswerPlan, plan_answer
from services.gateway.answers.tools import read_tools
from services.gateway.models.catalog import Catalog, ModelView
from services.gateway.models.renderer import INLINE_CHARS, Renderer
from services.gateway.models.text_store import ModelText, TextStore
from services.gateway.request.checks import (
    check_chat,
    check_ids_to_decode,
    check_parse_special,
    check_request,
    check_text_to_tokenize,
    refuse,
)

T = TypeVar("T")


@dataclass(frozen=True)
class AdmittedRequest:
    """A request that may be sent to a balancer."""

    model: ModelView
    text: ModelText
    prompt_token_ids: Sequence[int]
    wire: bytes
    """A serialised EngineRequest."""
    plan: AnswerPlan
    """How its answer is parsed."""


class RequestAdmission:
    """Turns public requests into internal ones; stateless.

    Args:
        pool: threads that render and tokenize long prompts.
        calls_pool: the same for Tokenize and Detokenize.
        renderer: renders chats, within limits.
    """

    def __init__(
        self,
        catalog: Catalog,
        texts: TextStore,
        pool: Executor,
        tracer: trace.Tracer,
        *,
        calls_pool: Executor,
        renderer: Renderer,
    ) -> None:
        self._catalog = catalog
        self._texts = texts
        self._pool = pool
        self._calls_pool = calls_pool
        self._renderer = renderer
        self._tracer = tracer

    async def admit(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        tenant: str,
        request_id: str,
        context: Context,
        avoid: Collection[tuple[str, str]] = (),
    ) -> AdmittedRequest:
        """Check and complete a request; does not change the caller's message.

        Args:
            context: of the request's span.
            avoid: model and revision of targets of an alias that could not serve the request.

        Raises:
            FleetError: the request is refused; nothing has been sent.
        """
        sticky = request.routing.session_id or request_id
        model = self._catalog.find(request.model, f"{tenant}\0{sticky}", avoid)
        if request.WhichOneof("prompt") == "token_ids":
            # Before the ids are read: there may be millions.
            _check_length(request, len(request.token_ids.ids), model.max_model_len)
        check_request(request, model.vocab_size)
        text = await self._texts.get(model)
        ids, plan = await self._prompt_and_plan(request, model, text, context)
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
            model_revision=model.pinned or "",
            shown_token_ids=plan.visible_ids,
        )
        return AdmittedRequest(model, text, ids, envelope.SerializeToString(), plan)

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest
    ) -> inference_pb2.TokenizeResponse:
        """Answer the public Tokenize."""
        model = self._catalog.find(request.model)
        kind = request.WhichOneof("prompt")
        if kind is None:
            refuse("prompt", "is missing: send text or chat")
        check_parse_special(request)
        text = await self._texts.get(model)
        rendered = RenderedChat(request.text)
        if kind == "chat":
            check_chat(request.chat)
            _check_contents(request.chat, text, model.max_model_len)
            rendered = await self._render(text, request.chat, self._calls_pool)
        _check_text_length(rendered.text, text, model.max_model_len, kind)
        check_text_to_tokenize(kind, rendered.text, model.max_model_len)
        ids = await self._tokenize(text, request, rendered, self._calls_pool)
        return inference_pb2.TokenizeResponse(token_ids=ids, rendered=rendered.text)

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest
    ) -> inference_pb2.DetokenizeResponse:
        """Answer the public Detokenize."""
        model = self._catalog.find(request.model)
        ids, skips = request.token_ids, not request.keep_special_tokens
        check_ids_to_decode(ids, model.vocab_size, model.max_model_len)
        decode = (await self._texts.get(model)).tokenizer.decode
        decoded = await self._run(
            len(ids), lambda: decode(ids, skip_special_tokens=skips), self._calls_pool
        )
        return inference_pb2.DetokenizeResponse(text=decoded)

    async def _prompt_and_plan(
        self,
        request: inference_pb2.GenerateRequest,
        model: ModelView,
        text: ModelText,
        context: Context,
    ) -> tuple[Sequence[int], AnswerPlan]:
        """The prompt's token ids, and for a chat the plan of its answer."""
        kind = request.WhichOneof("prompt")
        plan = AnswerPlan()
        if kind == "token_ids":
            return request.token_ids.ids, plan
        rendered = RenderedChat(request.text)
        if kind == "chat":
            use = read_tools(request.chat)
            _check_contents(request.chat, text, model.max_model_len)
            with self._tracer.start_as_current_span("render", context=context):
                rendered = await self._render(text, request.chat, self._pool)
            engine = model.engines[0]
            profile = text.profile.configured(engine.tool_parser, engine.reasoning_parser)
            plan = plan_answer(request, use, profile, rendered.text, text.tokenizer.token_bytes)
        _check_text_length(rendered.text, text, model.max_model_len, _field_of(request))
        with self._tracer.start_as_current_span("tokenize", context=context) as span:
            ids = await self._tokenize(text, request, rendered, self._pool)
            span.set_attribute("inferfleet.prompt_tokens", len(ids))
        if not ids:
            refuse(_field_of(request), "must have at least one token")
        return ids, plan

    async def _tokenize(
        self,
        text: ModelText,
        request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
        rendered: RenderedChat,
        pool: Executor,
    ) -> list[int]:
        def encode() -> list[int]:
            if request.WhichOneof("prompt") == "chat":
                return rendered_ids(text.template, text.tokenizer, request.chat, rendered)
            parse_special = request.parse_special_tokens
            return text_ids(text.tokenizer, rendered.text, parse_special=parse_special)

        return await self._run(len(rendered.text), encode, pool)

    async def _render(
        self, text: ModelText, chat: inference_pb2.Chat, pool: Executor
    ) -> RenderedChat:
        return await self._renderer.render(text.template, text.tokenizer.control, chat, pool)

    @staticmethod
    async def _run(size: int, work: Callable[[], T], pool: Executor) -> T:
        """Run `work` in a thread, or here if its text is short."""
        if size <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(pool, work)


def make_resume_request(
    admitted: AdmittedRequest, ledger: StreamLedger, engine_id: str
) -> tuple[bytes, bool]:
    """Make the request that resumes a broken stream on another engine.

    Once the caller has tokens, only an engine with the same numerics may resume.

    Args:
        ledger: what the caller has.
        engine_id: the engine that was lost.

    Returns:
        The serialised EngineRequest, and whether the resumed tokens will be bit-identical.
    """
    envelope = engine_pb2.EngineRequest.FromString(admitted.wire)
    continuation = ledger.continuation()
    if continuation is None:
        return admitted.wire, True
    envelope.continuation.CopyFrom(continuation)
    for engine in admitted.model.engines:
        if engine.engine_id == engine_id:
            envelope.numerics_id = engine.numerics_id
            return envelope.SerializeToString(), engine.deterministic
    return envelope.SerializeToString(), False


def _field_of(request: inference_pb2.GenerateRequest) -> str:
    kind = str(request.WhichOneof("prompt"))
    return "token_ids.ids" if kind == "token_ids" else kind


def _check_text_length(text: str, model: ModelText, max_model_len: int, field: str) -> None:
    """Refuse a text that cannot fit for its length alone, before tokenizing it."""
    least = len(text.encode()) // max(model.tokenizer.max_token_bytes, 1)
    if least >= max_model_len:
        _refuse_length(field, f"at least {least}", max_model_len)


def _check_contents(chat: inference_pb2.Chat, model: ModelText, max_model_len: int) -> None:
    """Refuse a chat that cannot fit for its length alone, before rendering it.

    Contents that a template may leave out, e.g. reasoning in earlier answers, are not counted.
    """
    rendered = (m for m in chat.messages if m.role in ("system", "user"))
    size = sum(len(message.content.encode()) for message in rendered)
    least = size // max(model.tokenizer.max_token_bytes, 1)
    if least >= max_model_len:
        _refuse_length("chat", f"at least {least}", max_model_len)


def _check_length(
    request: inference_pb2.GenerateRequest, prompt_tokens: int, max_model_len: int
) -> None:
    if prompt_tokens >= max_model_len:
        _refuse_length(_field_of(request), str(prompt_tokens), max_model_len)


def _refuse_length(field: str, tokens: str, max_model_len: int) -> NoReturn:
    raise InvalidArgumentError.for_field(
        field,
        f"the prompt has {tokens} tokens; the model's context holds {max_model_len}, "
        "of which one is needed for output",
        reason="CONTEXT_LENGTH_EXCEEDED",
        prompt_tokens=tokens,
        max_model_len=str(max_model_len),
    )
