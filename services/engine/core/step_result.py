"""What a round has to tell: tokens, ends, failures and marks, gathered until `step` returns."""

from dataclasses import dataclass, field

from services.engine.contract.messages import ChoiceOutput, Mark, RequestFailure, TokenLogprobs
from services.engine.contract.runner import SampledToken, SamplerOutput
from services.engine.scheduling.scheduler_outputs import SchedulerOutputs
from services.engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class StepResult:
    """What happened since the last step returned."""

    step: int = 0
    """The round whose tokens these are; 0 for none."""
    outputs: list[ChoiceOutput] = field(default_factory=list)
    failures: list[RequestFailure] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def tell(
        self, seq: Sequence, token: SampledToken | None, reason: str | None, matched: int | None
    ) -> bool:
        """One more token of a choice, its end, or both; whether it is the first token."""
        request = seq.request
        first = token is not None and len(seq.tokens) == seq.num_initial + 1
        logprobs = [_logprobs(token)] if request.params.logprobs and token is not None else []
        self.outputs.append(
            ChoiceOutput(
                request.key,
                seq.choice,
                [] if token is None else [token.token_id],
                reason,
                matched,
                logprobs,
                request.num_cached_tokens if first else 0,
                seq.prompt_logprobs if first else [],
            )
        )
        return first

    def forget(self, request_key: str, choice: int | None) -> None:
        """Drop what was to be told of a request, or of one of its choices: nobody wants it."""
        self.outputs = [
            output
            for output in self.outputs
            if output.request_key != request_key or choice not in (None, output.choice)
        ]


def keep_prompt_logprobs(plan: SchedulerOutputs, output: SamplerOutput) -> None:
    """Add a round's prompt entries to their sequences, which tell them with the first token."""
    by_id = {seq.seq_id: seq for seq in plan.seqs}
    for seq_id, entries in output.prompt_logprobs:
        by_id[seq_id].prompt_logprobs += [_logprobs(entry) for entry in entries]


def _logprobs(token: SampledToken) -> TokenLogprobs:
    logprob = 0.0 if token.logprob is None else token.logprob
    return TokenLogprobs(token.token_id, logprob, list(token.top))
