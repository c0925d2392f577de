"""The routing simulator: nothing is lost, times are as reckoned by hand, hot prefixes spread."""

import json
from collections import Counter
from itertools import pairwise

import pytest

from benchmarks.route_trace.__main__ import arguments, run
from benchmarks.route_trace.engine import Engine, Rates
from benchmarks.route_trace.fleet import (
    Fleet,
    Index,
    at_rate,
    pooled_hit_rate,
    replay,
    saturation,
    summarise,
)
from benchmarks.route_trace.plot import svg
from benchmarks.route_trace.trace import BLOCK_SIZE, Hasher, Request, generate, load
from services.balancer.engines.engine_view import CostModel
from services.balancer.routing.policies import POLICIES

RATES = Rates(num_blocks=400)
HASHER = Hasher()


def request(number, at, blocks, *, extra=1, output=4):
    """A prompt of whole blocks and `extra` tokens more."""
    length = len(blocks) * BLOCK_SIZE + extra
    return Request(number, at, length, output, "s", HASHER.chain(blocks))


def fleet(policy="least_time", engines=4, rates=RATES, seed=1):
    return Fleet(engines, rates, policy, seed, CostModel())


@pytest.fixture(scope="module")
def small():
    return at_rate(generate(300, 5), 3.0)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_request_ends_once_and_leaves_nothing_behind(policy, small):
    simulated = fleet(policy)
    ended = replay(small, simulated)
    assert [f.number for f in ended] == [r.number for r in small]
    for sent, got in zip(small, ended, strict=True):
        assert sent.arrival_s < got.first_token_s <= got.end_s
        assert got.hit_tokens < sent.input_length
    for engine in simulated.engines.values():
        engine.blocks.check_integrity({})
        assert engine.occupancy == 0


def test_the_index_says_what_the_engines_hold(small):
    simulated = fleet()
    replay(small, simulated)
    every = {block for one in small for block in one.chain}
    for block in every:
        holders = {n for n, e in simulated.engines.items() if e.blocks.find(block) is not None}
        assert simulated.index.owners(block) == holders


def test_the_longest_contiguous_prefix_counts():
    index, chain = Index(), HASHER.chain([1, 2, 3])
    one, two = Engine("one", RATES), Engine("two", RATES)
    for engine, held in ((one, (0, 1, 2)), (two, (0, 2))):
        for position in held:
            block = engine.blocks.take()
            engine.blocks.register(block, chain[position], None)
        index.feed(engine)
    assert index.match(chain) == {"one": 3, "two": 1}
    assert index.match(HASHER.chain([9, 1])) == {}
    assert index.match([]) == {}


def test_a_seed_gives_one_history():
    def histories(seed):
        trace = at_rate(generate(150, seed), 3.0)
        return replay(trace, fleet("random", seed=seed))

    assert histories(7) == histories(7)
    assert histories(7) != histories(8)


def test_times_are_as_reckoned_by_hand():
    """1,000 tokens/s; a decode round is 0.1 s and 0.01 s for each sequence; 1,024 tokens a round.

    The first prompt: 513 tokens, one round. It decodes once alone; the second prompt, the same,
    comes meanwhile and computes one token only: its block is there. Then both decode.
    """
    rates = Rates(1000.0, 0.1, 0.01, round_tokens=1024, num_blocks=10)
    simulated = fleet(engines=1, rates=rates)
    first, second = replay(
        [request(0, 0.0, [1], output=4), request(1, 0.55, [1], output=2)], simulated
    )
    assert first.first_token_s == pytest.approx(0.513)
    # 0.513 + 0.11 alone, then a mixed round of 0.11 + 0.001, then both: 0.12.
    assert second.first_token_s == pytest.approx(0.513 + 0.11 + 0.111)
    assert second.end_s == pytest.approx(0.513 + 0.11 + 0.111 + 0.12)
    assert first.end_s == pytest.approx(second.end_s)
    assert (first.hit_tokens, second.hit_tokens) == (0, 512)


def test_a_prompt_longer_than_a_round_comes_in_chunks_and_lets_short_ones_by():
    rates = Rates(1000.0, 0.1, 0.01, round_tokens=1024, num_blocks=40)
    simulated = fleet(engines=1, rates=rates)
    engine = simulated.engines["engine-000"]
    engine.add(request(0, 0.0, [1, 2, 3, 4, 5, 6], extra=0, output=1), 0.0, 0)
    engine.add(request(1, 0.0, [9], extra=0, output=1), 0.0, 0)
    simulated.drain()
    long, short = simulated.finished
    assert short.end_s == pytest.approx(2 * 1.024)
    assert long.end_s == pytest.approx((3072 + 512) / 1000)


def test_blocks_that_are_held_are_not_given_away():
    simulated = fleet(engines=1, rates=Rates(num_blocks=4))
    # Each needs three of the four blocks: one after the other.
    one, two = replay([request(0, 0.0, [1, 2]), request(1, 0.0, [3, 4])], simulated)
    assert two.first_token_s > one.end_s
    with pytest.raises(ValueError, match="request 9 needs 6 blocks"):
        simulated.send(request(9, 0.0, [1, 2, 3, 4, 5]), 1.0)


def test_a_prefix_that_everyone_asks_for_spreads():
    """One prefix of 20 blocks, far more askers than one engine can serve."""
    prefix = list(range(100, 120))
    trace = [request(n, 2.0 + n * 0.01, [*prefix, 1000 + n], output=100) for n in range(300)]
    trace.insert(0, request(300, 0.0, prefix))
    simulated = fleet(engines=4)
    ended = replay(trace, simulated)
    shares = Counter(f.engine_id for f in ended)
    holders = simulated.index.owners(HASHER.chain(prefix)[-1])
    assert len(holders) == 4
    assert max(shares.values()) < 2 * min(shares.values())
    # ... and it is recomputed a few times, not by everyone; who only follows it queues.
    assert sum(f.hit_tokens >= 20 * BLOCK_SIZE for f in ended) > 280
    piled = replay(trace, fleet("prefix_only", engines=4))
    worst = max(f.first_token_s - f.arrival_s for f in ended)
    assert worst < max(f.first_token_s - f.arrival_s for f in piled)


def test_a_prefix_of_one_asker_stays_where_it_is():
    trace = [request(n, n * 3.0, list(range(200, 210 + n))) for n in range(20)]
    assert len({f.engine_id for f in replay(trace, fleet(engines=4))}) == 1


def test_reuse_pays_on_a_trace(small):
    def result(policy):
        simulated = fleet(policy)
        return summarise(policy, 1.0, small, simulated, replay(small, simulated))

    ours, blind = result("least_time"), result("random")
    pooled = pooled_hit_rate(small, RATES.num_blocks * 4)
    assert blind.hit_rate < ours.hit_rate <= pooled + 0.01
    assert ours.ttft_p90_s < blind.ttft_p90_s
    assert ours.imbalance >= 1.0


def test_the_pooled_cache_is_an_lru():
    a, b = [1, 2], [3, 4]
    requests = [request(n, n, blocks) for n, blocks in enumerate((a, b, a, b))]
    total = 4 * (2 * BLOCK_SIZE + 1)
    assert pooled_hit_rate(requests, 4) == pytest.approx(2 * 2 * BLOCK_SIZE / total)
    assert pooled_hit_rate(requests, 2) == 0


def test_saturation_is_the_rate_of_a_full_fleet():
    # Alone in an engine: 513 tokens and no decode round.
    rates = Rates(1000.0, 0.1, 0.01)
    requests = [request(n, 0.0, [n], output=1) for n in range(40)]
    assert saturation(requests, fleet(engines=2, rates=rates), 4) == pytest.approx(2 / 0.513)


def test_the_generated_shape():
    trace = generate(1500, 0)
    assert [r.number for r in trace] == list(range(1500))
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(trace))
    lengths = sorted(r.input_length for r in trace)
    assert 10_000 < sum(lengths) / len(lengths) < 25_000
    assert lengths[int(0.99 * len(lengths))] > 4 * lengths[len(lengths) // 2]
    assert 0.5 < pooled_hit_rate(trace, 10**5) < 0.8
    assert trace != generate(1500, 1)


def test_a_file_is_read_and_its_faults_are_named(tmp_path):
    path = tmp_path / "trace.jsonl"
    good = {"timestamp": 10, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]}
    path.write_text(json.dumps(good) + "\n" + json.dumps({**good, "timestamp": 20}) + "\n")
    first, second = load(path)
    assert (first.arrival_s, second.arrival_s) == (0.01, 0.02)
    assert first.chain == second.chain == HASHER.chain([7])
    assert len(load(path, 1)) == 1
    for change, problem in (
        ({"input_length": 0}, "input_length"),
        ({"output_length": None}, "output_length"),
        ({"hash_ids": [7]}, "hash_ids: 1 blocks for 600 tokens"),
        ({"hash_ids": [7, -1]}, "hash_ids"),
        ({"timestamp": 5}, "timestamp: earlier"),
    ):
        path.write_text(json.dumps(good) + "\n" + json.dumps({**good, **change}) + "\n")
        with pytest.raises(ValueError, match=f"line 2: {problem}"):
            load(path)
    path.write_text("")
    with pytest.raises(ValueError, match="no request"):
        load(path)


def test_the_command_prints_every_policy_at_every_load(capsys):
    args = arguments(["--engines", "2", "--loads", "0.5,0.9", "--policies", "least_time,random"])
    figures = run(args, generate(60, 2))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[2:]] == [
        [load_share, policy] for load_share in ("0.5", "0.9") for policy in ("least_time", "random")
    ]
    picture = svg(figures.results, figures.pooled, "a <title>")
    assert picture.count("<polyline") == 4
    assert "a &lt;title&gt;" in picture


@pytest.mark.parametrize("wrong", ["--loads=x", "--loads=0", "--policies=best", "--engines=0"])
def test_wrong_options_are_named(wrong, capsys):
    with pytest.raises(SystemExit):
        arguments([wrong])
    assert wrong.split("=")[0] in capsys.readouterr().err
