"""`Client`: requests to a fleet from synchronous Python. Needs grpcio and protobuf only."""

from collections.abc import Iterator, Sequence
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


class Stream:
    """The events of one request, as they arrive. Leaving the loop early cancels the request.

    for event in client.generate("Once upon a time"): …
    """

    def __init__(self, call: Any) -> None:
        self._call = call

    def __iter__(self) -> Iterator[Event]:
        try:
            for message in self._call:
                event = event_of(message)
                if event is not None:
                    yield event
        except grpc.RpcError as error:
            ids = self.ids
            raise from_rpc(error, request_id=ids.request_id, trace_id=ids.trace_id) from error
        finally:
            self.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    @property
    def ids(self) -> Ids:
        """The ids of request, trace and engine; waits for the server's initial metadata."""
        return Ids.of(self._call.initial_metadata())

    def texts(self) -> Iterator[str]:
        """The text pieces of the first choice; other events are skipped."""
        for event in self:
            if isinstance(event, Delta) and event.choice == 0 and event.text:
                yield event.text

    def cancel(self) -> None:
        """End the request; does nothing once it has ended."""
        self._call.cancel()


class Client:
    """A connection to a gateway, or to one engine that was started with --public.

    Args:
        address: host:port.
        api_key: sent with each call; needed if the server checks API keys.
        model: the model of calls that name none; None means the only model that the server serves.
        timeout_s: deadline of a call that sets none; None means the server's limit.
        tls: encrypt the connection.
        ca_file: PEM file of the CA, if the server's certificate is not from a public one.
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
            self._channel = grpc.insecure_channel(address, options=OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=OPTIONS)
        self._stub: Any = inference_pb2_grpc.InferenceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; running streams are cancelled."""
        self._channel.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
        traceparent: str | None = None,
        **params: Unpack[GenerateParams],
    ) -> Stream:
        """Start a request and return its stream of events.

        Args:
            prompt, messages, token_ids: the prompt; give exactly one of the three.
            model: overrides the client's model.
            timeout_s: deadline in seconds; overrides the client's.
            traceparent: W3C trace context of the caller, to join its trace.
            **params: sampling, stop, constraint and response options; see `GenerateParams`.

        Raises:
            ValueError, TypeError: the arguments do not form a request.
            InferfleetError: the request failed; raised while iterating.
        """
        request = build_request(self._model_name(model), prompt, messages, token_ids, params)
        return Stream(
            self._stub.Generate(
                request,
                timeout=self._deadline_s(timeout_s),
                metadata=self._settings.metadata(traceparent),
            )
        )

    def complete(
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
        """Run a request and return its whole answer; the arguments are those of `generate`.

        Raises:
            ValueError, TypeError: the arguments do not form a request.
            InferfleetError: the request failed.
        """
        request = build_request(self._model_name(model), prompt, messages, token_ids, params)
        answer = self._call(self._stub.Complete, request, timeout_s, traceparent)
        return completion_of(answer)

    def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """The served models."""
        return models_of(self._call(self._stub.ListModels, pb.ListModelsRequest(), timeout_s))

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        parse_special_tokens: bool = False,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> Tokens:
        """The token ids of a prompt, as the model would receive them."""
        request = pb.TokenizeRequest(model=self._model_name(model))
        if messages is not None:
            request.chat.CopyFrom(chat_of(messages, None))
        else:
            request.text = prompt or ""
            request.parse_special_tokens = parse_special_tokens
        answer = self._call(self._stub.Tokenize, request, timeout_s)
        return Tokens(tuple(answer.token_ids), answer.rendered)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        keep_special_tokens: bool = False,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """Decode token ids to text."""
        request = pb.DetokenizeRequest(
            model=self._model_name(model),
            token_ids=token_ids,
            keep_special_tokens=keep_special_tokens,
        )
        text: str = self._call(self._stub.Detokenize, request, timeout_s).text
        return text

    def _call(
        self, method: Any, request: Any, timeout_s: float | None, traceparent: str | None = None
    ) -> Any:
        try:
            return method(
                request,
                timeout=self._deadline_s(timeout_s),
                metadata=self._settings.metadata(traceparent),
            )
        except grpc.RpcError as error:
            ids = Ids.of(error.initial_metadata() if isinstance(error, grpc.Call) else None)
            raise from_rpc(error, request_id=ids.request_id, trace_id=ids.trace_id) from error

    def _deadline_s(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s

    def _model_name(self, model: str | None) -> str:
        name = model or self._model
        if name is None:
            name = only_model([served.name for served in self.models()], self._settings.address)
            self._model = name
        return name
