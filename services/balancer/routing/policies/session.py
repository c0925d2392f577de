"""`session`: sends all requests of a session to one engine while it serves (rendezvous hashing).

When engines join or leave, only the sessions of those engines move. `least_time` places a request
without a session id.
"""

from hashlib import blake2b
from random import Random

from services.balancer.engines.engine_view import Choice, Situation
from services.balancer.routing.policies import least_time


def choose(situation: Situation, rng: Random) -> Choice:
    """The engine with the highest hash of session and engine id."""
    request = situation.request
    if not request.session_id:
        return least_time.choose(situation, rng)
    key = f"{request.tenant}\0{request.session_id}\0"

    def weight(engine_id: str) -> bytes:
        return blake2b((key + engine_id).encode(), digest_size=16).digest()

    chosen = max(situation.candidates, key=lambda c: weight(c.engine.engine_id))
    return Choice(chosen, "home of the session", {})
