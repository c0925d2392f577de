"""Plans one chat's answer: the constraint, the special tokens to decode, and the parsers."""

from collections.abc import Callable
from dataclasses import dataclass, field

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import InvalidArgumentError
from services.common.text.deepseek_recipe import recipe
from services.gateway.answers.constraint import Owners, constrain, name_callers_field
from services.gateway.answers.deepseek import DeepseekParser
from services.gateway.answers.dsml import DsmlParser
from services.gateway.answers.events import Parser
from services.gateway.answers.hermes import HermesParser
from services.gateway.answers.llama3 import Llama3Parser
from services.gateway.answers.mistral import MistralParser
from services.gateway.answers.profile import ChatProfile
from services.gateway.answers.reasoning import Marks, ReasoningStart
from services.gateway.answers.stream import AnswerParsing
from services.gateway.answers.tools import ToolUse


@dataclass(frozen=True)
class AnswerPlan:
    """Everything that an answer needs; made once per request, before tokenization."""

    constraint: inference_pb2.Constraint | None = None
    """Replaces the caller's constraint."""
    visible_ids: tuple[int, ...] = ()
    """Special tokens that the engine must decode."""
    parsing: AnswerParsing | None = None
    """None: messages are forwarded unchanged."""
    owners: Owners = field(default_factory=dict)
    """The caller's fields behind the parts of the constraint."""

    def name_callers_field(self, error: InvalidArgumentError) -> InvalidArgumentError:
        """The engine's error, about the field that the caller wrote."""
        return name_callers_field(error, self.owners)


def plan_answer(
    request: inference_pb2.GenerateRequest,
    use: ToolUse,
    profile: ChatProfile,
    rendered: str,
    token_bytes: Callable[[int], bytes],
) -> AnswerPlan:
    """Plan the answer to a chat.

    Args:
        use: the tools of the chat.
        rendered: the prompt's text; its end decides how reasoning starts.
        token_bytes: the bytes of a token.

    Raises:
        InvalidArgumentError: options exclude each other, or the model does not support them.
        UnimplementedError: the library of the model's parser is not installed.
    """
    if use.parsed:
        _check_parsable(request, profile)
    own = request.constraint if request.constraint.WhichOneof("kind") else None
    marks = profile.marks
    if request.response.echo or request.response.no_text:
        marks = None  # the output includes the prompt, or has no text
    start = _reasoning_start(rendered, profile.marks)
    output = constrain(profile, use, own, start)
    if not use.parsed and (marks is None or start == ReasoningStart.CLOSED):
        return AnswerPlan(constraint=output.constraint, owners=output.owners)
    parsing = AnswerParsing(
        marks=marks,
        start=start,
        make_call_parser=_call_parser_factory(profile, use) if use.parsed else None,
        max_calls=1 if use.named is not None or not use.parallel else None,
        token_bytes=token_bytes,
        calls_only=use.required,
        short_ids=profile.tools == "mistral",
    )
    return AnswerPlan(output.constraint, profile.visible_ids(), parsing, output.owners)


def _check_parsable(request: inference_pb2.GenerateRequest, profile: ChatProfile) -> None:
    if profile.tools == "none":
        raise InvalidArgumentError.for_field(
            "chat.tools",
            "this model's tool call syntax is not known; only tool_choice MODE_NONE is served",
            reason="TOOLS_NOT_SERVED",
        )
    if profile.tools == "deepseek_v4":
        recipe()  # fail now, not after the first token
    for name in ("echo", "no_text"):
        if getattr(request.response, name):
            raise InvalidArgumentError.for_field(
                f"response.{name}", "cannot be combined with chat.tools"
            )


def _reasoning_start(rendered: str, marks: Marks | None) -> ReasoningStart:
    if marks is None:
        return ReasoningStart.CLOSED
    tail = rendered[-256:].rstrip()
    if tail.endswith(marks.begin):
        return ReasoningStart.OPEN
    return ReasoningStart.CLOSED if tail.endswith(marks.end) else ReasoningStart.FREE


def _call_parser_factory(profile: ChatProfile, use: ToolUse) -> Callable[[], Parser]:
    names = use.names
    if profile.tools == "llama3":
        return lambda: Llama3Parser(names)
    others: dict[str, Callable[[], Parser]] = {
        "mistral": MistralParser,
        "deepseek_v4": DsmlParser,
        "deepseek_v3": DeepseekParser,
    }
    return others.get(profile.tools, HermesParser)
