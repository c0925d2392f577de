"""DeepSeek V4 and V4.1 against their references: whole, cut, decoded, batched, restarted."""

import random

import pytest
import torch

from services.engine.compute.models.v4_modules.model import V4Model
from services.engine.compute.models.v41_modules.model import V41Model
from tests.doubles.v4_driver import V4Driver
from tests.engine.compute.models.v4.conftest import Golden

ERROR = 1e-4
Model = V4Model | V41Model


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert not found.isnan().any()
    assert float((found - wanted).abs().max()) <= ERROR


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("size", [13, 100])
def test_logits_equal_those_of_the_reference(
    size: int, block_size: int, model: Model, golden: list[Golden]
) -> None:
    driver = V4Driver(model, block_size=block_size)
    for prompt, logits, _ in golden:
        assert_close(driver.in_chunks(driver.open(), prompt, size), logits)


def test_logits_of_a_prompt_token_by_token(model: Model, golden: list[Golden]) -> None:
    driver = V4Driver(model)
    prompts = [(driver.open(), one.prompt[:20]) for one in golden]
    for at in range(20):
        found = driver.run(*[(request, prompt[at : at + 1]) for request, prompt in prompts])
        for one, logits in zip(golden, found, strict=True):
            assert_close(logits[0], one.logits[at])


def test_the_deterministic_kernels_give_the_same_logits(tiled: Model, golden: list[Golden]) -> None:
    driver = V4Driver(tiled)
    prompt, logits, _ = golden[0]
    assert_close(driver.run((driver.open(), prompt))[0], logits)


def test_a_prompt_may_be_cut_anywhere(model: Model, golden: list[Golden]) -> None:
    """Every cut is a request of its own; all of them share the two rounds."""
    prompt, logits, _ = golden[0]
    cuts = range(1, 40)
    driver = V4Driver(model, block_size=8, num_blocks=300, num_slots=50)
    requests = {cut: driver.open(48) for cut in cuts}
    heads = driver.run(*[(request, prompt[:cut]) for cut, request in requests.items()])
    tails = driver.run(*[(request, prompt[cut:]) for cut, request in requests.items()])
    for cut, head, tail in zip(cuts, heads, tails, strict=True):
        assert_close(head, logits[:cut])
        assert_close(tail, logits[cut:])


def test_greedy_tokens_equal_those_of_the_reference_in_a_batch(
    model: Model, golden: list[Golden]
) -> None:
    """The first request decodes while the prompt of the second is still computed in chunks."""
    driver = V4Driver(model)
    requests = [driver.open(), driver.open()]
    tokens: list[list[int]] = [[], []]
    waiting = [list(one.prompt) for one in golden]
    while any(len(found) < 16 for found in tokens):
        parts = []
        for number, rest in enumerate(waiting):
            now = rest[:11] or tokens[number][-1:]
            waiting[number] = rest[11:]
            parts.append((requests[number], now))
        for number, logits in enumerate(driver.run(*parts)):
            if not waiting[number]:
                tokens[number].append(int(logits[-1].argmax()))
    for one, found in zip(golden, tokens, strict=True):
        assert found[:16] == one.greedy[:16]


@pytest.mark.parametrize("seed", range(2))
def test_random_rounds_of_several_requests(seed: int, model: Model, golden: list[Golden]) -> None:
    draw = random.Random(seed)
    driver = V4Driver(model, block_size=draw.choice((4, 8, 16)), drafts=2, num_blocks=200)
    running = [(driver.open(), golden[draw.randrange(2)]) for _ in range(5)]
    while running:
        chosen = draw.sample(running, draw.randint(1, len(running)))
        parts = []
        for request, one in chosen:
            if draw.random() < 0.3:
                first = max(0, request.written - driver.drafts)
                request.start = draw.randint(min(first, request.start), request.start)
            count = draw.choice((1, 2, 5, 19))
            parts.append((request, one.prompt[request.start : request.start + count]))
        starts = [request.start for request, _ in parts]
        found = driver.run(*parts)
        for (_, one), start, logits in zip(chosen, starts, found, strict=True):
            assert_close(logits, one.logits[start : start + len(logits)])
        running = [item for item in running if item[0].start < len(item[1].prompt)]


def test_a_row_has_equal_bits_in_any_company(tiled: Model, golden: list[Golden]) -> None:
    prompt, other = golden[0].prompt, golden[1].prompt
    driver = V4Driver(tiled)
    want = driver.run((driver.open(), prompt))[0]
    assert torch.equal(driver.in_chunks(driver.open(), prompt, 7), want)
    first, second = driver.open(), driver.open()
    driver.run((second, other[:9]))
    found = []
    for at in range(0, 45, 9):
        _, logits = driver.run(
            (second, other[9 + at : 9 + at + 9 + at % 2]), (first, prompt[at : at + 9])
        )
        found.append(logits)
    assert torch.equal(torch.cat(found), want)


def test_decoding_has_the_bits_of_a_prompt(tiled: Model, golden: list[Golden]) -> None:
    prompt = golden[0].prompt[:28]
    driver = V4Driver(tiled)
    want = driver.run((driver.open(), prompt))[0]
    request = driver.open()
    driver.run((request, prompt[:20]))
    found = driver.in_chunks(request, prompt[20:], 1)
    assert torch.equal(found, want[20:])


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_prefix_hit_restarts_from_history_and_a_snapshot(
    blocks: int, tiled: Model, golden: list[Golden]
) -> None:
    prompt = golden[0].prompt
    driver = V4Driver(tiled)
    source = driver.open()
    want = driver.run((source, prompt[: 16 * blocks]))[0]
    hit = driver.restart(source, blocks)
    want = driver.run((source, prompt[16 * blocks :]))[0]
    assert torch.equal(driver.run((hit, prompt[16 * blocks :]))[0], want)
    assert_close(want, golden[0].logits[16 * blocks :])


def test_rejected_positions_are_computed_again(tiled: Model, golden: list[Golden]) -> None:
    drafts, prompt = 3, golden[0].prompt[:25]
    driver = V4Driver(tiled, drafts=drafts)
    want = driver.run((driver.open(), prompt))[0]
    request = driver.open()
    for at in range(0, 25, 5):
        wrong = [(token + 1) % 96 for token in prompt[at + 5 - drafts : at + 5]]
        driver.run((request, prompt[at : at + 5 - drafts] + wrong))
        request.start -= drafts
        found = driver.run((request, prompt[at + 5 - drafts : at + 5]))[0]
        assert torch.equal(found, want[at + 5 - drafts : at + 5])
