"""What callers hand over: one form of it, or a refusal that names the field."""

from array import array

import msgspec
import numpy as np
import pytest

from services.common.errors import InvalidArgumentError
from services.engine.contract.sampling_params import SamplingParams
from services.engine.offline.llm_inputs import params_list, prompt_list


@pytest.mark.parametrize(
    ("given", "listed"),
    [
        ("abc", ["abc"]),
        ([1, 2], [[1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        ([np.int64(1), np.int32(2)], [[1, 2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (["a", (1, 2), np.array([3]), array("I", [4]), range(2)], ["a", [1, 2], [3], [4], [0, 1]]),
        ((), []),
    ],
    ids=str,
)
def test_prompts_are_texts_or_lists_of_plain_integers(given, listed):
    got = prompt_list(given)
    assert got == listed
    assert all(type(i) is int for ids in got if isinstance(ids, list) for i in ids)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"abc", "prompts must be .* got bytes"),
        ({"prompt": "a"}, "prompts must be .* got dict"),
        (5, "prompts must be .* got int"),
        (None, "prompts must be .* got NoneType"),
        (["a", b"b"], r"prompts\[1\] must be .* got bytes"),
        (["a", None], r"prompts\[1\] must be .* got NoneType"),
        ([[1, 2.0]], r"prompts\[0\]\[1\] must be a token id, got float"),
        ([[1, True]], r"prompts\[0\]\[1\] must be a token id, got bool"),
        (np.array([1.5, 2]), r"prompts\[0\] must be .* got float"),
    ],
    ids=str,
)
def test_other_prompts_are_refused_by_their_place(given, message):
    with pytest.raises(TypeError, match=message):
        prompt_list(given)


def test_parameters_are_one_for_all_or_one_each():
    own = SamplingParams(n=2)
    assert params_list(own, 2) == [own, own]
    with pytest.raises(ValueError, match="1 sampling_params for 2 prompts"):
        params_list([own], 2)
    with pytest.raises(TypeError, match=r"sampling_params\[1\] must be .* got dict"):
        params_list([own, {"n": 1}], 2)
    with pytest.raises(TypeError, match=r"sampling_params must be .* got dict"):
        params_list({"n": 1}, 2)


def test_one_stop_string_is_not_a_list_of_letters():
    assert SamplingParams(stop_strings="Paris").stop_strings == ("Paris",)
    assert SamplingParams(stop_strings=["a", "b"]).stop_strings == ("a", "b")


def test_numbers_and_lists_are_kept_in_one_form():
    given = SamplingParams(
        temperature=np.float32(0.5),
        n=np.int64(2),
        logit_bias={9: 1, 5: np.float64(2.0)},
        bad_token_ids=np.array([1, 2]),
        stop_token_ids=[3],
    )
    plain = SamplingParams(
        temperature=0.5,
        n=2,
        logit_bias=((5, 2.0), (9, 1)),
        bad_token_ids=(1, 2),
        stop_token_ids=(3,),
    )
    assert given == plain
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=SamplingParams) == plain


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 1.5}, "stop.max_tokens: must be an integer, got float"),
        ({"n": True}, "sampling.n: must be an integer, got bool"),
        ({"seed": 1.0}, "sampling.seed: must be an integer, got float"),
        ({"temperature": "0"}, "sampling.temperature: must be a number, got str"),
        ({"top_p": None}, "sampling.top_p: must be a number, got NoneType"),
        ({"logprobs": 5}, "response.logprobs: must be True or False, got int"),
        ({"stop_strings": ["a", 5]}, r"stop.stop_strings\[1\]: must be a string, got int"),
        ({"stop_strings": None}, "stop.stop_strings: must be a list of strings, got NoneType"),
        ({"bad_token_ids": "12"}, "sampling.bad_token_ids: must be a list of token ids, got str"),
        ({"stop_token_ids": 5}, "stop.stop_token_ids: must be a list of token ids, got int"),
        ({"allowed_token_ids": [1, "2"]}, r"sampling.allowed_token_ids\[1\]: must be an integer"),
        ({"logit_bias": [5]}, r"sampling.logit_bias\[0\]: must be a pair"),
        ({"logit_bias": {5: "1"}}, r"sampling.logit_bias\[5\]: must be a number, got str"),
        ({"constraint": {"regex": "a"}}, "constraint: must be a Constraint or None, got dict"),
    ],
    ids=str,
)
def test_values_of_a_wrong_type_are_refused_by_their_field(fields, message):
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        SamplingParams(**fields)
    assert caught.value.violations
