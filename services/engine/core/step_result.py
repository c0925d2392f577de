"""`StepResult`: tokens, ends, failures and marks, gathered until `LLMEngine.step` returns them."""

from dataclasses import dataclass, field

from services.common.errors import FleetError
from services.engine.contract.messages import ChoiceOutput, Mark, RequestFailure, TokenLogprobs
from services.engine.contract.runner import SampledToken, SamplerOutput
from services.engine.core.endings import Ending
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

    def add_output(self, seq: Sequence, token: SampledToken | None, ending: Ending | None) -> bool:
        """Add a choice's token, its end or both; returns whether the token is its first."""
        request = seq.request
        first = token is not None and len(seq.tokens) == seq.num_initial + 1
        logprobs = [_logprobs(token)] if request.params.logprobs and token is not None else []
        self.outputs.append(
            ChoiceOutput(
                request.key,
                seq.choice,
                [] if token is None else [token.token_id],
                None if ending is None else ending.reason,
                None if ending is None else ending.matched_token_id,
                logprobs,
                request.num_cached_tokens if first else 0,
                seq.prompt_logprobs if first else [],
            )
        )
        return first

    def drop_outputs(self, request_key: str, choice: int | None) -> None:
        """Drop the outputs of an aborted request, or of one of its choices."""
        self.outputs = [
            output
            for output in self.outputs
            if output.request_key != request_key or choice not in (None, output.choice)
        ]


def refusal_failure(request_key: str, error: FleetError) -> RequestFailure:
    """The failure of a request that `LLMEngine.add_request` refused."""
    return RequestFailure(
        request_key=request_key,
        code=error.code.name,
        reason=error.reason,
        message=error.message,
        field=error.violations[0].field if error.violations else None,
        retry_after_s=error.retry_after_s,
    )


def keep_prompt_logprobs(plan: SchedulerOutputs, output: SamplerOutput) -> None:
    """Add a round's prompt log probabilities to their sequences, until the first token is sent."""
    by_id = {seq.seq_id: seq for seq in plan.seqs}
    for seq_id, entries in output.prompt_logprobs:
        by_id[seq_id].add_prompt_logprobs(_logprobs(entry) for entry in entries)


def _logprobs(token: SampledToken) -> TokenLogprobs:
    logprob = 0.0 if token.logprob is None else token.logprob
    return TokenLogprobs(token.token_id, logprob, list(token.top))
