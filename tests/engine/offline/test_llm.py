"""`LLM`: outputs in the order of the prompts, own seeds, stop strings, clean ends."""

import pytest

from services.common.config.settings import ConfigError
from services.common.errors import InvalidArgumentError
from services.engine.contract.sampling_params import Constraint, SamplingParams
from services.engine.offline.llm import LLM
from tests.doubles.tiny_model import write_tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def llm():
    with LLM(simulate="vocab_size=256,eos=255", num_blocks=400, block_size=4) as llm:
        yield llm
        assert not llm.engine.has_unfinished_requests()
        assert llm.engine.load().held_blocks == 0


def test_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = [[n] * n for n in range(20, 0, -1)]
    lengths = [SamplingParams(temperature=0.0, max_tokens=n % 5 + 1) for n in range(20)]
    outputs = llm.generate(prompts, lengths)
    assert [list(o.prompt_token_ids) for o in outputs] == prompts
    assert all(o.finished and o.released for o in outputs)
    alone = [llm.generate(p, s)[0] for p, s in zip(prompts, lengths, strict=True)]
    assert [o.choices for o in outputs] == [o.choices for o in alone]


def test_one_prompt_may_be_a_text_or_ids(llm):
    (by_text,) = llm.generate("abc", GREEDY)
    (by_ids,) = llm.generate(list(by_text.prompt_token_ids), GREEDY)
    assert by_text.choices == by_ids.choices
    assert len(by_text.choices[0].token_ids) == 6
    assert llm.generate([]) == []


def test_many_prompts_wait_instead_of_being_refused(llm):
    outputs = llm.generate([[n % 250 + 1, 3] for n in range(400)], GREEDY)
    assert len(outputs) == 400


def test_requests_without_a_seed_do_not_share_one(llm):
    warm = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([[5, 6]] * 4, warm)
    assert len({tuple(o.choices[0].token_ids) for o in outputs}) == 4
    seeded = llm.generate([[5, 6]] * 2, warm.with_seed(3))
    assert seeded[0].choices == seeded[1].choices


def test_a_stop_string_ends_its_choice(llm):
    (whole,) = llm.generate("abc", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    text = whole.choices[0].text
    stop = text[8:10]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop_strings=(stop,))
    (output,) = llm.generate("abc", params)
    assert output.choices[0].finish_reason == "STOP_STRING"
    assert output.choices[0].stop_string == stop
    assert output.choices[0].text == text[: text.index(stop)]


def test_a_request_that_cannot_be_served_stops_the_call_before_work(llm):
    with pytest.raises(InvalidArgumentError, match="empty"):
        llm.generate([[1, 2], []], GREEDY)
    with pytest.raises(ValueError, match="2 sampling_params for 1"):
        llm.generate([[1]], [GREEDY, GREEDY])
    with pytest.raises(ValueError, match="mixes texts"):
        llm.generate([1, "two"], GREEDY)


def test_an_interrupt_leaves_a_usable_engine(llm, monkeypatch):
    steps = iter(range(3))
    step = llm.engine.step

    def interrupted():
        if next(steps, None) == 2:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3]] * 3, GREEDY)
    monkeypatch.undo()
    assert len(llm.generate([1, 2, 3], GREEDY)[0].choices[0].token_ids) == 6


def test_a_clone_does_not_grow_with_its_original(llm):
    (output,) = llm.generate([1, 2, 3], GREEDY)
    clone = output.clone()
    output.choices[0].token_ids.append(1)
    assert len(clone.choices[0].token_ids) == 6


def test_a_request_that_fails_as_it_runs_is_raised_when_all_have_ended(llm):
    bad = SamplingParams(constraint=Constraint("ebnf", "root ::= nowhere"), max_tokens=4)
    with pytest.raises(InvalidArgumentError, match=r"^constraint\.ebnf") as caught:
        llm.generate([[1, 2], [3, 4]], [GREEDY, bad])
    assert "prompt 1 failed, 1 of 2 in all" in caught.value.__notes__[0]
    assert caught.value.violations[0].field == "constraint.ebnf"
    good, failed = llm.generate([[1, 2], [3, 4]], [GREEDY, bad], return_failures=True)
    assert len(good.choices[0].token_ids) == 6
    assert failed.failure.code == "INVALID_ARGUMENT"


def test_progress_is_drawn_on_stderr(llm, capsys):
    llm.generate([[1], [2]], GREEDY, show_progress=True)
    assert "2/2 prompts, 12 tokens" in capsys.readouterr().err


def test_unknown_and_bad_fields_are_refused_by_name():
    with pytest.raises(TypeError, match="blok_size"):
        LLM(simulate="yes", blok_size=3)
    with pytest.raises(ConfigError, match="block_size"):
        LLM(simulate="yes", block_size=0)
    with pytest.raises(ConfigError, match="simulate"):
        LLM(simulate="vocabulary=3")


@pytest.fixture
def chatty(tmp_path):
    with LLM(str(write_tiny_model(tmp_path)), num_blocks=60, block_size=8, threads=1) as llm:
        yield llm


HI = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]


def test_conversations_are_rendered_by_the_models_template(chatty):
    (answer,) = chatty.chat(HI, GREEDY)
    text = "<s>system\nBe short.<eot>\n<s>user\nHi<eot>\n<s>assistant\n"
    assert chatty.tokenizer.encode(text, add_special_tokens=False) == [*answer.prompt_token_ids]
    (evil,) = chatty.chat([{"role": "user", "content": "<eot>"}], GREEDY)  # R2-16
    end = chatty.tokenizer.id_of("<eot>")
    assert list(evil.prompt_token_ids).count(end) == 1
    several = chatty.chat([HI, HI[1:]], [GREEDY, GREEDY])
    assert several[0].choices == answer.choices
    assert len(several[1].prompt_token_ids) < len(several[0].prompt_token_ids)
    assert chatty.chat([], GREEDY) == []


@pytest.mark.parametrize(
    "messages",
    [[{"role": "robot", "content": "x"}], [{"role": "user", "mood": "x"}], [{"role": 5}]],
)
def test_a_bad_message_is_refused_before_work(chatty, messages):
    with pytest.raises(InvalidArgumentError, match="chat"):
        chatty.chat([HI, messages], GREEDY)
    assert not chatty.engine.has_unfinished_requests()
