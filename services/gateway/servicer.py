"""The public gRPC face: inferfleet.v1.Inference, whose streams are forwarded as raw bytes."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

import grpc

from inferfleet_proto.v1 import inference_pb2
from services.common import rpc
from services.common.answer_collector import AnswerCollector
from services.common.service import telemetry
from services.gateway.callers.access import Access
from services.gateway.models.catalog import Catalog
from services.gateway.request.caller import Caller
from services.gateway.request.dependencies import Dependencies
from services.gateway.request.gateway_stream import GatewayStream

SERVICE = "inferfleet.v1.Inference"
Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer:
    """Handlers raise FleetError, which the server turns into a status (services.common.rpc)."""

    def __init__(self, dependencies: Dependencies, access: Access, catalog: Catalog) -> None:
        self._dependencies = dependencies
        self._admission = dependencies.admission
        self._access = access
        self._catalog = catalog

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register; Generate has no serialiser, because its messages are bytes already."""
        one, many = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        pb = inference_pb2
        handlers: dict[str, Any] = {
            "Generate": many(self.generate, pb.GenerateRequest.FromString, None),
            "Complete": one(self.complete, pb.GenerateRequest.FromString, _serialise),
            "Tokenize": one(self.tokenize, pb.TokenizeRequest.FromString, _serialise),
            "Detokenize": one(self.detokenize, pb.DetokenizeRequest.FromString, _serialise),
            "ListModels": one(self.list_models, pb.ListModelsRequest.FromString, _serialise),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        """Answer Generate: stream messages until the Summary."""
        stream = GatewayStream(self._dependencies, request, self._caller(context, "Generate"))
        # A generator that waits for its reader is not cancelled with the call; this callback is.
        context.add_done_callback(_ignore_argument(stream.abandon))
        async with (
            _opened(stream, context),
            contextlib.aclosing(stream.messages()) as messages,
        ):
            async for raw in messages:
                await context.write(raw)

    async def complete(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.CompleteResponse:
        """Answer Complete: the same stream as one message."""
        caller = replace(self._caller(context, "Complete"), streams=False)
        stream = GatewayStream(self._dependencies, request, caller)
        collector = AnswerCollector()
        async with (
            _opened(stream, context),
            contextlib.aclosing(stream.messages()) as messages,
        ):
            async for raw in messages:
                collector.add_serialized(raw)
        return collector.answer()

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Answer Tokenize."""
        async with self._dependencies.text_calls.run(self._caller(context, "Tokenize")):
            return await self._admission.tokenize(request)

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """Answer Detokenize."""
        async with self._dependencies.text_calls.run(self._caller(context, "Detokenize")):
            return await self._admission.detokenize(request)

    async def list_models(
        self, _: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """Answer ListModels: models and aliases with their revisions and shares."""
        self._enter(context, "ListModels")
        answer = inference_pb2.ListModelsResponse()
        for listed in self._catalog.listed:
            model = listed.view
            entry = answer.models.add(
                name=listed.name,
                revision=model.revision,
                max_model_len=model.max_model_len,
                vocab_size=model.vocab_size,
                num_engines=sum(revision.serving for revision in listed.revisions),
                created_unix_s=model.created_unix_s,
            )
            for revision in listed.revisions:
                entry.revisions.add(
                    model=revision.name,
                    revision=revision.revision,
                    num_engines=revision.serving,
                    share=listed.shares.get((revision.name, revision.revision)),
                )
        return answer

    def _enter(self, context: Context, method: str) -> None:
        authorization = _metadata(context).get("authorization")
        method = f"{SERVICE}/{method}"
        self._access.enter(authorization, face="grpc", method=method, peer=_peer(context))

    def _caller(self, context: Context, method: str) -> Caller:
        metadata, peer = _metadata(context), _peer(context)
        method = f"{SERVICE}/{method}"
        request_id = metadata.get(rpc.REQUEST_ID_KEY) or None
        authorization = metadata.get("authorization")
        return Caller(
            face="grpc",
            who=self._access.identify(authorization, face="grpc", method=method, peer=peer),
            peer=peer,
            method=method,
            request_id=request_id,
            id_chosen=request_id is not None,
            parent=telemetry.extract(metadata.items()),
            timeout_s=rpc.remaining_s(context),
        )


@contextlib.asynccontextmanager
async def _opened(stream: GatewayStream, context: Context) -> AsyncIterator[None]:
    """Open the stream and send its ids as initial metadata, even if it cannot be opened."""
    ids = ((rpc.REQUEST_ID_KEY, stream.request_id), (rpc.TRACE_ID_KEY, stream.trace_id))
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(stream)
        except Exception:
            await context.send_initial_metadata(ids)
            raise
        rates = tuple(stream.rate_headers.items())
        await context.send_initial_metadata((*ids, (rpc.ENGINE_ID_KEY, stream.engine_id), *rates))
        yield


def _metadata(context: Context) -> dict[str, str]:
    pairs = context.invocation_metadata() or ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def _peer(context: Context) -> str:
    """E.g. "ipv4:127.0.0.1:50123"."""
    return unquote(context.peer())[:128]


def _ignore_argument(act: Callable[[], None]) -> Any:
    return lambda _: act()


def _serialise(message: Any) -> bytes:
    serialised: bytes = message.SerializeToString()
    return serialised
