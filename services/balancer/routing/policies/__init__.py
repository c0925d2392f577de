"""Routing policies by name. Each is a pure function of a frozen situation and a random generator.

Users can add their own policies: as an entry point of the group `inferfleet.policies`, or by naming
module:function.
"""

import importlib
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from random import Random

from services.balancer.engines.engine_view import Choice, Situation
from services.balancer.routing.policies import (
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

ENTRY_POINTS = "inferfleet.policies"


class PolicyError(ValueError):
    """The policy does not exist or cannot be loaded; the message says why."""


def find_policy(name: str) -> Policy:
    """Find a policy by name: a built-in one, an entry point, or module:function.

    Raises:
        PolicyError: the policy does not exist or cannot be loaded.
    """
    if name in POLICIES:
        return POLICIES[name]
    found = [point for point in entry_points(group=ENTRY_POINTS) if point.name == name]
    target = found[0].value if found else name
    module, colon, attribute = target.partition(":")
    if not colon or not module or not attribute:
        raise PolicyError(
            f"{name!r} is none of {', '.join(POLICIES)}, no entry point of {ENTRY_POINTS} and not "
            "module:function"
        )
    try:
        policy = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise PolicyError(f"{target} cannot be loaded: {error}") from error
    if not callable(policy):
        raise PolicyError(f"{target} is not a function")
    loaded: Policy = policy
    return loaded
