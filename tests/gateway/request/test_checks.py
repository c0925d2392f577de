"""The gateway and the engine check the same bounds: they refuse the same requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import InvalidArgumentError
from services.engine.contract.sampling_params import SamplingParams
from services.engine.grammar import constraint_check
from services.engine.grammar.constraint_check import MAX_CHOICES
from services.gateway.request.checks import MAX_CONSTRAINT_CHARS, check_request, request_id_problem

VOCAB = 300
numbers = st.one_of(
    st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 2.0, 10.0, float("nan"), float("inf")]),
    st.floats(width=32),
)
counts = st.integers(0, 2**32 - 1) | st.integers(0, 20)
FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def field_at_fault(call) -> str:
    try:
        call()
    except InvalidArgumentError as error:
        return error.violations[0].field
    return ""


@given(st.sampled_from(FLOATS), numbers)
def test_numbers(name, value):
    request = inference_pb2.GenerateRequest(text="x", sampling={name: value})
    ours = field_at_fault(lambda: check_request(request, VOCAB))
    given_value = getattr(request.sampling, name)
    theirs = field_at_fault(lambda: SamplingParams(**{name: given_value}).validated(VOCAB))
    assert ours == theirs


@given(st.sampled_from(("top_k", "n")), counts)
def test_counts(name, value):
    request = inference_pb2.GenerateRequest(text="x", sampling={name: value})
    ours = field_at_fault(lambda: check_request(request, VOCAB))
    theirs = field_at_fault(lambda: SamplingParams(**{name: value}).validated(VOCAB))
    assert ours == theirs


@given(counts, counts, st.lists(st.text(max_size=300), max_size=20))
def test_stops(most, least, texts):
    stop = inference_pb2.StopParams(max_tokens=most, min_tokens=least, stop_strings=texts)
    request = inference_pb2.GenerateRequest(text="x", stop=stop)
    params = SamplingParams(max_tokens=most, min_tokens=least, stop_strings=tuple(texts))
    ours = field_at_fault(lambda: check_request(request, VOCAB))
    assert ours == field_at_fault(lambda: params.validated(VOCAB))


@given(st.dictionaries(st.integers(0, 310), st.floats(-101, 101, width=32), max_size=5))
def test_biases(bias):
    request = inference_pb2.GenerateRequest(text="x", sampling={"logit_bias": bias})
    params = SamplingParams(logit_bias=tuple(sorted(bias.items())))
    ours = field_at_fault(lambda: check_request(request, VOCAB))
    assert bool(ours) is bool(field_at_fault(lambda: params.validated(VOCAB)))


@pytest.mark.parametrize("good", ["a", "req-1", "A" * 128, "!~"])
def test_request_ids(good):
    assert request_id_problem(good) is None


@pytest.mark.parametrize("bad", ["", "a b", "A" * 129, "é", "a\n", "\x00", "a\r\nb"])
def test_bad_request_ids(bad):
    assert request_id_problem(bad)


def message(**fields) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        check_request(inference_pb2.GenerateRequest(text="x", **fields), VOCAB)
    return caught.value.message


def test_numbers_are_shown_as_a_person_writes_them():
    for say in (
        lambda: message(sampling={"top_k": 2**32 - 1}),
        lambda: str(refused_by_the_engine(top_k=2**32 - 1)),
    ):
        assert say().endswith("must be in [0, 2147483647], got 4294967295")
    assert message(sampling={"temperature": 2.5}).endswith("must be in [0, 2], got 2.5")
    assert message(sampling={"top_p": float("nan")}).endswith("must be in (0, 1], got nan")


def refused_by_the_engine(**fields) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as caught:
        SamplingParams(**fields).validated(VOCAB)
    return caught.value


def test_as_many_choices_as_the_engine_takes():
    most = [str(number) for number in range(MAX_CHOICES)]
    request = inference_pb2.GenerateRequest(text="x", constraint={"choice": {"texts": most}})
    check_request(request, VOCAB)
    assert "1 to 1000 texts" in message(constraint={"choice": {"texts": [*most, "more"]}})


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"sampling": {"allowed_token_ids": [1] * (VOCAB + 1)}}, "sampling.allowed_token_ids"),
        ({"sampling": {"bad_token_ids": [1] * (VOCAB + 1)}}, "sampling.bad_token_ids"),
        ({"stop": {"stop_token_ids": [1] * (VOCAB + 1)}}, "stop.stop_token_ids"),
        ({"constraint": {"json_schema": " " * 65_537}}, "constraint.json_schema"),
        ({"constraint": {"regex": "a" * 65_537}}, "constraint.regex"),
        ({"constraint": {"choice": {"texts": ["a" * 700] * 100}}}, "constraint.choice"),
        ({"chat": {"messages": [{"role": "user"}] * 4097}}, "chat.messages"),
        ({"chat": {"tools": [{"name": "f"}] * 129}}, "chat.tools"),
    ],
)
def test_sizes_that_are_refused_before_any_work(fields, field):
    prompt = {} if "chat" in fields else {"text": "x"}
    request = inference_pb2.GenerateRequest(**prompt, **fields)
    assert field_at_fault(lambda: check_request(request, VOCAB)) == field


def test_as_much_as_is_allowed():
    request = inference_pb2.GenerateRequest(
        sampling={"allowed_token_ids": [1] * VOCAB},
        constraint={"regex": "a" * MAX_CONSTRAINT_CHARS},
        chat={"messages": [{"role": "user"}] * 4096},
    )
    check_request(request, VOCAB)


def test_the_engine_allows_as_long_a_constraint():
    assert constraint_check.MAX_CONSTRAINT_CHARS == MAX_CONSTRAINT_CHARS
