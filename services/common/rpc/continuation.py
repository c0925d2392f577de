"""How a stream that broke after its first token is resumed elsewhere, invisibly for the client.

Each forwarder of a stream (a balancer, or the gateway when a balancer dies) keeps a `StreamLedger`
of what the client has. It stores raw bytes and parses them only when the stream has to be resumed.
From then on it drops what the client already has and corrects the totals in the final Summary.
"""

from array import array
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from inferfleet_proto.internal.v1 import engine_pb2
from inferfleet_proto.v1 import inference_pb2
from services.common.errors import InternalError

DEFAULT_RAW_BYTES = 64 * 1024


@dataclass
class _ChoiceSoFar:
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    text_bytes: int = 0
    finished: bool = False


class StreamLedger:
    """The record of what the client of one stream has; owned by the stream's forwarder.

    Args:
        num_choices: the request's n.
        base: what the client had before, if this stream is itself a continuation.
        max_raw_bytes: limit of raw messages kept; beyond it they are reduced to token ids and
            counts, so the request's tokens bound the memory.
    """

    def __init__(
        self,
        num_choices: int = 1,
        base: engine_pb2.Continuation | None = None,
        max_raw_bytes: int = DEFAULT_RAW_BYTES,
    ) -> None:
        self._num_choices = num_choices
        self._max_raw_bytes = max_raw_bytes
        self._raw: list[bytes] = []
        self._raw_bytes = 0
        self._has_messages = False
        self._resumed = False
        self._started: inference_pb2.Started | None = None
        self._summary: inference_pb2.Summary | None = None
        self._choices = {i: _ChoiceSoFar() for i in range(num_choices)}
        self._continuations = 0
        self._exact = True
        for choice in base.choices if base is not None else ():
            so_far = self._choices.setdefault(choice.index, _ChoiceSoFar())
            so_far.token_ids.extend(choice.token_ids)
            so_far.text_bytes = choice.sent_text_bytes
            so_far.finished = choice.finished

    def accept(self, raw: bytes) -> bytes | None:
        """Record the source's next message; returns what to send to the client, None for nothing.

        Raises:
            InternalError: the message is not a GenerateResponse.
        """
        self._has_messages = True
        if self._resumed:
            return self._filter(raw)
        self._raw.append(raw)
        self._raw_bytes += len(raw)
        if self._raw_bytes > self._max_raw_bytes:
            self._fold()
        return raw

    @property
    def empty(self) -> bool:
        """Whether the client has received nothing of this stream."""
        return not self._has_messages

    @property
    def complete(self) -> bool:
        """Whether the Summary, the stream's last message, has passed."""
        if self._summary is None and self._raw:
            last = _parse(self._raw[-1])
            if last.HasField("summary"):
                self._summary = last.summary
        return self._summary is not None

    @property
    def summary(self) -> inference_pb2.Summary | None:
        """The Summary that the client received; None before the end."""
        return self._summary if self.complete else None

    @property
    def num_tokens(self) -> int:
        """Tokens that the client has received, over all choices."""
        self._fold()
        return sum(len(choice.token_ids) for choice in self._choices.values())

    @property
    def continuations(self) -> int:
        """How often this ledger has seen the stream resumed."""
        return self._continuations

    @property
    def has_output(self) -> bool:
        """Whether a token or text has passed; then only an engine of equal numerics may resume."""
        self._fold()
        return any(c.token_ids or c.text_bytes or c.finished for c in self._choices.values())

    @property
    def started(self) -> inference_pb2.Started | None:
        """The stream's first message, or None."""
        self._fold()
        return self._started

    def continuation(self) -> engine_pb2.Continuation | None:
        """The state that another engine resumes from; None if it can start the request anew."""
        if not self.has_output:
            return None
        known = engine_pb2.Continuation()
        for index, so_far in sorted(self._choices.items()):
            if so_far.token_ids or so_far.text_bytes or so_far.finished:
                known.choices.add(
                    index=index,
                    token_ids=so_far.token_ids,
                    finished=so_far.finished,
                    sent_text_bytes=so_far.text_bytes,
                )
        return known

    def resume(self, *, exact: bool) -> None:
        """Expect the following messages from another source.

        Args:
            exact: whether its tokens are bit-identical to those of the lost source.
        """
        if self.empty:
            return
        self._resumed = True
        if self.has_output:
            self._continuations += 1
            self._exact = self._exact and exact

    def closing(self) -> bytes | None:
        """The serialised Summary if nothing but that is missing; None if an engine must resume.

        The timings are lost with the engine and stay 0.
        """
        self._fold()
        started = self._started
        if started is None or not all(choice.finished for choice in self._choices.values()):
            return None
        usage = inference_pb2.Usage(
            prompt_tokens=started.prompt_tokens,
            cached_tokens=started.cached_tokens,
            completion_tokens=self.num_tokens,
        )
        self._summary = inference_pb2.Summary(
            usage=usage,
            continuations=self._continuations,
            exact=self._exact,
            engine_id=started.engine_id,
        )
        return inference_pb2.GenerateResponse(summary=self._summary).SerializeToString()

    def _fold(self) -> None:
        raw, self._raw, self._raw_bytes = self._raw, [], 0
        for message in raw:
            self._record(_parse(message))

    def _record(self, message: inference_pb2.GenerateResponse) -> bool:
        """Record a message; returns whether the client does not have it yet."""
        event = message.WhichOneof("event")
        if event == "delta":
            return self._record_delta(message.delta)
        if event == "finished":
            so_far = self._choices.setdefault(message.finished.choice, _ChoiceSoFar())
            is_new, so_far.finished = not so_far.finished, True
            return is_new
        if event == "started":
            is_new = self._started is None
            if is_new:
                self._started = message.started
            return is_new
        if event == "summary":
            self._summary = message.summary
        return True

    def _record_delta(self, delta: inference_pb2.Delta) -> bool:
        so_far = self._choices.setdefault(delta.choice, _ChoiceSoFar())
        if so_far.finished:
            return False
        so_far.token_ids.extend(delta.token_ids)
        kind = delta.WhichOneof("content")
        if kind == "text":
            so_far.text_bytes += len(delta.text.encode())
        elif kind == "reasoning":
            so_far.text_bytes += len(delta.reasoning.encode())
        elif kind == "tool_call":
            so_far.text_bytes += len(delta.tool_call.arguments.encode())
        return True

    def _filter(self, raw: bytes) -> bytes | None:
        message = _parse(raw)
        if message.HasField("summary"):
            self._summary = self._correct_summary(message.summary)
            return inference_pb2.GenerateResponse(summary=self._summary).SerializeToString()
        return raw if self._record(message) else None

    def _correct_summary(self, last: inference_pb2.Summary) -> inference_pb2.Summary:
        """The resuming engine's Summary, corrected to cover the whole stream."""
        whole = inference_pb2.Summary()
        whole.CopyFrom(last)
        if self._started is not None:
            whole.usage.prompt_tokens = self._started.prompt_tokens
            whole.usage.cached_tokens = self._started.cached_tokens
        whole.usage.completion_tokens = self.num_tokens
        whole.continuations = last.continuations + self._continuations
        whole.exact = (last.exact or not last.continuations) and self._exact
        return whole


def _parse(raw: bytes) -> inference_pb2.GenerateResponse:
    try:
        return inference_pb2.GenerateResponse.FromString(raw)
    except DecodeError as error:
        raise InternalError(
            "the engine sent a message that is not a GenerateResponse", reason="MALFORMED_STREAM"
        ) from error
