"""`round_robin`: chooses the engines in turn, in the order of their ids."""

from random import Random

from services.balancer.engines.engine_view import Choice, Situation


def choose(situation: Situation, rng: Random) -> Choice:
    """The next engine in order; `rng` is not used."""
    ordered = sorted(situation.candidates, key=lambda c: c.engine.engine_id)
    return Choice(ordered[situation.turn % len(ordered)], "its turn", {})
