"""`least_time`: chooses the engine with the least expected time; ties are broken at random.

    expected = (κ · uncached after match + queued uncached) / prefill rate
             + η · turnover / mean turnover · uncached after match / prefill rate
             + λ · u / (1 − u)              u = held blocks / total blocks, at most 0.98
             + expected output · decode round · b / (b + half batch)

The last line is the time that the b requests already running add to each output token.

κ > 1 because recomputing a token costs other requests too: those behind it wait, and its block
evicts another one. The η term prices that eviction. It costs more where the cache turns over
quickly (many tokens computed recently, relative to the size of the cache), because even the oldest
block there is young. Unknown prompts therefore go to the engine whose cache is least used. That
evens out block age across engines, so that their caches together come close to one pooled cache.

There are no thresholds: a hot prefix spreads to other engines as soon as waiting costs more than
recomputing. An engine that has not measured a rate yet gets the median of the others.
"""

from collections.abc import Iterable
from random import Random
from statistics import median

from services.balancer.engines.engine_view import (
    Candidate,
    Choice,
    CostModel,
    EngineView,
    Score,
    Situation,
)


def choose(situation: Situation, rng: Random) -> Choice:
    """The candidate with the least expected time."""
    scores = score_all(situation)
    best_s = min(score.expected_s for score in scores.values())
    best = [c for c in situation.candidates if scores[c.engine.engine_id].expected_s <= best_s]
    chosen = best[0] if len(best) == 1 else rng.choice(best)
    reason = "least expected time" if len(best) == 1 else f"tie of {len(best)}, by chance"
    return Choice(chosen, reason, scores)


def score_all(situation: Situation) -> dict[str, Score]:
    """Expected seconds at every candidate, by engine id."""
    cost = situation.cost
    engines = [candidate.engine for candidate in situation.candidates]
    prefill_rate = _typical(
        (e.prefill_tokens_per_s for e in engines), cost.default_prefill_tokens_per_s
    )
    decode_round_s = _typical((e.decode_round_s for e in engines), cost.default_decode_round_s)
    prompt_tokens = len(situation.request.token_ids)
    mean_turnover = sum(turnover(engine) for engine in engines) / len(engines)
    return {
        candidate.engine.engine_id: _score(
            candidate,
            cost,
            prompt_tokens,
            situation.request.expected_output,
            candidate.engine.prefill_tokens_per_s or prefill_rate,
            candidate.engine.decode_round_s or decode_round_s,
            turnover(candidate.engine) / mean_turnover if mean_turnover else 1.0,
        )
        for candidate in situation.candidates
    }


def _score(
    candidate: Candidate,
    cost: CostModel,
    prompt_tokens: int,
    expected_output: int,
    prefill_rate: float,
    decode_round_s: float,
    relative_turnover: float,
) -> Score:
    engine = candidate.engine
    # The last prompt token is always computed, because its logits are needed.
    uncached = max(prompt_tokens - candidate.matched_tokens, 1)
    held = min(engine.held_blocks / max(engine.total_blocks, 1), cost.max_utilisation)
    others = engine.occupancy / (engine.occupancy + cost.half_batch)
    parts = {
        "prefill_s": uncached / prefill_rate,
        "burden_s": (cost.recompute_weight - 1) * uncached / prefill_rate,
        "turnover_s": cost.turnover_weight * relative_turnover * uncached / prefill_rate,
        "queued_s": engine.queued_uncached / prefill_rate,
        "pressure_s": cost.pressure_s * held / (1.0 - held),
        "decode_s": expected_output * decode_round_s * others,
    }
    return Score(sum(parts.values()), parts)


def turnover(engine: EngineView) -> float:
    """Recent uncached tokens per token of cache that no running request holds: how often that part
    of the cache was overwritten recently."""
    free = engine.total_blocks - engine.held_blocks
    return engine.recent_uncached / (max(free, 1) * engine.block_size)


def _typical(rates: Iterable[float], default: float) -> float:
    measured = [rate for rate in rates if rate > 0]
    return median(measured) if measured else default
