"""Through the whole fleet: the tokens of the reference, a prefix found again, one trace."""

import json

import pytest

from inferfleet_cli.errors import CliError
from inferfleet_proto.v1 import inference_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(240)]


@pytest.mark.parametrize("number", range(3))
def test_greedy_tokens_are_those_of_the_reference(fleet, golden, number):
    item = golden[number]
    answer = fleet.generate(item["prompt_ids"], max_tokens=64)
    assert answer.token_ids == item["output_ids"]
    usage = answer.summary.usage
    assert usage.prompt_tokens == len(item["prompt_ids"])
    assert usage.completion_tokens == len(item["output_ids"])
    assert answer.started.engine_id == answer.summary.engine_id


def test_a_chat_is_rendered_tokenised_and_answered_as_the_reference(fleet, golden):
    item = golden[0]
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="What is the capital of France?")])
    request = pb.GenerateRequest(model="smollm2-135m-instruct", chat=chat)
    request.sampling.temperature = 0
    reply = fleet.stub.Complete(request, timeout=60)
    (choice,) = reply.choices
    assert list(choice.token_ids) == item["output_ids"]
    assert choice.text == "The capital of France is Paris."
    assert choice.finished.reason == pb.FinishReason.FINISH_REASON_EOS


def test_many_at_once_get_the_tokens_of_one_alone(fleet, golden):
    streams = [
        fleet.stream(fleet.request(golden[number % 3]["prompt_ids"], max_tokens=32))
        for number in range(9)
    ]
    for number, stream in enumerate(streams):
        assert stream.result().token_ids == golden[number % 3]["output_ids"][:32]
    assert {s.result().started.engine_id for s in streams} == {"engine-1", "engine-2"}


def test_a_second_request_goes_to_the_engine_that_holds_its_prefix(fleet, wait_until):
    prefix = [300 + (number * 7919) % 40_000 for number in range(512)]
    known = fleet.index_entries()
    first = fleet.generate([*prefix, 1, 2], max_tokens=2)
    assert first.summary.usage.cached_tokens == 0
    # Events travel beside the stream, so the index may learn a moment after the answer.
    wait_until(lambda: fleet.index_entries() >= known + 16, "the index to know 16 blocks")
    for tail in range(3):
        second = fleet.generate([*prefix, 9, 10 + tail], max_tokens=2)
        assert second.summary.engine_id == first.summary.engine_id
        assert second.summary.usage.cached_tokens == 512
        assert second.started.cached_tokens == 512
        trace = fleet.whole_trace(second.started.request_id)
        computed = sum(
            event["attributes"].get("inferfleet.tokens", event["attributes"].get("tokens", 0))
            for span in trace["spans"]
            if span["name"] == "submit"
            for event in span["events"]
            if event["name"] == "chunk"
        )
        assert computed == 2


def test_one_trace_joins_all_services_with_the_right_parents(fleet, golden):
    request = fleet.request([*golden[0]["prompt_ids"], *range(300, 364)], max_tokens=4)
    answer = fleet.stream(request).result()
    trace = fleet.whole_trace(answer.started.request_id)
    by_id = {span["span_id"]: span for span in trace["spans"]}

    def parent(name: str, service: str) -> tuple[str, str]:
        (span,) = (s for s in trace["spans"] if (s["name"], s["service"]) == (name, service))
        above = by_id[span["parent_span_id"]]
        return above["name"], above["service"]

    root = f"text_completion {answer.started.model}"
    assert parent("route", "balancer") == (root, "gateway")
    assert parent("match", "balancer") == ("route", "balancer")
    assert parent("match", "kvcache") == ("match", "balancer")
    assert parent("run", "engine") == ("route", "balancer")
    for verb in ("enqueue", "admit", "submit", "collect", "release"):
        assert parent(verb, "engine") == ("run", "engine")
    pids = {fleet.pid(name) for name in ("gateway", "balancer", "kvcache", "engine-1")}
    assert len(pids) == 4
    (gateway,) = (span for span in trace["spans"] if span["name"] == root)
    assert gateway["attributes"]["inferfleet.request_id"] == answer.started.request_id
    assert gateway["attributes"]["gen_ai.usage.output_tokens"] == 4
    assert json.dumps(trace)  # what --json prints


def test_a_callers_trace_goes_on_and_an_unsampled_one_is_not_recorded(fleet, golden, wait_until):
    request = fleet.request(golden[0]["prompt_ids"], max_tokens=1)
    ids = {flag: f"{'ab' * 15}{flag}" for flag in ("01", "00")}
    for flag, trace_id in ids.items():
        metadata = (("traceparent", f"00-{trace_id}-00f067aa0ba902b7-{flag}"),)
        assert list(fleet.stub.Generate(request, metadata=metadata, timeout=60))
    trace = fleet.whole_trace(ids["01"])
    assert trace["spans"][0]["parent_span_id"] == "00f067aa0ba902b7"
    with pytest.raises(CliError, match="no trace of"):
        fleet.trace(ids["00"])
