"""`AsyncClient`: the calls of `inferfleet.client.Client` for asyncio."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from inferfleet.connection import DEFAULT_ADDRESS, OPTIONS, Ids, Settings, only_model
from inferfleet.errors import from_rpc
from inferfleet.requests import GenerateParams, Message, build_request, chat_of
from inferfleet.results import (
    Completion,
    Delta,
    Event,
    Model,
    Tokens,
    completion_of,
    event_of,
    models_of,
)
from inferfleet_proto.v1 import inference_pb2 as pb
from inferfleet_proto.v1 import inference_pb2_grpc


class AsyncStream:
    """The events of one request, as they arrive. Leaving the loop early cancels the request."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def __aiter__(self) -> AsyncIterator[Event]:
        try:
            async for message in self._call:
                event = event_of(message)
                if event is not None:
                    yield event
        except grpc.RpcError as error:
            ids = await self.ids()
            raise from_rpc(error, request_id=ids.request_id, trace_id=ids.trace_id) from error
        finally:
            self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    async def ids(self) -> Ids:
        """The ids of request, trace and engine; waits for the server's initial metadata."""
        return Ids.of(await self._call.initial_metadata())

    async def texts(self) -> AsyncGenerator[str, None]:
        """The text pieces of the first choice; other events are skipped."""
        async for event in self:
            if isinstance(event, Delta) and event.choice == 0 and event.text:
                yield event.text

    def cancel(self) -> None:
        """End the request; does nothing once it has ended."""
        self._call.cancel()


class AsyncClient:
    """A connection to a gateway, or to one engine that was started with --public.

    The arguments are those of `Client`. Create it inside a running event loop.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
        tls: bool = False,
        ca_file: str | None = None,
    ) -> None:
        self._settings = Settings(address, api_key, tls, ca_file)
        self._model = model
        self._timeout_s = timeout_s
        credentials = self._settings.credentials()
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=OPTIONS)
        self._stub: Any = inference_pb2_grpc.InferenceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; running streams are cancelled."""
        await self._channel.close()

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
        traceparent: str | None = None,
        **params: Unpack[GenerateParams],
    ) -> AsyncStream:
        """Start a request and return its stream of events; see `Client.generate`."""
        name = await self._model_name(model)
        request = build_request(name, prompt, messages, token_ids, params)
        return AsyncStream(
            self._stub.Generate(
                request,
                timeout=self._deadline_s(timeout_s),
                metadata=self._settings.metadata(traceparent),
            )
        )

    async def complete(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
        traceparent: str | None = None,
        **params: Unpack[GenerateParams],
    ) -> Completion:
        """Run a request and return its whole answer; see `Client.complete`."""
        name = await self._model_name(model)
        request = build_request(name, prompt, messages, token_ids, params)
        answer = await self._call(self._stub.Complete, request, timeout_s, traceparent)
        return completion_of(answer)

    async def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """The served models."""
        answer = await self._call(self._stub.ListModels, pb.ListModelsRequest(), timeout_s)
        return models_of(answer)

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        parse_special_tokens: bool = False,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> Tokens:
        """The token ids of a prompt, as the model would receive them."""
        request = pb.TokenizeRequest(model=await self._model_name(model))
        if messages is not None:
            request.chat.CopyFrom(chat_of(messages, None))
        else:
            request.text = prompt or ""
            request.parse_special_tokens = parse_special_tokens
        answer = await self._call(self._stub.Tokenize, request, timeout_s)
        return Tokens(tuple(answer.token_ids), answer.rendered)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        keep_special_tokens: bool = False,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """Decode token ids to text."""
        request = pb.DetokenizeRequest(
            model=await self._model_name(model),
            token_ids=token_ids,
            keep_special_tokens=keep_special_tokens,
        )
        answer = await self._call(self._stub.Detokenize, request, timeout_s)
        text: str = answer.text
        return text

    async def _call(
        self, method: Any, request: Any, timeout_s: float | None, traceparent: str | None = None
    ) -> Any:
        try:
            return await method(
                request,
                timeout=self._deadline_s(timeout_s),
                metadata=self._settings.metadata(traceparent),
            )
        except grpc.aio.AioRpcError as error:
            ids = Ids.of(error.initial_metadata())
            raise from_rpc(error, request_id=ids.request_id, trace_id=ids.trace_id) from error

    def _deadline_s(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s

    async def _model_name(self, model: str | None) -> str:
        name = model or self._model
        if name is None:
            served = await self.models()
            name = only_model([one.name for one in served], self._settings.address)
            self._model = name
        return name
