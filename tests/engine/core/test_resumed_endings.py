"""Ends of resumed answers: tokens of the engine before count as this engine's own do."""

from services.engine.compute.simulated_runner import SimulatedModel

# One token in eight ends an answer, so that short answers end on their own.
MODEL = SimulatedModel(vocab_size=8, max_model_len=512, eos=0)
BEGUN = 6


def answer_of(make_driver, prompt: list[int], **params) -> list[int]:
    driver = make_driver(MODEL)
    driver.add("whole", prompt, **params)
    driver.run().check_all()
    return driver.tokens[("whole", 0)]


def resume(make_driver, prompt: list[int], begun: list[int], **params) -> tuple[list[int], str]:
    driver = make_driver(MODEL)
    driver.add("rest", prompt, continued=[begun], **params)
    driver.run().check_all()
    return driver.tokens[("rest", 0)], driver.reasons[("rest", 0)]


def test_an_end_token_between_the_two_counts_ends_a_resumed_answer(make_driver):
    """min_tokens is reached with the tokens of both engines, not with those of this one."""
    tried = 0
    for first in range(1, 8):
        for second in range(1, 8):
            prompt = [first, second, 5]
            params = {"max_tokens": 60, "min_tokens": BEGUN + 1}
            whole = answer_of(make_driver, prompt, **params)
            own = len(whole) - BEGUN
            if not 1 <= own <= BEGUN or whole[-1] != MODEL.eos:
                continue
            tried += 1
            rest, reason = resume(make_driver, prompt, whole[:BEGUN], **params)
            assert (whole[:BEGUN] + rest, reason) == (whole, "EOS")
    assert tried > 5


def test_a_stop_token_between_the_two_counts_ends_a_resumed_answer(make_driver):
    params = {"max_tokens": 60, "min_tokens": BEGUN + 1, "ignore_eos": True}
    params["stop_token_ids"] = (1, 2)
    tried = 0
    for first in range(3, 8):
        whole = answer_of(make_driver, [first, 4], **params)
        if BEGUN < len(whole) <= 2 * BEGUN:
            tried += 1
            rest, reason = resume(make_driver, [first, 4], whole[:BEGUN], **params)
            assert (whole[:BEGUN] + rest, reason) == (whole, "STOP_TOKEN")
    assert tried > 1


def test_no_end_token_comes_before_min_tokens_of_both_engines(make_driver):
    params = {"max_tokens": 20, "min_tokens": 12}
    whole = answer_of(make_driver, [3, 4], **params)
    rest, _ = resume(make_driver, [3, 4], whole[:BEGUN], **params)
    assert whole[:BEGUN] + rest == whole
    assert MODEL.eos not in whole[:12]


def test_a_choice_that_had_ended_elsewhere_is_not_run(make_driver):
    driver = make_driver(MODEL)
    params = {"n": 2, "max_tokens": 5, "ignore_eos": True}
    driver.add("rest", [3, 4], continued=[[5], [6]], finished=[1], **params)
    driver.run().check_all()
    assert set(driver.tokens) == {("rest", 0)}


def test_each_choice_goes_on_from_its_own_tokens(make_driver):
    driver = make_driver(MODEL)
    params = {"n": 3, "temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    driver.add("whole", range(1, 7), **params)
    driver.run().check_all()
    begun = [driver.tokens[("whole", c)][: 2 * c] for c in range(3)]
    driver.add("rest", range(1, 7), continued=begun, **params)
    driver.run().check_all()
    for choice, tokens in enumerate(begun):
        whole = driver.tokens[("whole", choice)]
        assert tokens + driver.tokens[("rest", choice)] == whole
