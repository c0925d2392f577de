"""The public gRPC service Inference on a single engine, without a gateway.

It takes text and chats as well as token ids, and returns the same events as the internal service.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from inferfleet_proto.internal.v1 import engine_pb2
from inferfleet_proto.v1 import inference_pb2, inference_pb2_grpc
from services.common import errors, rpc
from services.common.answer_collector import AnswerCollector
from services.common.service import telemetry
from services.common.text import (
    TextAssets,
    Tokenizer,
    render_prompt,
    rendered_ids,
    template_of,
    text_ids,
)
from services.engine.front.request_translation import ModelFacts, check_model
from services.engine.front.servicer import RequestRunner, ServerContext, send_identity

# Longer texts are tokenized on a thread, so that other streams are not delayed.
_LONG_TEXT_CHARS = 2_000


class PublicServicer(inference_pb2_grpc.InferenceServicer):
    """inferfleet.v1.Inference on one engine; all callers belong to the anonymous tenant."""

    def __init__(
        self, runner: RequestRunner, facts: ModelFacts, assets: TextAssets, tokenizer: Tokenizer
    ) -> None:
        self._runner = runner
        self._facts = facts
        self._tokenizer = tokenizer
        self._template = template_of(assets)
        self._started_unix_s = int(time.time())

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: ServerContext
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Run one request and stream its events."""
        async with aclosing(self._events(request, context)) as event_stream:
            async for event in event_stream:
                yield event

    async def Complete(
        self, request: inference_pb2.GenerateRequest, context: ServerContext
    ) -> inference_pb2.CompleteResponse:
        """Run one request and return the whole answer in one message."""
        collector = AnswerCollector()
        async with aclosing(self._events(request, context)) as event_stream:
            async for event in event_stream:
                collector.add(event)
        return collector.answer()

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: object
    ) -> inference_pb2.TokenizeResponse:
        """Return the token ids of a prompt."""
        check_model(request.model, self._facts)
        token_ids, rendered = await self._tokenize(request)
        return inference_pb2.TokenizeResponse(token_ids=token_ids, rendered=rendered)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: object
    ) -> inference_pb2.DetokenizeResponse:
        """Return the text of token ids."""
        check_model(request.model, self._facts)
        for index, token_id in enumerate(request.token_ids):
            if token_id >= self._facts.vocab_size:
                raise errors.InvalidArgumentError.for_field(
                    f"token_ids[{index}]",
                    f"token id {token_id} is outside the vocabulary of {self._facts.vocab_size}",
                )
        text = await asyncio.to_thread(
            self._tokenizer.decode,
            list(request.token_ids),
            skip_special_tokens=not request.keep_special_tokens,
        )
        return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: object
    ) -> inference_pb2.ListModelsResponse:
        """List the one model of this engine."""
        facts = self._facts
        model = inference_pb2.Model(
            name=facts.model,
            revision=facts.model_revision,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            num_engines=1,
            created_unix_s=self._started_unix_s,
        )
        return inference_pb2.ListModelsResponse(models=[model])

    async def _events(
        self, request: inference_pb2.GenerateRequest, context: ServerContext
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        request.request_id = request.request_id or uuid.uuid4().hex
        metadata = context.invocation_metadata()
        await send_identity(context, self._facts.engine_id, request.request_id)
        check_model(request.model, self._facts)
        if request.WhichOneof("prompt") in ("text", "chat"):
            token_ids, _ = await self._tokenize(request)
            request.token_ids.ids[:] = token_ids
        groups = self._runner.events(
            engine_pb2.EngineRequest(request=request),
            parent=telemetry.extract(metadata),
            remaining_s=rpc.remaining_s(context),
        )
        async with aclosing(groups) as events_stream:
            async for events in events_stream:
                for event in events:
                    yield event

    async def _tokenize(
        self, request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest
    ) -> tuple[list[int], str]:
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise errors.InvalidArgumentError.for_field(
                "prompt", "must be set", reason="EMPTY_PROMPT"
            )
        tokenizer, template = self._tokenizer, self._template
        if kind == "chat":
            _check_tools(request.chat)
            rendered = await asyncio.to_thread(
                render_prompt, template, tokenizer.control, request.chat
            )
            ids = await asyncio.to_thread(rendered_ids, template, tokenizer, request.chat, rendered)
            return ids, rendered.text
        text, parse_special = request.text, request.parse_special_tokens
        # Text with control tokens may have to wait until a second tokenizer is built.
        if len(text) <= _LONG_TEXT_CHARS and not tokenizer.control.overlaps(text):
            return text_ids(tokenizer, text, parse_special=parse_special), text
        ids = await asyncio.to_thread(text_ids, tokenizer, text, parse_special=parse_special)
        return ids, text


def _check_tools(chat: inference_pb2.Chat) -> None:
    """Refuse tools: an engine does not parse tool calls, so they would arrive as text."""
    modes = inference_pb2.ToolChoice
    if chat.tool_choice.mode in (modes.MODE_REQUIRED, modes.MODE_NAMED):
        field = "chat.tool_choice"
    elif chat.tools and chat.tool_choice.mode != modes.MODE_NONE:
        field = "chat.tools"
    else:
        return
    raise errors.InvalidArgumentError.for_field(
        field, "a single engine serves no tool calls; set tool_choice to MODE_NONE or use a gateway"
    )
