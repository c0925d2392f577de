"""What one chat needs beyond its prompt: the constraint, the marks to show, how to read answers."""

from collections.abc import Callable
from dataclasses import dataclass, field

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import InvalidArgumentError
from services.common.text.deepseek_recipe import recipe
from services.gateway.answers.constraint import Owners, constrain, in_callers_words
from services.gateway.answers.deepseek import DeepseekParser
from services.gateway.answers.dsml import DsmlParser
from services.gateway.answers.events import Parser
from services.gateway.answers.hermes import HermesParser
from services.gateway.answers.llama3 import Llama3Parser
from services.gateway.answers.mistral import MistralParser
from services.gateway.answers.profile import ChatProfile
from services.gateway.answers.reasoning import Marks
from services.gateway.answers.stream import Reading
from services.gateway.answers.tools import ToolUse


@dataclass(frozen=True)
class AnswerPlan:
    """Made once per request, before it is tokenised."""

    constraint: inference_pb2.Constraint | None = None
    """Instead of the caller's."""
    shown_ids: tuple[int, ...] = ()
    reading: Reading | None = None
    """None: messages pass as they are."""
    owners: Owners = field(default_factory=dict)

    def in_callers_words(self, error: InvalidArgumentError) -> InvalidArgumentError:
        """A refusal by the engine, of fields that the caller wrote."""
        return in_callers_words(error, self.owners)


def plan_answer(
    request: inference_pb2.GenerateRequest,
    use: ToolUse,
    profile: ChatProfile,
    rendered: str,
    token_bytes: Callable[[int], bytes],
) -> AnswerPlan:
    """Plan the answer to a chat.

    Args:
        rendered: the prompt's text: its end tells whether the model reasons.

    Raises:
        InvalidArgumentError: what was asked for cannot be had together, or not of this model.
        UnimplementedError: the parser's library is not installed.
    """
    if use.parsed:
        _check_parsable(request, profile)
    own = request.constraint if request.constraint.WhichOneof("kind") else None
    marks = profile.marks
    if request.response.echo or request.response.no_text:
        marks = None  # the prompt's text would be read as the answer's, or there is none
    thinking = _thinking(rendered, profile.marks)
    wanted = constrain(profile, use, own, thinking)
    reads = use.parsed or (marks is not None and thinking != "closed")
    if not reads:
        return AnswerPlan(constraint=wanted.constraint, owners=wanted.owners)
    reading = Reading(
        marks=marks,
        thinking=thinking,
        calls=_maker(profile, use) if use.parsed else None,
        most_calls=1 if use.named or not use.parallel else None,
        token_bytes=token_bytes,
        short_ids=profile.tools == "mistral",
    )
    return AnswerPlan(wanted.constraint, profile.shown_ids(), reading, wanted.owners)


def _check_parsable(request: inference_pb2.GenerateRequest, profile: ChatProfile) -> None:
    if profile.tools == "none":
        raise InvalidArgumentError.for_field(
            "chat.tools",
            "how this model writes calls is not known here; only tool_choice MODE_NONE is served",
            reason="TOOLS_NOT_SERVED",
        )
    if profile.tools == "deepseek_v4":
        recipe()  # now, and not after the first token
    for name in ("echo", "no_text"):
        if getattr(request.response, name):
            raise InvalidArgumentError.for_field(
                f"response.{name}", "cannot be had together with chat.tools"
            )


def _thinking(rendered: str, marks: Marks | None) -> str:
    """Whether the prompt has begun or closed the model's reasoning."""
    if marks is None:
        return "closed"
    tail = rendered[-256:].rstrip()
    if tail.endswith(marks.begin):
        return "open"
    return "closed" if tail.endswith(marks.end) else "free"


def _maker(profile: ChatProfile, use: ToolUse) -> Callable[[], Parser]:
    names = use.names
    if profile.tools == "llama3":
        return lambda: Llama3Parser(names)
    others: dict[str, Callable[[], Parser]] = {
        "mistral": MistralParser,
        "deepseek_v4": DsmlParser,
        "deepseek_v3": DeepseekParser,
    }
    return others.get(profile.tools, HermesParser)
