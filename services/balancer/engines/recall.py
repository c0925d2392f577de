"""Takes requests back that wait at a full engine while another has room.

Balancers that choose at the same moment can fill one engine beyond its places, where the caches
draw them; what came last would then wait there as long as an answer takes. It is moved, once, when
it has waited as long as computing all of its prompt elsewhere takes: so it never loses more than
twice what the better choice would have cost (the rent that buys the skis).
"""

from collections.abc import Iterable, Sequence

from services.balancer.engines.engine_view import EngineState, EngineView
from services.balancer.engines.member import LEAST_PREFILL_TOKENS_PER_S, Member, Ticket

LEAST_WAIT_S = 1.0
_FULL_CACHE = 0.9
"""Of its blocks: what waits does so for room in the cache, not for a place."""


def recall(members: Iterable[Member], now: float) -> int:
    """Take back what may begin sooner elsewhere; how many requests.

    Args:
        now: by the members' clock.
    """
    members = list(members)
    if not any(m.load is not None and m.load.waiting_requests for m in members):
        return 0
    views = {member: member.view(now) for member in members}
    crowded = [m for m in members if _waiting(m) and _full(views[m])]
    roomy = {m: _free(m, views[m]) for m in members if _free(m, views[m])}
    if not crowded or not roomy:
        return 0
    tickets = [t for m in crowded for t in m.unbegun() if now - t.dispatched_at >= LEAST_WAIT_S]
    moved = 0
    # The last come would be the last to begin.
    for ticket in sorted(tickets, key=lambda t: -t.dispatched_at):
        target = _target(ticket, views, roomy, now)
        if target is not None:
            roomy[target] -= ticket.seats
            ticket.take_back()
            moved += 1
    return moved


def _target(
    ticket: Ticket, views: dict[Member, EngineView], roomy: dict[Member, int], now: float
) -> Member | None:
    """Who could have begun it by now."""
    here = views[ticket.member]
    waited_s = now - ticket.dispatched_at
    fit = [
        member
        for member, free in roomy.items()
        if free >= ticket.seats
        and _alike(here, views[member])
        and waited_s >= ticket.blocks * here.block_size / _rate(views[member], here)
    ]
    return max(fit, key=lambda member: roomy[member], default=None)


def _waiting(member: Member) -> bool:
    return member.load is not None and member.load.waiting_requests > 0


def _full(view: EngineView) -> bool:
    places = view.occupancy >= view.max_num_seqs
    return places or view.held_blocks >= _FULL_CACHE * view.total_blocks > 0


def _free(member: Member, view: EngineView) -> int:
    """Places to move to: half of those free, since other balancers see them too."""
    if view.state is not EngineState.SERVING or _waiting(member) or _full(view):
        return 0
    return (view.max_num_seqs - view.occupancy + 1) // 2


def _alike(one: EngineView, other: EngineView) -> bool:
    """Whether a stream that may go to one may go to the other, whatever its rule."""
    keys: Sequence[str] = ("model", "revision", "numerics_id", "deterministic")
    return all(getattr(one, key) == getattr(other, key) for key in keys)


def _rate(target: EngineView, here: EngineView) -> float:
    measured = target.prefill_tokens_per_s or here.prefill_tokens_per_s
    return max(measured, LEAST_PREFILL_TOKENS_PER_S)
