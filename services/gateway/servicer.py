"""The public gRPC face: inferfleet.v1.Inference, with streams passed on as raw bytes."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

import grpc

from inferfleet_proto.v1 import inference_pb2
from services.common import rpc
from services.common.service import telemetry
from services.gateway.callers.access import Access
from services.gateway.models.catalog import Catalog
from services.gateway.request.admission import Door
from services.gateway.request.collect import Collector
from services.gateway.request.exchange import Caller, Exchange, Rooms

SERVICE = "inferfleet.v1.Inference"
Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer:
    """Handlers raise FleetError; the server's edge turns it into a status."""

    def __init__(self, rooms: Rooms, access: Access, catalog: Catalog) -> None:
        self._rooms = rooms
        self._door: Door = rooms.door
        self._access = access
        self._catalog = catalog

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register; Generate has no serialiser, because its messages already are bytes."""
        one, many = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        pb = inference_pb2
        handlers: dict[str, Any] = {
            "Generate": many(self.generate, pb.GenerateRequest.FromString, None),
            "Complete": one(self.complete, pb.GenerateRequest.FromString, _bytes_of),
            "Tokenize": one(self.tokenize, pb.TokenizeRequest.FromString, _bytes_of),
            "Detokenize": one(self.detokenize, pb.DetokenizeRequest.FromString, _bytes_of),
            "ListModels": one(self.list_models, pb.ListModelsRequest.FromString, _bytes_of),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        exchange = Exchange(self._rooms, request, self._caller(context, "Generate"))
        # A generator that waits for its reader is not told of a cancel; this is.
        context.add_done_callback(_then(exchange.abandon))
        async with (
            _announced(exchange, context),
            contextlib.aclosing(exchange.messages()) as messages,
        ):
            async for raw in messages:
                await context.write(raw)

    async def complete(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.CompleteResponse:
        caller = replace(self._caller(context, "Complete"), streams=False)
        exchange = Exchange(self._rooms, request, caller)
        collector = Collector()
        async with (
            _announced(exchange, context),
            contextlib.aclosing(exchange.messages()) as messages,
        ):
            async for raw in messages:
                collector.add(raw)
        return collector.answer()

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        self._enter(context, "Tokenize")
        return await self._door.tokenize(request)

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        self._enter(context, "Detokenize")
        return await self._door.detokenize(request)

    async def list_models(
        self, _: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        self._enter(context, "ListModels")
        answer = inference_pb2.ListModelsResponse()
        for listed in self._catalog.listed:
            model = listed.view
            entry = answer.models.add(
                name=listed.name,
                revision=model.revision,
                max_model_len=model.max_model_len,
                vocab_size=model.vocab_size,
                num_engines=sum(behind.serving for behind in listed.revisions),
                created_unix_s=model.created_unix_s,
            )
            for behind in listed.revisions:
                entry.revisions.add(
                    model=behind.name,
                    revision=behind.revision,
                    num_engines=behind.serving,
                    share=listed.shares.get((behind.name, behind.revision)),
                )
        return answer

    def _enter(self, context: Context, method: str) -> None:
        shown = _metadata(context).get("authorization")
        self._access.enter(shown, method=f"{SERVICE}/{method}", peer=_peer(context))

    def _caller(self, context: Context, method: str) -> Caller:
        metadata, peer = _metadata(context), _peer(context)
        method = f"{SERVICE}/{method}"
        shown = metadata.get("authorization")
        chosen = metadata.get(rpc.REQUEST_ID_KEY, "")
        return Caller(
            face="grpc",
            who=self._access.identify(shown, method=method, peer=peer),
            peer=peer,
            method=method,
            request_id=chosen,
            id_chosen=bool(chosen),
            parent=telemetry.extract(metadata.items()),
            timeout_s=rpc.remaining_s(context),
        )


@contextlib.asynccontextmanager
async def _announced(exchange: Exchange, context: Context) -> AsyncIterator[None]:
    """Open the exchange and tell the ids in initial metadata, also when it cannot be opened."""
    ids = ((rpc.REQUEST_ID_KEY, exchange.request_id), (rpc.TRACE_ID_KEY, exchange.trace_id))
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(exchange)
        except Exception:
            await context.send_initial_metadata(ids)
            raise
        rates = tuple(exchange.rate_headers.items())
        await context.send_initial_metadata((*ids, (rpc.ENGINE_ID_KEY, exchange.engine_id), *rates))
        yield


def _metadata(context: Context) -> dict[str, str]:
    pairs = context.invocation_metadata() or ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def _peer(context: Context) -> str:
    """E.g. "ipv4:127.0.0.1:50123"."""
    return unquote(context.peer())[:128]


def _then(act: Callable[[], None]) -> Any:
    return lambda _: act()


def _bytes_of(message: Any) -> bytes:
    serialised: bytes = message.SerializeToString()
    return serialised
