"""`session`: requests of one session go to one engine as long as it is there (rendezvous hash).

When engines come or go, only the sessions of those engines move. A request without a session id is
placed by `least_time`.
"""

from hashlib import blake2b
from random import Random

from services.balancer.engines.engine_view import Choice, Situation
from services.balancer.routing.policies import least_time


def choose(situation: Situation, rng: Random) -> Choice:
    """The engine whose hash with the session is highest."""
    asked = situation.asked
    if not asked.session_id:
        return least_time.choose(situation, rng)
    key = f"{asked.tenant}\0{asked.session_id}\0"

    def weight(engine_id: str) -> bytes:
        return blake2b((key + engine_id).encode(), digest_size=16).digest()

    chosen = max(situation.candidates, key=lambda c: weight(c.engine.engine_id))
    return Choice(chosen, "home of the session", {})
