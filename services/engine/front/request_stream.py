"""One open request: between the core, which never waits for it, and a reader, which may be slow.

Deltas wait here and join; past the limit the stream fails, so a reader that stops delays nobody.
"""

import asyncio
from collections.abc import Callable

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import AbortedError, FleetError, ResourceExhaustedError
from services.engine.contract.messages import ChoiceOutput
from services.engine.front.request_times import RequestTimes
from services.engine.front.request_translation import AcceptedRequest, ModelFacts
from services.engine.text.choice_stream import ChoiceStream, fill_logprob
from services.engine.text.detokenizer import Detokenizer, TokenBytes

Events = list[inference_pb2.GenerateResponse]


class RequestStream:
    """The events of one request. `add` and `fail` come from the core's side, `take` is the
    reader's; nothing is given out before the first token, so that until then another engine can
    take the request over unseen."""

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
        self.in_core = set(range(request.params.n)) - set(request.finished_choices)
        """Choices that the core still runs."""
        self.error: FleetError | None = None
        self._facts = facts
        self._tokens = tokens
        self._buffer_tokens = buffer_tokens
        self._started: inference_pb2.Started | None = None
        self._num_sent = 0
        self._finished_sent = set(request.finished_choices)
        self._summary_sent = False
        self._overflowed = False
        self._changed = asyncio.Event()
        self._choices = [self._choice(index) for index in range(request.params.n)]

    @property
    def num_completion_tokens(self) -> int:
        """Of all choices, end tokens included."""
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def complete(self) -> bool:
        """Whether every choice has its end."""
        return all(choice.finished is not None for choice in self._choices)

    @property
    def started(self) -> bool:
        """Whether anything was given to the reader."""
        return self._num_sent > 0

    @property
    def finish_reasons(self) -> list[str]:
        """Names of the choices' ends so far."""
        name = inference_pb2.FinishReason.Name
        ends = (choice.finished for choice in self._choices)
        return [name(end.reason).removeprefix("FINISH_REASON_") for end in ends if end is not None]

    def has_ended(self, choice: int) -> bool:
        """Whether that choice has its end."""
        return self._choices[choice].finished is not None

    def add(self, output: ChoiceOutput) -> None:
        """Take one round's output of one choice."""
        if self.error is not None or output.choice >= len(self._choices):
            return
        if self._started is None:
            self._start(output)
        choice = self._choices[output.choice]
        choice.add(output)
        if choice.num_pending > self._buffer_tokens:
            self._overflowed = True
            self.fail(
                ResourceExhaustedError(
                    f"the reader is {choice.num_pending} tokens behind; at most "
                    f"{self._buffer_tokens} are kept for it",
                    reason="READER_TOO_SLOW",
                )
            )
        self._changed.set()

    def fail(self, error: FleetError) -> None:
        """End with a status; the first one counts."""
        if self.error is None and not self.complete:
            self.error = error
            self._changed.set()

    def breaks(self, make: Callable[..., FleetError], message: str, reason: str) -> None:
        """End because the engine does: a repeat is right only if nothing was sent yet."""
        if not self.started:
            self.fail(make(message, reason=reason, retry_after_s=1.0))
            return
        counts = {
            "prompt_tokens": str(len(self.request.prompt_token_ids)),
            "completion_tokens": str(self.num_completion_tokens),
        }
        self.fail(AbortedError(message, reason=reason, metadata=counts))

    async def take(self) -> Events:
        """Wait for the next events; an empty list after the Summary.

        Raises:
            FleetError: the request ended with a status.
        """
        while True:
            if self._summary_sent:
                return []
            events = self._ready()
            if events:
                self._num_sent += len(events)
                return events
            if self.error is not None:
                raise self.error
            self._changed.clear()
            await self._changed.wait()

    def _choice(self, index: int) -> ChoiceStream:
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
            choice.begin_with(_prompt_text(self._tokens, request.prompt_token_ids))
        if index < len(request.continued):
            choice.replay(request.continued[index], request.sent_text_bytes[index])
        if index in request.finished_choices:
            choice.finished = inference_pb2.Finished(choice=index)
        return choice

    def _start(self, output: ChoiceOutput) -> None:
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

    def _ready(self) -> Events:
        if self.error is not None and (not self.started or self._overflowed):
            return []
        events: Events = []
        if self._started is not None and self._num_sent == 0:
            events.append(inference_pb2.GenerateResponse(started=self._started))
        for choice in self._choices:
            events.extend(self._ready_of(choice))
        if self.complete and self.error is None and self._started is not None:
            events.append(inference_pb2.GenerateResponse(summary=self._summary()))
            self._summary_sent = True
        return events if len(events) > 1 or self._num_sent else []

    def _ready_of(self, choice: ChoiceStream) -> Events:
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
    """The prompt for echo; a character that the output completes is left to the output."""
    detokenizer = Detokenizer(tokens)
    return "".join(map(detokenizer.feed, token_ids))
