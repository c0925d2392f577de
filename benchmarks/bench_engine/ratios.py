"""Our figures as ratios of a peer's of the same run, beside what the project wants them to be."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

Best = Mapping[str, Mapping[str, float]]
"""Tokens per second: side, case."""


@dataclass(frozen=True)
class Goal:
    """A ratio that one of our sides should reach; of several peers the fastest counts."""

    of: str
    to: Sequence[str]
    case: str
    wanted: float


_FLOAT32 = ("vllm float32", "vllm float32 compiled")
_VLLM = ("vllm bfloat16", "vllm bfloat16 compiled", *_FLOAT32)
"""With its compiler and without: the better one counts."""
GOALS = (
    Goal("ours float32", _FLOAT32, "decode B=1", 1.0),
    Goal("ours float32", _FLOAT32, "decode B=8", 1.0),
    Goal("ours float32", _FLOAT32, "decode B=32", 1.0),
    Goal("ours float32", _FLOAT32, "prefill", 0.9),
    Goal("ours int8", ("llama.cpp Q4_1",), "decode B=1", 0.7),
    Goal("ours int8", _VLLM, "decode B=8", 1.5),
    Goal("ours int8", _VLLM, "decode B=32", 1.3),
    Goal("ours int8", _VLLM, "prefill", 1.2),
)
_WIDE = ("transformers float32", "llama.cpp BF16", *_VLLM)
EXPERT_GOALS = tuple(
    Goal(of, _WIDE, f"decode B={batch}", wanted)
    for of, wanted in (("ours bfloat16", 1.0), ("ours int8", 1.5))
    for batch in (1, 8, 32)
)
"""Of a model with experts; the peers that compute in float32 or bfloat16."""


@dataclass(frozen=True)
class Ratio:
    """One comparison; `wanted` is None where nothing was promised."""

    of: str
    to: str
    case: str
    ratio: float
    wanted: float | None


def ratios(best: Best, goals: Sequence[Goal] = GOALS) -> list[dict]:
    """The goals whose sides ran; then every side of ours beside every peer."""
    return [asdict(line) for line in (*_goals(best, goals), *_all(best))]


def _goals(best: Best, goals: Sequence[Goal]) -> Iterator[Ratio]:
    for goal in goals:
        peers = [name for name in goal.to if goal.case in best.get(name, {})]
        own = best.get(goal.of, {}).get(goal.case)
        if own is None or not peers:
            continue
        fastest = max(peers, key=lambda name: best[name][goal.case])
        ratio = round(own / best[fastest][goal.case], 2)
        yield Ratio(goal.of, fastest, goal.case, ratio, goal.wanted)


def _all(best: Best) -> Iterator[Ratio]:
    for of, own in best.items():
        for to, other in best.items():
            if of.startswith("ours") and not to.startswith("ours"):
                for case, rate in own.items():
                    yield Ratio(of, to, case, round(rate / other[case], 2), None)
