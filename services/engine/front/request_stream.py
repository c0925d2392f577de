"""One open request: takes the core's outputs and gives the client's events.

The core never waits for a client. Deltas that the client has not read are joined; beyond the
buffer limit the stream fails.
"""

import asyncio

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import (
    AbortedError,
    FleetError,
    ResourceExhaustedError,
    UnavailableError,
)
from services.engine.contract.messages import ChoiceOutput
from services.engine.front.request_times import RequestTimes
from services.engine.front.request_translation import AcceptedRequest, ModelFacts
from services.engine.text.choice_stream import ChoiceStream, fill_logprob
from services.engine.text.detokenizer import Detokenizer, TokenBytes

Events = list[inference_pb2.GenerateResponse]


class RequestStream:
    """The events of one request.

    The core's side calls `add_output` and `fail`, the client's side `next_events`. There are no
    events before the first token: until then the balancer can move the request to another engine.

    Args:
        key: the request's key in the messages to the core.
        buffer_tokens: unread tokens of one choice beyond which the stream fails.
    """

    def __init__(
        self,
        key: str,
        request: AcceptedRequest,
        facts: ModelFacts,
        tokens: TokenBytes,
        times: RequestTimes,
        *,
        buffer_tokens: int,
    ) -> None:
        self.key = key
        self.request = request
        self.times = times
        self.num_cached_tokens = 0
        self.error: FleetError | None = None
        self._in_core = set(range(request.params.n)) - set(request.finished_choices)
        """Choices that the core still runs."""
        self._facts = facts
        self._tokens = tokens
        self._buffer_tokens = buffer_tokens
        self._started: inference_pb2.Started | None = None
        self._num_sent = 0
        self._finished_sent = set(request.finished_choices)
        self._summary_sent = False
        self._overflowed = False
        self._changed = asyncio.Event()
        self._choices = [self._make_choice(index) for index in range(request.params.n)]

    @property
    def num_completion_tokens(self) -> int:
        """Output tokens of all choices, end tokens included."""
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def complete(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finished is not None for choice in self._choices)

    @property
    def started(self) -> bool:
        """Whether the client has read any event."""
        return self._num_sent > 0

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reasons of the choices that have ended, without the prefix FINISH_REASON_."""
        name = inference_pb2.FinishReason.Name
        ends = (choice.finished for choice in self._choices)
        return [name(end.reason).removeprefix("FINISH_REASON_") for end in ends if end is not None]

    def has_ended(self, choice: int) -> bool:
        """Whether that choice has ended."""
        return self._choices[choice].finished is not None

    @property
    def in_core(self) -> bool:
        """Whether the core still runs a choice of this request."""
        return bool(self._in_core)

    def end_choice_in_core(self, choice: int) -> bool:
        """Record that the core need not run this choice any more; returns whether it did."""
        ran = choice in self._in_core
        self._in_core.discard(choice)
        return ran

    def leave_core(self) -> bool:
        """Record that the core need not run this request any more; returns whether it did."""
        ran = bool(self._in_core)
        self._in_core.clear()
        return ran

    def add_output(self, output: ChoiceOutput) -> None:
        """Add one round's output of one choice."""
        if self.error is not None or output.choice >= len(self._choices):
            return
        if self._started is None:
            self._make_started(output)
        choice = self._choices[output.choice]
        choice.add_output(output)
        if choice.num_pending > self._buffer_tokens:
            self._overflowed = True
            self.fail(
                ResourceExhaustedError(
                    f"the client has not read {choice.num_pending} tokens; at most "
                    f"{self._buffer_tokens} are buffered",
                    reason="READER_TOO_SLOW",
                )
            )
        self._changed.set()

    def fail(self, error: FleetError) -> None:
        """End the stream with a status; the first one counts."""
        if self.error is None and not self.complete:
            self.error = error
            self._changed.set()

    def interrupt(self, message: str, reason: str) -> None:
        """End the stream because the engine goes down or its core died.

        The status is UNAVAILABLE (the request can be repeated) before the first event, afterwards
        ABORTED with the token counts that a resume needs.
        """
        if not self.started:
            self.fail(UnavailableError(message, reason=reason, retry_after_s=1.0))
            return
        counts = {
            "prompt_tokens": str(len(self.request.prompt_token_ids)),
            "completion_tokens": str(self.num_completion_tokens),
        }
        self.fail(AbortedError(message, reason=reason, metadata=counts))

    async def next_events(self) -> Events:
        """Wait for the next events; returns an empty list after the Summary.

        Raises:
            FleetError: the request ended with a status.
        """
        while True:
            if self._summary_sent:
                return []
            events = self._collect_events()
            if events:
                self._num_sent += len(events)
                return events
            if self.error is not None:
                raise self.error
            self._changed.clear()
            await self._changed.wait()

    def _make_choice(self, index: int) -> ChoiceStream:
        request = self.request
        choice = ChoiceStream(
            index,
            request.params,
            self._tokens,
            request.prompt_token_ids,
            no_text=request.no_text,
            shown_ids=request.shown_token_ids,
        )
        if request.echo and not request.no_text:
            choice.add_prompt(_prompt_text(self._tokens, request.prompt_token_ids))
        if index < len(request.continued):
            choice.replay(request.continued[index], request.sent_text_bytes[index])
        if index in request.finished_choices:
            choice.finished = inference_pb2.Finished(choice=index)
        return choice

    def _make_started(self, output: ChoiceOutput) -> None:
        request, facts = self.request, self._facts
        self.num_cached_tokens = output.num_cached_tokens
        self._started = inference_pb2.Started(
            request_id=request.request_id,
            model=facts.model,
            model_revision=facts.model_revision,
            prompt_tokens=len(request.prompt_token_ids),
            cached_tokens=output.num_cached_tokens,
            seed=request.params.seed,
            engine_id=facts.engine_id,
        )
        if request.params.prompt_logprobs and not request.continued:
            first = request.prompt_token_ids[0]
            self._started.prompt_logprobs.add(token_id=first, token=self._tokens.token_bytes(first))
            for entry in output.prompt_logprobs:
                fill_logprob(self._started.prompt_logprobs.add(), entry, self._tokens)

    def _collect_events(self) -> Events:
        if self.error is not None and (not self.started or self._overflowed):
            return []
        events: Events = []
        if self._started is not None and self._num_sent == 0:
            events.append(inference_pb2.GenerateResponse(started=self._started))
        for choice in self._choices:
            events.extend(self._choice_events(choice))
        if self.complete and self.error is None and self._started is not None:
            events.append(inference_pb2.GenerateResponse(summary=self._summary()))
            self._summary_sent = True
        return events if len(events) > 1 or self._num_sent else []

    def _choice_events(self, choice: ChoiceStream) -> Events:
        ended = choice.finished is not None or self.error is not None
        if choice.index in self._finished_sent:
            return []
        if choice.num_pending < self.request.stream_interval and not ended:
            return []
        delta = choice.take_delta()
        events = [] if delta is None else [inference_pb2.GenerateResponse(delta=delta)]
        if choice.finished is not None:
            self._finished_sent.add(choice.index)
            events.append(inference_pb2.GenerateResponse(finished=choice.finished))
        return events

    def _summary(self) -> inference_pb2.Summary:
        return inference_pb2.Summary(
            usage=inference_pb2.Usage(
                prompt_tokens=len(self.request.prompt_token_ids),
                cached_tokens=self.num_cached_tokens,
                completion_tokens=self.num_completion_tokens,
            ),
            timings=self.times.timings(),
            exact=True,
            engine_id=self._facts.engine_id,
        )


def _prompt_text(tokens: TokenBytes, token_ids: list[int]) -> str:
    """The prompt's text for echo, without an incomplete last character: the output completes it."""
    detokenizer = Detokenizer(tokens)
    return "".join(map(detokenizer.feed, token_ids))
