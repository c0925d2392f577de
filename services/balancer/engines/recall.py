"""Recalls requests that wait at a full engine while another engine has free slots.

Balancers that choose at the same moment can fill one engine beyond its slots, usually the one whose
cache matches. The last requests would then wait there as long as an answer takes. A request is
moved once, after it has waited as long as computing its whole prompt on the other engine takes. By
the ski-rental bound (wait as long as the alternative costs) the request never loses more than twice
the cost of the better choice.
"""

from collections.abc import Iterable, Sequence

from services.balancer.engines.engine_view import EngineState, EngineView
from services.balancer.engines.member import MIN_PREFILL_TOKENS_PER_S, Dispatch, Member

MIN_WAIT_S = 1.0
_FULL_CACHE = 0.9
"""Share of held blocks above which requests wait for cache blocks rather than for a slot."""


def recall_waiting(members: Iterable[Member], now: float) -> int:
    """Recall the requests that another engine could start sooner.

    Args:
        now: by the members' clock.

    Returns:
        The number of requests recalled.
    """
    members = list(members)
    if not any(m.load is not None and m.load.waiting_requests for m in members):
        return 0
    views = {member: member.view(now) for member in members}
    crowded = [m for m in members if _has_waiting(m) and _is_full(views[m])]
    free_slots = {m: free for m in members if (free := _movable_slots(m, views[m]))}
    if not crowded or not free_slots:
        return 0
    dispatches = [d for m in crowded for d in m.recallable() if now - d.dispatched_at >= MIN_WAIT_S]
    recalled = 0
    # The newest request would start last, so it gains most.
    for dispatch in sorted(dispatches, key=lambda d: -d.dispatched_at):
        target = _find_target(dispatch, views, free_slots, now)
        if target is not None:
            free_slots[target] -= dispatch.slots
            dispatch.recall()
            recalled += 1
    return recalled


def _find_target(
    dispatch: Dispatch, views: dict[Member, EngineView], free_slots: dict[Member, int], now: float
) -> Member | None:
    """The engine with most free slots that could have computed the prompt by now."""
    here = views[dispatch.member]
    waited_s = now - dispatch.dispatched_at
    fit = [
        member
        for member, free in free_slots.items()
        if free >= dispatch.slots
        and _interchangeable(here, views[member])
        and waited_s >= dispatch.blocks * here.block_size / _prefill_rate(views[member], here)
    ]
    return max(fit, key=lambda member: free_slots[member], default=None)


def _has_waiting(member: Member) -> bool:
    return member.load is not None and member.load.waiting_requests > 0


def _is_full(view: EngineView) -> bool:
    no_slot = view.occupancy >= view.max_num_seqs
    return no_slot or view.held_blocks >= _FULL_CACHE * view.total_blocks > 0


def _movable_slots(member: Member, view: EngineView) -> int:
    """Slots that recalled requests may take: half of the free ones, because other balancers count
    on the same slots."""
    if view.state is not EngineState.SERVING or _has_waiting(member) or _is_full(view):
        return 0
    return (view.max_num_seqs - view.occupancy + 1) // 2


def _interchangeable(one: EngineView, other: EngineView) -> bool:
    """Whether every stream that may run on one may run on the other, under any `carry_on` rule."""
    keys: Sequence[str] = ("model", "revision", "numerics_id", "deterministic")
    return all(getattr(one, key) == getattr(other, key) for key in keys)


def _prefill_rate(target: EngineView, here: EngineView) -> float:
    measured = target.prefill_tokens_per_s or here.prefill_tokens_per_s
    return max(measured, MIN_PREFILL_TOKENS_PER_S)
