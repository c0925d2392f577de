"""The gateway client of `generate`, `chat` and `demo`; it collects a stream into one record."""

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from inferfleet_cli.errors import CliError, from_rpc
from inferfleet_cli.supervisor.state_dir import StateDir
from inferfleet_cli.supervisor.tls import ClientTls
from inferfleet_proto.v1 import inference_pb2 as pb
from inferfleet_proto.v1 import inference_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
CONNECT_TIMEOUT_S = 10.0


@dataclass
class Answer:
    """One finished request with n = 1."""

    request_id: str = ""
    model: str = ""
    engine_id: str = ""
    trace_id: str = ""
    seed: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    usage: pb.Usage = field(default_factory=pb.Usage)
    timings: pb.Timings = field(default_factory=pb.Timings)
    ttft_s: float = 0.0
    total_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The object that `generate --json` prints. Scripts rely on its keys."""
        return {
            "request_id": self.request_id,
            "model": self.model,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "usage": {
                "prompt_tokens": self.usage.prompt_tokens,
                "cached_tokens": self.usage.cached_tokens,
                "completion_tokens": self.usage.completion_tokens,
            },
            "engine_id": self.engine_id,
            "trace_id": self.trace_id,
            "timings_s": {
                "queued": self.timings.queued_s,
                "prefill": self.timings.prefill_s,
                "decode": self.timings.decode_s,
                "ttft": self.ttft_s,
                "total": self.total_s,
            },
        }


class GatewayClient:
    """A connection to a gateway, or to one engine that was started with --public."""

    def __init__(
        self, address: str, api_key_file: Path | None = None, tls: ClientTls | None = None
    ) -> None:
        """The connection is opened by the first call.

        Args:
            tls: None: an unencrypted connection.

        Raises:
            CliError: the file of the API key, or of TLS, cannot be read.
        """
        self.address = address
        self._metadata = _credentials(api_key_file)
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ]
        credentials = tls.credentials() if tls is not None else None
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=options)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def __enter__(self) -> "GatewayClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def default_model(self) -> str:
        """The single served model.

        Raises:
            CliError: no model is served, or several are, or the gateway does not answer.
        """
        try:
            reply = self._stub.ListModels(
                pb.ListModelsRequest(), timeout=CONNECT_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise from_rpc(error, self.address) from error
        names = [model.name for model in reply.models]
        if len(names) != 1:
            served = ", ".join(names) or "no model"
            raise CliError(f"name a model with --model: {self.address} serves {served}")
        return str(names[0])

    def generate(
        self,
        request: pb.GenerateRequest,
        on_text: Callable[[str], None],
        timeout_s: float | None = None,
    ) -> Answer:
        """Stream one request; `on_text` is called with each piece of text as it arrives.

        Raises:
            CliError: the request failed.
        """
        trace_id = secrets.token_hex(16)
        answer = Answer(trace_id=trace_id)
        parent = f"00-{trace_id}-{secrets.token_hex(8)}-01"
        metadata = (*self._metadata, ("traceparent", parent))
        started = time.monotonic()
        call = self._stub.Generate(request, metadata=metadata, timeout=timeout_s)
        try:
            for response in call:
                _add_response(answer, response, started, on_text)
        except grpc.RpcError as error:
            raise from_rpc(error, self.address) from error
        finally:
            call.cancel()
        answer.total_s = time.monotonic() - started
        return answer


def _credentials(api_key_file: Path | None) -> tuple[tuple[str, str], ...]:
    if api_key_file is None:
        return ()
    try:
        return (("authorization", f"Bearer {api_key_file.read_text().strip()}"),)
    except OSError as error:
        message = f"--api-key-file: cannot read {api_key_file}: {error.strerror}"
        raise CliError(message, status=2) from error


def _add_response(
    answer: Answer, response: pb.GenerateResponse, started: float, on_text: Callable[[str], None]
) -> None:
    event = response.WhichOneof("event")
    if event == "started":
        answer.request_id = response.started.request_id
        answer.model = response.started.model
        answer.seed = response.started.seed
        answer.engine_id = response.started.engine_id
    elif event == "delta":
        if not answer.ttft_s:
            answer.ttft_s = time.monotonic() - started
        answer.token_ids.extend(response.delta.token_ids)
        answer.text += response.delta.text
        on_text(response.delta.text or response.delta.reasoning)
    elif event == "finished":
        name = pb.FinishReason.Name(response.finished.reason)
        answer.finish_reason = name.removeprefix("FINISH_REASON_")
    elif event == "summary":
        answer.usage = response.summary.usage
        answer.timings = response.summary.timings
        answer.engine_id = response.summary.engine_id or answer.engine_id


def chat_prompt(messages: Iterable[tuple[str, str]]) -> pb.Chat:
    """Convert (role, content) pairs to the contract's Chat."""
    return pb.Chat(messages=[pb.ChatMessage(role=role, content=text) for role, text in messages])


def gateway_tls(requested: ClientTls, address: str, state_dir: Path) -> ClientTls:
    """The TLS flags; without --address, what the local fleet uses where no flag is given."""
    if requested.used or address:
        return requested
    return ClientTls.of_record(StateDir(state_dir).read_record())


def gateway_address(requested: str, state_dir: Path) -> str:
    """The --address flag, else the local fleet's gateway, else the default address."""
    if requested:
        return requested
    record = StateDir(state_dir).read_record()
    return str(record["gateway"]) if record else DEFAULT_ADDRESS
