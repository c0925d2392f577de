"""One choice of a request, from token ids to deltas: text, stop strings, log probabilities.

The output is a pure function of the tokens so far. Only the grouping into deltas depends on when
the client reads. Resuming a stream on another engine relies on this.
"""

from collections.abc import Container, Sequence

from inferfleet_proto.v1 import inference_pb2
from services.engine.contract.finish_reason import FinishReason
from services.engine.contract.messages import ChoiceOutput, TokenLogprobs
from services.engine.contract.sampling_params import SamplingParams
from services.engine.text.detokenizer import Detokenizer, TokenBytes
from services.engine.text.stop_strings import StopChecker

# Tokens that end a choice for these reasons are in the ids but not in the text.
_HIDDEN_ENDS = frozenset({FinishReason.EOS, FinishReason.STOP_TOKEN})


class ChoiceStream:
    """Turns the core's outputs of one choice into deltas; holds what the client has not read.

    Args:
        tokens: the tokenizer.
        no_text: deltas carry token ids only.
        shown_ids: special tokens whose text is part of the output.
    """

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        tokens: TokenBytes,
        prompt_token_ids: Sequence[int],
        *,
        no_text: bool = False,
        shown_ids: Container[int] = frozenset(),
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.finished: inference_pb2.Finished | None = None
        self._params = params
        self._tokens = tokens
        self._detokenizer = Detokenizer(tokens, prompt_token_ids, shown_ids)
        self._stops = StopChecker(params.stop_strings, include=params.include_stop_in_output)
        # Stop strings are found in the text, so they need it even if the client does not.
        self._needs_text = not no_text or bool(params.stop_strings)
        self._shows_text = not no_text
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._known_bytes = 0

    @property
    def num_pending(self) -> int:
        """Tokens that the client has not read."""
        return len(self._token_ids)

    def add_prompt(self, text: str) -> None:
        """Put the prompt's text before the first token (echo)."""
        self._text.append(text)

    def replay(self, token_ids: Sequence[int], sent_text_bytes: int = 0) -> None:
        """Add tokens that another engine has already sent: they count but are not sent again.

        Args:
            sent_text_bytes: bytes of this choice's text that the client has, in UTF-8, echo
                included. This is more than the tokens alone give if text that was held back for
                stop strings was sent at the end.
        """
        for token_id in token_ids:
            self._add_token(token_id, hidden=False)
        if not token_ids and not sent_text_bytes:
            return
        given = sum(len(piece.encode()) for piece in self._text)
        self._known_bytes = max(0, sent_text_bytes - given)
        self._text.clear()
        self._token_ids.clear()

    def add_output(self, output: ChoiceOutput) -> None:
        """Add one round's tokens; tokens after a stop string are dropped."""
        if self.finished is not None:
            return
        last = len(output.token_ids) - 1
        for index, token_id in enumerate(output.token_ids):
            if index < len(output.logprobs):
                self._logprobs.append(output.logprobs[index])
            ends = index == last and output.finish_reason in _HIDDEN_ENDS
            if self._add_token(token_id, hidden=ends and not self._shows_end(output)):
                return
        if output.finish_reason is not None:
            self._finish(output)

    def take_delta(self) -> inference_pb2.Delta | None:
        """Everything since the last delta, as one delta; None if there is nothing."""
        text = "".join(self._text) if self._shows_text else ""
        if not self._token_ids and not text:
            return None
        delta = inference_pb2.Delta(
            choice=self.index, token_ids=self._token_ids, num_tokens=len(self._token_ids)
        )
        if self._shows_text:
            delta.text = text
        for entry in self._logprobs:
            fill_logprob(delta.logprobs.add(), entry, self._tokens)
        self._text.clear()
        self._token_ids.clear()
        self._logprobs.clear()
        return delta

    def _shows_end(self, output: ChoiceOutput) -> bool:
        return (
            output.finish_reason == FinishReason.STOP_TOKEN and self._params.include_stop_in_output
        )

    def _add_token(self, token_id: int, *, hidden: bool) -> bool:
        """Add one token; returns whether a stop string ends in it."""
        self.num_tokens += 1
        self._token_ids.append(token_id)
        if not self._needs_text:
            return False
        piece = self._detokenizer.feed(token_id, shown=not hidden)
        armed = self.num_tokens >= self._params.min_tokens
        checked = self._stops.feed(piece, armed=armed)
        self._add_text(checked.text)
        if checked.matched is None:
            return False
        self.finished = inference_pb2.Finished(
            choice=self.index,
            reason=inference_pb2.FINISH_REASON_STOP_STRING,
            stop_string=checked.matched,
        )
        return True

    def _add_text(self, text: str) -> None:
        """Add to the text, except for bytes that the client already has."""
        if self._known_bytes:
            raw = text.encode()
            known = min(self._known_bytes, len(raw))
            self._known_bytes -= known
            text = raw[known:].decode(errors="ignore")
        self._text.append(text)

    def _finish(self, output: ChoiceOutput) -> None:
        # No more tokens follow, so text that was held back cannot become a stop string.
        self._add_text(self._stops.flush())
        self._add_text(self._detokenizer.flush())
        reason = f"FINISH_REASON_{output.finish_reason}"
        self.finished = inference_pb2.Finished(choice=self.index, reason=reason)
        if output.finish_reason == FinishReason.STOP_TOKEN and output.matched_token_id is not None:
            self.finished.stop_token_id = output.matched_token_id


def fill_logprob(
    target: inference_pb2.TokenLogprob, entry: TokenLogprobs, tokens: TokenBytes
) -> None:
    """Fill in one entry with its alternatives; the tokens are exact bytes, not text."""
    target.token_id = entry.token_id
    target.logprob = entry.logprob
    target.token = tokens.token_bytes(entry.token_id)
    for token_id, logprob in entry.top:
        target.top.add(token_id=token_id, logprob=logprob, token=tokens.token_bytes(token_id))
