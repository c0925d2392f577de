"""Policies in an engine: the order of admission, and that no request starves."""

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from services.engine.compute.simulated_runner import SimulatedModel
from services.engine.contract.config import POLICIES
from services.engine.contract.messages import AddRequest, CoreRequest
from services.engine.contract.sampling_params import SamplingParams


def add(driver, key: str, tenant: str = "", prompt: int = 8, tokens: int = 4) -> None:
    ids = [1 + (ord(key[0]) * 7 + place) % 60 for place in range(prompt)]
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=tokens, ignore_eos=True)
    message = AddRequest(key, CoreRequest(ids, params, tenant=tenant))
    driver.engine.add_request(message)
    driver.requests[key] = message.request


def admitted(driver) -> list[str]:
    return [mark.request_key for mark in driver.marks if mark.verb == "admit"]


def test_a_flood_does_not_hold_up_another_tenant(make_driver):
    for policy, place in (("tenant_fair", 3), ("fcfs", 20)):
        driver = make_driver(policy=policy, max_num_seqs=1)
        for number in range(20):
            add(driver, f"flood {number}", "a")
        while len(admitted(driver)) < 3:
            driver.step()
        add(driver, "one", "b")
        driver.run().check_all()
        assert admitted(driver).index("one") == place


def test_backlogged_tenants_get_equal_tokens_whatever_they_ask(make_driver):
    driver = make_driver(policy="tenant_fair", max_num_seqs=1, prefix_cache=False)
    for number in range(24):
        add(driver, f"small {number}", "a", prompt=4, tokens=3)
        add(driver, f"large {number}", "b", prompt=20, tokens=17)
    while len(admitted(driver)) < 24:
        driver.step()
    names = [key.split()[0] for key in admitted(driver)]
    # 6 positions against 36 (the last token is never computed): six small ones to a large one.
    assert 5 <= names.count("small") / names.count("large") <= 8
    driver.run().check_all()


def test_the_short_prompt_passes_the_long_one(make_driver):
    model = SimulatedModel(vocab_size=64, max_model_len=512, eos=0)
    driver = make_driver(model, policy="shortest_prefill", max_num_seqs=1, num_blocks=200)
    add(driver, "running")
    driver.step()
    # Each later arrival must be shorter by 64 tokens more.
    for key, length in (("long", 300), ("middle", 200), ("short", 20), ("near", 150)):
        add(driver, key, prompt=length)
    driver.run().check_all()
    assert admitted(driver)[1:] == ["short", "middle", "long", "near"]


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    requests=st.lists(
        st.tuples(
            st.sampled_from("abc"), st.integers(1, 40), st.integers(1, 20), st.integers(0, 3)
        ),
        max_size=25,
    ),
    num_blocks=st.integers(16, 40),
)
def test_all_end_with_the_right_tokens(make_driver, policy, requests, num_blocks):
    driver = make_driver(policy=policy, num_blocks=num_blocks, max_num_seqs=6)
    for number, (tenant, prompt, tokens, steps) in enumerate(requests):
        add(driver, f"{number}", tenant, prompt, tokens)
        for _ in range(steps):
            driver.step()
    driver.run().check_all()
    assert driver.engine.scheduler._tenants.counts == {}
    driver.engine.close()
