import math

import pytest

from inferfleet_proto.internal.v1 import engine_pb2
from inferfleet_proto.v1 import inference_pb2
from services.common.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from services.engine.contract.sampling_params import Constraint, SamplingParams
from services.engine.front.request_translation import ModelFacts, translate

FACTS = ModelFacts(
    model="tiny", model_revision="r", numerics_id="n/1", vocab_size=100, max_model_len=16
)


def request(ids=(1, 2), **parts):
    return inference_pb2.GenerateRequest(
        model=parts.pop("model", "tiny"), token_ids=inference_pb2.TokenIds(ids=ids), **parts
    )


def run(generate, **parts):
    return translate(engine_pb2.EngineRequest(request=generate, **parts), FACTS)


def sampling(**parts):
    return request(sampling=inference_pb2.SamplingParams(**parts))


def stop(**parts):
    return request(stop=inference_pb2.StopParams(**parts))


def response(**parts):
    return request(response=inference_pb2.ResponseOptions(**parts))


def test_absent_fields_are_the_documented_defaults():
    accepted = run(request())
    defaults = SamplingParams()
    assert accepted.params == defaults.with_seed(accepted.params.seed)
    assert accepted.prompt_token_ids == [1, 2]
    assert len(accepted.request_id) == 32
    assert accepted.stream_interval == 1


def test_two_requests_without_a_seed_get_different_ones():
    assert run(request()).params.seed != run(request()).params.seed


def test_zero_is_not_unset():
    params = run(sampling(temperature=0, seed=0, top_k=0)).params
    assert (params.temperature, params.seed, params.top_k) == (0, 0, 0)
    with pytest.raises(InvalidArgumentError, match=r"sampling\.top_p"):
        run(sampling(top_p=0))
    with pytest.raises(InvalidArgumentError, match=r"stop\.max_tokens"):
        run(stop(max_tokens=0))
    with pytest.raises(InvalidArgumentError, match=r"sampling\.n"):
        run(sampling(n=0))
    with pytest.raises(InvalidArgumentError, match=r"stream_interval"):
        run(response(stream_interval=0))


def test_every_field_arrives():
    generate = request(
        request_id="mine",
        sampling=inference_pb2.SamplingParams(
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            min_p=0.125,
            seed=2**64 - 1,
            n=3,
            presence_penalty=-1,
            frequency_penalty=1,
            repetition_penalty=2,
            logit_bias={9: -100, 3: 50},
            allowed_token_ids=[1, 2],
            bad_token_ids=[3],
        ),
        stop=inference_pb2.StopParams(
            max_tokens=1000,
            min_tokens=4,
            stop_strings=["x"],
            stop_token_ids=[99],
            ignore_eos=True,
            include_stop_in_output=True,
        ),
        response=inference_pb2.ResponseOptions(
            no_text=True,
            logprobs=True,
            top_logprobs=20,
            prompt_logprobs=True,
            echo=True,
            stream_interval=5,
        ),
        routing=inference_pb2.RoutingHints(priority=-3),
        cache=inference_pb2.CacheOptions(bypass=True),
    )
    accepted = run(generate, tenant="t", salt=b"s", attempt=2, numerics_id="n/1")
    assert accepted.params == SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        seed=2**64 - 1,
        n=3,
        presence_penalty=-1,
        frequency_penalty=1,
        repetition_penalty=2,
        logit_bias=((3, 50.0), (9, -100.0)),
        allowed_token_ids=(1, 2),
        bad_token_ids=(3,),
        max_tokens=1000,
        min_tokens=4,
        stop_strings=("x",),
        stop_token_ids=(99,),
        ignore_eos=True,
        include_stop_in_output=True,
        logprobs=True,
        top_logprobs=20,
        prompt_logprobs=True,
        cache_bypass=True,
    )
    assert (accepted.tenant, accepted.salt, accepted.attempt) == ("t", b"s", 2)
    assert (accepted.request_id, accepted.priority, accepted.stream_interval) == ("mine", -3, 5)
    assert accepted.no_text
    assert accepted.echo


@pytest.mark.parametrize(
    ("generate", "field"),
    [
        (sampling(temperature=-1), "sampling.temperature"),
        (sampling(temperature=math.nan), "sampling.temperature"),
        (sampling(temperature=2.5), "sampling.temperature"),
        (sampling(top_p=1.5), "sampling.top_p"),
        (sampling(min_p=-0.1), "sampling.min_p"),
        (sampling(top_k=2**31), "sampling.top_k"),
        (sampling(n=17), "sampling.n"),
        (sampling(repetition_penalty=0), "sampling.repetition_penalty"),
        (sampling(presence_penalty=2.5), "sampling.presence_penalty"),
        (sampling(logit_bias={100: 1}), "sampling.logit_bias"),
        (sampling(logit_bias={5: 101}), "sampling.logit_bias[5]"),
        (sampling(logit_bias=dict.fromkeys(range(301), 0.0)), "sampling.logit_bias"),
        (sampling(allowed_token_ids=[100]), "sampling.allowed_token_ids"),
        (sampling(bad_token_ids=[100]), "sampling.bad_token_ids"),
        (stop(stop_token_ids=[100]), "stop.stop_token_ids"),
        (stop(max_tokens=2, min_tokens=3), "stop.min_tokens"),
        (stop(stop_strings=["x"] * 10_000), "stop.stop_strings"),
        (stop(stop_strings=["ok", ""]), "stop.stop_strings[1]"),
        (stop(stop_strings=["x" * 257]), "stop.stop_strings[0]"),
        (response(top_logprobs=21, logprobs=True), "response.top_logprobs"),
        (response(top_logprobs=2), "response.top_logprobs"),
        (request(ids=()), "token_ids.ids"),
        (request(ids=[5, 100]), "token_ids.ids[1]"),
        (request(request_id="x" * 129), "request_id"),
        (request(request_id="Ж"), "request_id"),
        (request(request_id="a\nb"), "request_id"),
        (inference_pb2.GenerateRequest(model="tiny"), "prompt"),
        (inference_pb2.GenerateRequest(model="tiny", text="hi"), "text"),
        (inference_pb2.GenerateRequest(), "model"),
    ],
)
def test_a_bad_field_is_named(generate, field):
    with pytest.raises(InvalidArgumentError) as caught:
        run(generate)
    assert [violation.field for violation in caught.value.violations] == [field]
    assert caught.value.message.startswith(field)


def test_the_last_id_of_the_vocabulary_is_fine():
    assert run(request(ids=[99])).prompt_token_ids == [99]


def test_a_prompt_leaves_room_for_one_token():
    assert len(run(request(ids=[1] * 15)).prompt_token_ids) == 15
    for length in (16, 17, 160):
        with pytest.raises(InvalidArgumentError) as caught:
            run(request(ids=[1] * length))
        assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"
        assert str(length) in caught.value.message
        assert "15" in caught.value.message
        assert caught.value.metadata["max_model_len"] == "16"


def test_unknown_model():
    with pytest.raises(NotFoundError) as caught:
        run(request(model="other"))
    assert caught.value.reason == "MODEL_NOT_FOUND"


def test_other_numerics():
    with pytest.raises(FailedPreconditionError) as caught:
        run(request(), numerics_id="n/2")
    assert caught.value.reason == "NUMERICS_MISMATCH"


TAG = '{"type": "structural_tag", "format": {"type": "regex", "pattern": "x"}}'


@pytest.mark.parametrize(
    ("kind", "text"),
    [("json_schema", "{}"), ("regex", "x"), ("ebnf", "x"), ("structural_tag", TAG)],
)
def test_a_constraint_is_handed_on(kind, text):
    generate = request(constraint=inference_pb2.Constraint(**{kind: text}))
    assert run(generate).params.constraint == Constraint(kind, text)


def test_a_choice_and_a_json_object():
    choice = inference_pb2.Constraint(choice=inference_pb2.Choices(texts=["a", "b"]))
    assert run(request(constraint=choice)).params.constraint == Constraint("choice", "", ("a", "b"))
    json_object = inference_pb2.Constraint(json_object=True)
    assert run(request(constraint=json_object)).params.constraint == Constraint("json_object", "")


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        (inference_pb2.Constraint(), "constraint"),
        (inference_pb2.Constraint(json_object=False), "constraint.json_object"),
        (inference_pb2.Constraint(regex="("), "constraint.regex"),
        (inference_pb2.Constraint(json_schema='{"not": {}}'), "constraint.json_schema"),
    ],
)
def test_a_constraint_that_cannot_be_enforced(constraint, field):
    with pytest.raises(InvalidArgumentError) as caught:
        run(request(constraint=constraint))
    assert caught.value.violations[0].field == field


def carried(*choices):
    wire = [engine_pb2.ContinuedChoice(index=i, token_ids=ids, finished=f) for i, ids, f in choices]
    return engine_pb2.Continuation(choices=wire)


def test_a_continuation_by_choice():
    generate = sampling(n=3)
    accepted = run(generate, continuation=carried((2, [7], True), (0, [5, 6], False)))
    assert accepted.continued == ((5, 6), (), (7,))
    assert accepted.finished_choices == (2,)


@pytest.mark.parametrize(
    ("choices", "field"),
    [
        ([(1, [5], False)], "continuation.choices[0].index"),
        ([(0, [5], False), (0, [5], False)], "continuation.choices[1].index"),
        ([(0, [5, 100], False)], "continuation.choices[0].token_ids[1]"),
        ([(0, [5], True)], "continuation.choices"),
    ],
)
def test_a_bad_continuation(choices, field):
    with pytest.raises(InvalidArgumentError) as caught:
        run(request(), continuation=carried(*choices))
    assert caught.value.violations[0].field == field


def test_a_continued_stream_must_fit_the_context_too():
    with pytest.raises(InvalidArgumentError, match="16 tokens"):
        run(request(ids=[1] * 10), continuation=carried((0, [2] * 6, False)))


def test_a_continuation_says_how_much_text_was_sent():
    continuation = carried((0, [5], False))
    continuation.choices[0].sent_text_bytes = 9
    accepted = run(response(echo=True), continuation=continuation)
    assert accepted.echo
    assert accepted.sent_text_bytes == (9,)


def test_prompt_logprobs_that_would_not_fit_one_message():
    facts = ModelFacts("tiny", "r", "n/1", vocab_size=100, max_model_len=50_000)
    generate = request(
        ids=[1] * 20_000,
        response=inference_pb2.ResponseOptions(prompt_logprobs=True, top_logprobs=20),
    )
    with pytest.raises(InvalidArgumentError, match=r"response\.prompt_logprobs"):
        translate(engine_pb2.EngineRequest(request=generate), facts)


def test_special_tokens_to_show():
    assert run(request(), shown_token_ids=[7, 7, 9]).shown_token_ids == {7, 9}
    assert run(request()).shown_token_ids == frozenset()
    shown = run(request(response={"keep_special_tokens": True})).shown_token_ids  # R2-25
    assert 0 in shown
    assert FACTS.vocab_size not in shown
