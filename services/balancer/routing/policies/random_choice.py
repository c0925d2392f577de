"""`random`: any engine, all alike."""

from random import Random

from services.balancer.engines.engine_view import Choice, Situation


def choose(situation: Situation, rng: Random) -> Choice:
    """A uniform draw."""
    return Choice(rng.choice(situation.candidates), "by chance", {})
