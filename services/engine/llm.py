"""`LLM`: the engine in this process, for scripts and tests; no server and no second process."""

import dataclasses
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from inferfleet.v1 import inference_pb2
from services.common.config import resolve
from services.common.errors import InvalidArgumentError
from services.common.text import Tokenizer, chat_ids, render_chat, template_of
from services.engine.choice_stream import ChoiceStream
from services.engine.config import EngineConfig
from services.engine.engine_factory import build_engine, text_assets
from services.engine.grammar.constraint_check import check_constraint
from services.engine.messages import AddRequest, ChoiceOutput
from services.engine.outputs import RequestOutput, RequestOutputPool
from services.engine.runner import Runner
from services.engine.sampling_params import SamplingParams
from services.engine.step_result import StepResult

Prompt = str | Sequence[int]
"""Text, or ready token ids."""
Message = Mapping[str, Any]
"""One message of a conversation: `role`, `content` and the other fields of `ChatMessage`."""

_NO_LIMIT = 2**31 - 1
_PROGRESS_INTERVAL_S = 0.1
_GRAMMAR_POLL_S = 0.1


class LLM:
    """A model to call. Use it as a context manager, or call `close` at the end."""

    def __init__(
        self, model: str = "", *, runner: Callable[[], Runner] | None = None, **fields: Any
    ) -> None:
        """Load a model.

        Args:
            model: a folder in Hugging Face layout, a .gguf file or a known name.
            runner: makes the runner instead of the configuration.
            fields: those of `EngineConfig`.

        Raises:
            ConfigError: a value that cannot be used, by its name.
            ModelFileError: files that cannot be served.
            TypeError: no such field.
        """
        known = {f.name for f in dataclasses.fields(EngineConfig)}
        unknown = sorted(set(fields) - known)
        if unknown:
            raise TypeError(f"LLM() got an unexpected field {unknown[0]!r}")
        # All prompts of a call wait at once; nobody is refused for that.
        given = {"max_waiting": _NO_LIMIT, **fields, "model": model}
        config = resolve(EngineConfig, given, {}).config
        assets = text_assets(config)
        self.tokenizer = Tokenizer(assets)
        self._template = template_of(assets)
        self.engine = build_engine(config, runner)
        self._outputs = RequestOutputPool()
        self._streams: dict[str, list[ChoiceStream]] = {}
        self._next_key = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts; returns one output per prompt, in their order.

        Args:
            prompts: one text or list of token ids, or a list of such.
            sampling_params: one for all, or one per prompt; a request without a seed gets one.
            show_progress: draw a line on stderr.

        Raises:
            InvalidArgumentError: a request that cannot be served; none is run then.
            ValueError: another number of parameters than of prompts.
        """
        listed = _prompt_list(prompts)
        params = _params_list(sampling_params, len(listed))
        keys: list[str] = []
        try:
            for prompt, own in zip(listed, params, strict=True):
                keys.append(self._add_request(prompt, own))
            return self._run_engine(keys, show_progress)
        finally:
            self._abandon(keys)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        template_args: Mapping[str, Any] | None = None,
        show_progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer conversations by the model's chat template; otherwise as `generate`.

        Args:
            conversations: one list of messages, or a list of such.
            template_args: more variables for the template.

        Raises:
            InvalidArgumentError: a message that cannot be used, or the template refuses.
        """
        one = bool(conversations) and isinstance(conversations[0], Mapping)
        listed: Any = [conversations] if one else conversations
        prompts = [self._chat_prompt(messages, template_args or {}) for messages in listed]
        return self.generate(prompts, sampling_params, show_progress=show_progress)

    def close(self) -> None:
        """End the worker; idempotent."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _chat_prompt(
        self, messages: Sequence[Message], template_args: Mapping[str, Any]
    ) -> list[int]:
        try:
            chat = inference_pb2.Chat(messages=[dict(message) for message in messages])
            chat.template_args.update(dict(template_args))
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError.for_field("chat", str(error)) from error
        own = chat_ids(self._template, chat)
        if own is not None:
            return own
        text = render_chat(self._template, chat)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _add_request(self, prompt: Prompt, params: SamplingParams) -> str:
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if params.constraint is not None:
            check_constraint(params.constraint)
        if params.seed is None:
            params = params.with_seed(secrets.randbits(64))
        key = str(self._next_key)
        self._next_key += 1
        self.engine.add_request(
            AddRequest(request_key=key, prompt_token_ids=token_ids, params=params)
        )
        self._outputs.open(key, tuple(token_ids), params.n)
        self._streams[key] = [
            ChoiceStream(index, params, self.tokenizer, token_ids) for index in range(params.n)
        ]
        return key

    def _run_engine(self, keys: list[str], show_progress: bool) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        progress = _Progress(len(keys), enabled=show_progress)
        while self.engine.has_unfinished_requests():
            result = self.engine.step()
            if not (self.engine.worker.in_flight or result.step or result.marks):
                self.engine.constraints.wait(_GRAMMAR_POLL_S)
            progress.update(len(done), sum(len(o.token_ids) for o in result.outputs))
            for output in self._take(result):
                done[output.request_key] = output
        progress.end(len(done))
        return [done[key] for key in keys]

    def _take(self, result: StepResult) -> Iterable[RequestOutput]:
        """Apply a round; yields the requests that have given back their last block."""
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
        stream.add(output)
        delta = stream.take_delta()
        choice = owner.choices[output.choice]
        choice.text += delta.text if delta is not None else ""
        if stream.finished is not None and stream.finished.stop_string:
            choice.finish_reason = "STOP_STRING"
            choice.stop_string = stream.finished.stop_string
            self.engine.abort_request(output.request_key, output.choice)

    def _abandon(self, keys: list[str]) -> None:
        """After an error or an interrupt: end what still runs and forget what it said."""
        for key in keys:
            self.engine.abort_request(key)
            self._streams.pop(key, None)
            self._outputs.release(key)
        # A completed call has nothing left; an interrupted one leaves at most a round in flight.
        while self.engine.has_unfinished_requests():
            self.engine.step()


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    if listed and all(isinstance(item, int) for item in listed):
        return [[item for item in listed if isinstance(item, int)]]
    mixed = [item for item in listed if not isinstance(item, int)]
    if len(mixed) != len(listed):
        raise ValueError("a prompt is a text or a list of token ids, not both mixed")
    return mixed


def _params_list(
    given: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if len(given) != count:
        raise ValueError(f"{len(given)} sampling_params for {count} prompts")
    return list(given)


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
