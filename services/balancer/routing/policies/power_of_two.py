"""`power_of_two`: chooses the less occupied of two engines drawn at random."""

from random import Random

from services.balancer.engines.engine_view import Choice, Situation


def choose(situation: Situation, rng: Random) -> Choice:
    """Draw two without replacement; the first one wins a tie."""
    drawn = rng.sample(situation.candidates, min(2, len(situation.candidates)))
    chosen = min(drawn, key=lambda c: c.engine.occupancy)
    return Choice(chosen, "the less occupied of two", {})
