"""Faults: a dead engine, an index that restarts, clients that leave, a drain."""

import signal
import threading

import grpc
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(240)]


def long_prompt(seed: int, length: int) -> list[int]:
    return [300 + (seed * 104_729 + number * 7919) % 40_000 for number in range(length)]


def busy(fleet) -> str | None:
    """The engine that has work, once the balancer knows."""
    for engine_id, engine in fleet.engines().items():
        if engine["running"] or engine["waiting"]:
            return engine_id
    return None


def test_an_engine_killed_before_its_first_token_costs_nothing(fleet, wait_until):
    prompt = long_prompt(1, 1500)
    stream = fleet.stream(fleet.request(prompt, max_tokens=4))
    engine = wait_until(lambda: busy(fleet), "an engine to take the request")
    assert stream.deltas() == 0, "the prompt is too short for this machine"
    fleet.signal(engine, signal.SIGKILL)
    answer = stream.result()
    assert answer.summary.engine_id != engine
    assert answer.token_ids == fleet.generate(prompt, max_tokens=4).token_ids
    wait_until(fleet.is_whole, "the engine to be started again")


def test_a_client_that_leaves_frees_its_blocks(fleet, wait_until):
    before = {name: engine["held_blocks"] for name, engine in fleet.engines().items()}
    assert set(before.values()) == {0}
    request = fleet.request(long_prompt(2, 200), max_tokens=4000, ignore_eos=True)
    streams = [fleet.stream(request) for _ in range(3)]
    for stream in streams:
        wait_until(lambda stream=stream: stream.deltas() >= 3, "three deltas")
    assert sum(engine["held_blocks"] for engine in fleet.engines().values()) > 0
    for stream in streams:
        stream.call.cancel()

    def freed() -> bool:
        engines = fleet.engines().values()
        return not any(e["held_blocks"] or e["running"] or e["in_flight"] for e in engines)

    wait_until(freed, "the blocks to be free", 60)


def test_a_client_that_leaves_during_its_prefill_frees_its_blocks(fleet, wait_until):
    # Decodes for long after it, so that whoever looks late still sees an engine with work.
    request = fleet.request(long_prompt(3, 4000), max_tokens=2000, ignore_eos=True)
    stream = fleet.stream(request)
    wait_until(lambda: busy(fleet), "an engine to take the request")
    stream.call.cancel()
    wait_until(
        lambda: not any(e["held_blocks"] or e["running"] for e in fleet.engines().values()),
        "the blocks to be free",
        60,  # a round of prefill on a busy machine takes many seconds, and is not interrupted
    )


def test_sigterm_drains_an_engine_under_a_stream(fleet, golden, wait_until):
    item = golden[1]
    stream = fleet.stream(fleet.request(item["prompt_ids"], max_tokens=64))
    wait_until(lambda: stream.deltas() >= 2, "the stream to run")
    engine = stream.events[0].started.engine_id
    fleet.signal(engine, signal.SIGTERM)
    assert stream.result().token_ids == item["output_ids"]
    ended = f"{engine} ended with status 0"
    wait_until(lambda: fleet.has_logged(ended), "its end")
    wait_until(fleet.is_whole, "the engine to be started again")


def test_requests_keep_succeeding_while_the_index_restarts(fleet, golden, wait_until):
    item = golden[0]
    failures: list[Exception] = []
    over = threading.Event()

    def keep_asking() -> None:
        while not over.is_set():
            try:
                assert fleet.generate(item["prompt_ids"]).token_ids == item["output_ids"]
            except Exception as error:
                failures.append(error)
                return

    asker = threading.Thread(target=keep_asking)
    asker.start()
    try:
        fleet.signal("kvcache", signal.SIGKILL)
        wait_until(lambda: fleet.has_logged("kvcache is back"), "the index")
    finally:
        over.set()
        asker.join()
    assert failures == []


def test_a_deadline_that_passes_is_an_error_and_frees_its_blocks(fleet, wait_until):
    request = fleet.request(long_prompt(4, 3000), max_tokens=10)
    with pytest.raises(grpc.RpcError) as caught:
        list(fleet.stub.Generate(request, timeout=0.5))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(
        lambda: not any(e["held_blocks"] or e["running"] for e in fleet.engines().values()),
        "the blocks to be free",
        60,  # a round of prefill on a busy machine takes many seconds, and is not interrupted
    )
