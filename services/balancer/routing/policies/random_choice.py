"""`random`: chooses any engine with equal probability."""

from random import Random

from services.balancer.engines.engine_view import Choice, Situation


def choose(situation: Situation, rng: Random) -> Choice:
    """Draw one candidate uniformly."""
    return Choice(rng.choice(situation.candidates), "by chance", {})
