"""One choice of one request on its way from token ids to deltas: text, stops, and what waits.

Everything it gives out is a pure function of the tokens so far; how they are grouped into deltas
depends on the reader alone.
"""

from collections.abc import Sequence

from inferfleet_proto.v1 import inference_pb2
from services.engine.contract.messages import ChoiceOutput, TokenLogprobs
from services.engine.contract.sampling_params import SamplingParams
from services.engine.text.detokenizer import Detokenizer, TokenBytes
from services.engine.text.stop_strings import StopChecker

# End tokens are in the ids and not in the text.
_HIDDEN_ENDS = frozenset({"EOS", "STOP_TOKEN"})


class ChoiceStream:
    """Takes the core's outputs of one choice, holds what the reader has not taken."""

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        tokens: TokenBytes,
        prompt_token_ids: Sequence[int],
        *,
        no_text: bool = False,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.finished: inference_pb2.Finished | None = None
        self._params = params
        self._tokens = tokens
        self._detokenizer = Detokenizer(tokens, prompt_token_ids, shown_ids)
        self._stops = StopChecker(params.stop_strings, include=params.include_stop_in_output)
        # Text is made even for a reader that wants none if a stop string may end it.
        self._needs_text = not no_text or bool(params.stop_strings)
        self._shows_text = not no_text
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._known_bytes = 0

    @property
    def num_pending(self) -> int:
        """Tokens that the reader has not taken."""
        return len(self._token_ids)

    def begin_with(self, text: str) -> None:
        """Text before the first token (the prompt, for echo)."""
        self._text.append(text)

    def replay(self, token_ids: Sequence[int], sent_text_bytes: int = 0) -> None:
        """Take tokens that were already sent by another engine: they count and are not repeated.

        Args:
            sent_text_bytes: what the client has of this choice's text, in UTF-8, echo included. It
                is more than these tokens give by themselves if the end of the text was sent too.
        """
        for token_id in token_ids:
            self._take(token_id, hidden=False)
        if not token_ids and not sent_text_bytes:
            return
        given = sum(len(piece.encode()) for piece in self._text)
        self._known_bytes = max(0, sent_text_bytes - given)
        self._text.clear()
        self._token_ids.clear()

    def add(self, output: ChoiceOutput) -> None:
        """Take one round's tokens; those after a stop string are dropped."""
        if self.finished is not None:
            return
        last = len(output.token_ids) - 1
        for place, token_id in enumerate(output.token_ids):
            if place < len(output.logprobs):
                self._logprobs.append(output.logprobs[place])
            ends = place == last and output.finish_reason in _HIDDEN_ENDS
            if self._take(token_id, hidden=ends and not self._shows_end(output)):
                return
        if output.finish_reason is not None:
            self._finish(output)

    def take_delta(self) -> inference_pb2.Delta | None:
        """All that waits, as one delta; None if nothing does."""
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
        return output.finish_reason == "STOP_TOKEN" and self._params.include_stop_in_output

    def _take(self, token_id: int, *, hidden: bool) -> bool:
        """Whether a stop string ends in this token."""
        self.num_tokens += 1
        self._token_ids.append(token_id)
        if not self._needs_text:
            return False
        piece = self._detokenizer.feed(token_id, shown=not hidden)
        armed = self.num_tokens >= self._params.min_tokens
        checked = self._stops.feed(piece, armed=armed)
        self._say(checked.text)
        if checked.matched is None:
            return False
        self.finished = inference_pb2.Finished(
            choice=self.index,
            reason=inference_pb2.FINISH_REASON_STOP_STRING,
            stop_string=checked.matched,
        )
        return True

    def _say(self, text: str) -> None:
        """Add to the text, without what the client already has."""
        if self._known_bytes:
            raw = text.encode()
            known = min(self._known_bytes, len(raw))
            self._known_bytes -= known
            text = raw[known:].decode(errors="ignore")
        self._text.append(text)

    def _finish(self, output: ChoiceOutput) -> None:
        # No more tokens will come: what was held back is text after all.
        self._say(self._stops.flush())
        self._say(self._detokenizer.flush())
        reason = f"FINISH_REASON_{output.finish_reason}"
        self.finished = inference_pb2.Finished(choice=self.index, reason=reason)
        if output.finish_reason == "STOP_TOKEN" and output.matched_token_id is not None:
            self.finished.stop_token_id = output.matched_token_id


def fill_logprob(
    target: inference_pb2.TokenLogprob, entry: TokenLogprobs, tokens: TokenBytes
) -> None:
    """Write one entry with its alternatives; each token's bytes are exact."""
    target.token_id = entry.token_id
    target.logprob = entry.logprob
    target.token = tokens.token_bytes(entry.token_id)
    for token_id, logprob in entry.top:
        target.top.add(token_id=token_id, logprob=logprob, token=tokens.token_bytes(token_id))
