"""`LLM`: a model in the calling process, for scripts and tests; no server, no second process."""

import dataclasses
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from inferfleet_proto.v1 import inference_pb2
from services.common.config.settings import resolve
from services.common.errors import BY_NAME, FleetError, InvalidArgumentError, Violation
from services.common.text import Tokenizer, render_prompt, rendered_ids, template_of, text_ids
from services.engine.contract.config import EngineConfig
from services.engine.contract.finish_reason import FinishReason
from services.engine.contract.messages import (
    AddRequest,
    ChoiceOutput,
    CoreRequest,
    RequestFailure,
)
from services.engine.contract.runner import Runner
from services.engine.contract.sampling_params import SamplingParams
from services.engine.core.engine_factory import build_engine, text_assets
from services.engine.core.step_result import StepResult
from services.engine.grammar.constraint_check import check_constraint
from services.engine.offline.llm_inputs import Prompt, params_list, prompt_list
from services.engine.offline.outputs import RequestOutput, RequestOutputPool
from services.engine.text.choice_stream import ChoiceStream

Message = Mapping[str, Any]
"""One message of a conversation: `role`, `content` and the other fields of `ChatMessage`."""

_NO_LIMIT = 2**31 - 1
_PROGRESS_INTERVAL_S = 0.1
_GRAMMAR_POLL_S = 0.1


class LLM:
    """A loaded model. Use it as a context manager, or call `close` at the end."""

    def __init__(
        self, model: str = "", *, runner: Callable[[], Runner] | None = None, **fields: Any
    ) -> None:
        """Load a model.

        Args:
            model: a folder in Hugging Face layout, a .gguf file or a known name.
            runner: makes the runner instead of the configuration.
            fields: fields of `EngineConfig`.

        Raises:
            ConfigError: a value cannot be used; the message names the field.
            ModelFileError: the model's files cannot be served.
            TypeError: `EngineConfig` has no such field.
        """
        known = {f.name for f in dataclasses.fields(EngineConfig)}
        unknown = sorted(set(fields) - known)
        if unknown:
            raise TypeError(f"LLM() got an unexpected field {unknown[0]!r}")
        # All prompts of a call are enqueued at once; the queue must take them all.
        given = {"max_waiting": _NO_LIMIT, **fields, "model": model}
        config = resolve(EngineConfig, given, {}).config
        assets = text_assets(config)
        self.tokenizer = Tokenizer(assets)
        self._template = template_of(assets)
        self.engine = build_engine(config, runner)
        self._outputs = RequestOutputPool()
        self._streams: dict[str, list[ChoiceStream]] = {}
        self._next_key = 0
        self._closed: str | None = None
        """Why calls are refused, once the model is closed."""

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = False,
        return_failures: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts; returns one output per prompt, in their order.

        An interrupt or an error ends the requests of this call. The next call works, or raises
        RuntimeError if the model had to be closed.

        Args:
            prompts: one text or list of token ids, or a list of such.
            sampling_params: one for all, or one per prompt; without a seed a random one is drawn.
            show_progress: draw a progress line on stderr.
            return_failures: return requests that failed while running, with `failure` set, instead
                of raising an error once all have ended.

        Raises:
            InvalidArgumentError: a request cannot be served; none is run then.
            FleetError: a request failed while running: its constraint cannot be compiled
                (InvalidArgumentError) or matched, or the model produced values that are not finite.
            TypeError, ValueError: a prompt or its parameters have the wrong type or number.
            RuntimeError: the model is closed.
        """
        self._check_open()
        listed = prompt_list(prompts)
        params = params_list(sampling_params, len(listed))
        keys: list[str] = []
        try:
            for prompt, own in zip(listed, params, strict=True):
                self._add_request(prompt, own, keys)
            outputs = self._run_engine(keys, show_progress)
        except BaseException as error:
            self._abandon(keys, error)
            raise
        if not return_failures:
            _raise_first_failure(outputs)
        return outputs

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        template_args: Mapping[str, Any] | None = None,
        show_progress: bool = False,
        return_failures: bool = False,
    ) -> list[RequestOutput]:
        """Answer conversations, rendered with the model's chat template; otherwise as `generate`.

        Args:
            conversations: one list of messages, or a list of such lists.
            template_args: further variables for the template.

        Raises:
            InvalidArgumentError: a message cannot be used, or the template raises an error.
            FleetError, TypeError, ValueError, RuntimeError: as `generate`.
        """
        self._check_open()
        one = bool(conversations) and isinstance(conversations[0], Mapping)
        listed: Any = [conversations] if one else conversations
        prompts = [self._chat_prompt(messages, template_args or {}) for messages in listed]
        return self.generate(
            prompts,
            sampling_params,
            show_progress=show_progress,
            return_failures=return_failures,
        )

    def close(self) -> None:
        """End the engine; idempotent. Later calls raise RuntimeError."""
        self._closed = self._closed or "LLM is closed"
        self.engine.close()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(self._closed)

    def _chat_prompt(
        self, messages: Sequence[Message], template_args: Mapping[str, Any]
    ) -> list[int]:
        try:
            chat = inference_pb2.Chat(messages=[dict(message) for message in messages])
            chat.template_args.update(dict(template_args))
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError.for_field("chat", str(error)) from error
        rendered = render_prompt(self._template, self.tokenizer.control, chat)
        return rendered_ids(self._template, self.tokenizer, chat, rendered)

    def _add_request(self, prompt: Prompt, params: SamplingParams, keys: list[str]) -> None:
        """Enqueue a request; its key is in `keys` first, so that an interrupt can end it."""
        token_ids = text_ids(self.tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
        if params.constraint is not None:
            check_constraint(params.constraint)
        if params.seed is None:
            params = params.with_seed(secrets.randbits(64))
        key = str(self._next_key)
        self._next_key += 1
        keys.append(key)
        self.engine.add_request(AddRequest(key, CoreRequest(token_ids, params)))
        self._outputs.open(key, tuple(token_ids), params.n)
        self._streams[key] = [
            ChoiceStream(index, params, self.tokenizer, token_ids) for index in range(params.n)
        ]

    def _run_engine(self, keys: list[str], show_progress: bool) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        progress = _Progress(len(keys), enabled=show_progress)
        while self.engine.has_unfinished_requests():
            result = self.engine.step()
            if self.engine.is_stuck(result):
                self.engine.wait_for_grammar(_GRAMMAR_POLL_S)
            progress.update(len(done), sum(len(o.token_ids) for o in result.outputs))
            for output in self._take_result(result):
                done[output.request_key] = output
        progress.end(len(done))
        return [done[key] for key in keys]

    def _take_result(self, result: StepResult) -> Iterable[RequestOutput]:
        """Apply a round's result; yields the requests whose last block is released."""
        for output in result.outputs:
            self._take_output(output)
        for failure in result.failures:
            self._outputs.fail(failure)
        for mark in result.marks:
            if mark.verb == "release":
                self._streams.pop(mark.request_key, None)
                released = self._outputs.release(mark.request_key)
                if released is not None:
                    yield released

    def _take_output(self, output: ChoiceOutput) -> None:
        owner = self._outputs.add(output)
        if owner is None:
            return
        stream = self._streams[output.request_key][output.choice]
        stream.add_output(output)
        delta = stream.take_delta()
        choice = owner.choices[output.choice]
        choice.text += delta.text if delta is not None else ""
        if stream.finished is not None and stream.finished.stop_string:
            choice.finish_reason = FinishReason.STOP_STRING
            choice.stop_string = stream.finished.stop_string
            self.engine.abort_request(output.request_key, output.choice)

    def _abandon(self, keys: list[str], error: BaseException) -> None:
        """After an error or an interrupt: end this call's requests and drop their outputs.

        If the engine is not empty and consistent after that, because it was interrupted while it
        changed its records or because its runner failed, it is closed: it cannot be used any more.
        """
        clean = False
        try:
            clean = self._empty_engine(keys)
        except Exception as another:
            error.add_note(f"ending the call's requests failed as well: {another!r}")
        finally:  # on a second interrupt too
            if not clean:
                name = type(error).__name__
                self._closed = f"LLM is closed: {name} left requests that could not be ended"
                error.add_note(self._closed)
                self.close()

    def _empty_engine(self, keys: list[str]) -> bool:
        engine = self.engine
        for key in keys:
            self._streams.pop(key, None)
            self._outputs.release(key)
            engine.abort_request(key)
        # No request is left to run; only the rounds in flight still hold blocks.
        engine.settle()
        engine.check_integrity()
        return not engine.has_unfinished_requests() and engine.load().held_blocks == 0


def _raise_first_failure(outputs: Sequence[RequestOutput]) -> None:
    failed = [(at, o.failure) for at, o in enumerate(outputs) if o.failure is not None]
    if failed:
        at, failure = failed[0]
        error = _error_of(failure)
        error.add_note(
            f"prompt {at} failed, {len(failed)} of {len(outputs)} in all; "
            "return_failures=True returns all outputs"
        )
        raise error


def _error_of(failure: RequestFailure) -> FleetError:
    violations = [Violation(failure.field, failure.message)] if failure.field else []
    return BY_NAME[failure.code](failure.message, reason=failure.reason, violations=violations)


class _Progress:
    """One line on stderr, redrawn at most ten times a second."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._total = total
        self._enabled = enabled
        self._tokens = 0
        self._started = time.monotonic()
        self._drawn = 0.0

    def update(self, done: int, tokens: int) -> None:
        self._tokens += tokens
        now = time.monotonic()
        if self._enabled and now - self._drawn >= _PROGRESS_INTERVAL_S:
            self._drawn = now
            self._draw(done, "")

    def end(self, done: int) -> None:
        if self._enabled:
            self._draw(done, "\n")

    def _draw(self, done: int, end: str) -> None:
        rate = self._tokens / max(1e-9, time.monotonic() - self._started)
        line = f"\r{done}/{self._total} prompts, {self._tokens} tokens, {rate:.0f} tokens/s"
        print(line, end=end, file=sys.stderr, flush=True)
