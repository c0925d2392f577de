"""`prefix_only`: chooses the engine with the longest prefix match; on a tie, the least occupied."""

from random import Random

from services.balancer.engines.engine_view import Choice, Situation


def choose(situation: Situation, rng: Random) -> Choice:
    """The longest match, regardless of the load."""
    best = max(situation.candidates, key=lambda c: c.matched_tokens).matched_tokens
    holders = [c for c in situation.candidates if c.matched_tokens == best]
    least = min(c.engine.occupancy for c in holders)
    chosen = rng.choice([c for c in holders if c.engine.occupancy == least])
    return Choice(chosen, f"holds {best} tokens of the prompt", {})
