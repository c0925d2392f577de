"""Routing policies by name: each a pure function of a frozen situation and a source of chance."""

from collections.abc import Callable, Mapping
from random import Random

from services.balancer.engine_view import Choice, Situation
from services.balancer.policies import (
    least_time,
    power_of_two,
    prefix_only,
    random_choice,
    round_robin,
    session,
)

Policy = Callable[[Situation, Random], Choice]

POLICIES: Mapping[str, Policy] = {
    "least_time": least_time.choose,
    "round_robin": round_robin.choose,
    "random": random_choice.choose,
    "prefix_only": prefix_only.choose,
    "power_of_two": power_of_two.choose,
    "session": session.choose,
}
