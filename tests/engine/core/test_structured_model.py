"""A real model under constraints: its output parses and validates for any seed."""

import json
import re

import jsonschema
import pytest

from services.common.errors import InvalidArgumentError
from services.engine.contract.sampling_params import Constraint, SamplingParams
from services.engine.offline.llm import LLM

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "né"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SHAPE = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, size: {"type": "number", "minimum": 0}},
            "required": ["kind", size],
        }
        for kind, size in (("circle", "radius"), ("square", "side"))
    ]
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "boolean"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
        }
    },
}
CODES = {
    "type": "array",
    "items": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "minItems": 2,
    "maxItems": 3,
}
PROMPT = "Here is an example in JSON: "


@pytest.fixture(scope="module")
def llm():
    with LLM("smollm2-135m-instruct", num_blocks=300, max_num_batched_tokens=48, threads=1) as llm:
        yield llm


def params(constraint: Constraint, seed: int = 1, **fields) -> SamplingParams:
    fields = {"temperature": 1.0, "max_tokens": 120, **fields}
    return SamplingParams(seed=seed, constraint=constraint, **fields)


def of(schema) -> Constraint:
    return Constraint("json_schema", json.dumps(schema))


def test_answers_validate_at_temperature_one(llm):
    requests = [(PERSON, 1), (PERSON, 2), (SHAPE, 1), (TREE, 1), (CODES, 1), (CODES, 2)]
    outputs = llm.generate([PROMPT] * len(requests), [params(of(s), seed) for s, seed in requests])
    complete = 0
    for (schema, _), output in zip(requests, outputs, strict=True):
        choice = output.choices[0]
        if choice.finish_reason == "MAX_TOKENS":
            continue  # cut at max_tokens
        assert choice.finish_reason in ("GRAMMAR_COMPLETE", "EOS")
        jsonschema.validate(json.loads(choice.text), schema)
        complete += 1
    assert complete >= 4


def test_a_regex_a_choice_and_a_grammar_match(llm):
    phone = r"\d{3}-\d{4}( ext\. [0-9]{1,3})?"
    number = 'root ::= "<" [0-9]{1,4} ">"'
    phones, choice, ebnf, tag = llm.generate(
        ["Call "] * 4,
        [
            params(Constraint("regex", phone), n=3),
            params(Constraint("choice", "", ("yes", "nö", "perhaps"))),
            params(Constraint("ebnf", number), temperature=0.0),
            params(
                Constraint(
                    "structural_tag",
                    '{"type":"structural_tag","format":{"type":"const_string","value":"fixed"}}',
                )
            ),
        ],
    )
    texts = [one.text for one in phones.choices]
    assert all(re.fullmatch(phone, one) for one in texts)
    assert len(set(texts)) > 1
    assert choice.choices[0].text in ("yes", "nö", "perhaps")
    assert re.fullmatch("<[0-9]{1,4}>", ebnf.choices[0].text)
    assert tag.choices[0].text == "fixed"


def test_end_and_stop_tokens_cannot_cut_an_object(llm):
    eos = llm.engine.info.eos_token_ids
    stop = llm.tokenizer.encode("a")[0]
    pushed = tuple(sorted((token, 100.0) for token in {*eos, stop}))
    small = of({**PERSON, "properties": {**PERSON["properties"], "name": {"enum": ["banana"]}}})
    given = params(small, logit_bias=pushed, stop_token_ids=(stop,))
    (output,) = llm.generate(PROMPT, given)
    jsonschema.validate(json.loads(output.choices[0].text), PERSON)
    assert output.choices[0].finish_reason == "GRAMMAR_COMPLETE"
    assert stop not in output.choices[0].token_ids


def test_what_cannot_be_enforced_is_refused_before_any_work(llm):
    with pytest.raises(InvalidArgumentError, match="/uniqueItems"):
        llm.generate(PROMPT, params(of({"type": "array", "uniqueItems": True})))
    assert not llm.engine.has_unfinished_requests()
