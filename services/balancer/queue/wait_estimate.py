"""Estimates, per model, how long a request has to wait and how much time its answer needs.

Admission refuses a request whose wait would exceed its deadline, and does not start one that can no
longer be answered in time. Both decisions use these estimates.
"""

from collections.abc import Callable

from services.balancer.engines.engine_view import RoutingRequest
from services.balancer.queue.drain_rate import DrainRate
from services.balancer.queue.service_time import ServiceTime

# Share of the mean service time. With less time left, an answer before the deadline is unlikely.
_MIN_SHARE = 0.8
# Share of the time that the request came with. With that much left it has hardly waited.
_UNWAITED_SHARE = 0.9


class WaitEstimate:
    """Measured drain rates and service times, by model.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rates: dict[str, DrainRate] = {}
        self._times: dict[str, ServiceTime] = {}

    def record_answer(self, request: RoutingRequest, seconds: float) -> None:
        """Record a request that was answered completely, `seconds` after its dispatch."""
        times = self._times.setdefault(request.model, ServiceTime())
        times.record_answer(seconds, request.expected_output)

    def record_unfinished(self, request: RoutingRequest, seconds: float) -> None:
        """Record a request that ended without its answer, `seconds` after its dispatch."""
        times = self._times.setdefault(request.model, ServiceTime())
        times.record_unfinished(seconds, request.expected_output)

    def record_end(self, model: str) -> None:
        """Record that a request of the model has ended, with or without an answer."""
        if model not in self._rates:
            self._rates[model] = DrainRate(self._clock)
        self._rates[model].record_end()

    def ended_per_s(self, model: str) -> float:
        """Requests of the model that end per second; 0 before the first."""
        return self._rates[model].per_s() if model in self._rates else 0.0

    def answer_in_s(
        self, request: RoutingRequest, *, ahead: int, slots: int, allowed_s: float
    ) -> float:
        """Estimated seconds until the request is answered; 0 while nothing was measured.

        Idle engines have measured a low drain rate although they could do more. The rate is
        therefore at least what their slots allow: slots / service time (Little's law).

        Args:
            ahead: requests that are served before this one.
            slots: slots of the engines that may serve it.
            allowed_s: seconds until the request's deadline when it arrived.
        """
        mean_s = self._mean_s(request)
        if not mean_s:
            return 0.0
        rate = max(self.ended_per_s(request.model), slots / mean_s)
        needed_s = max(mean_s, self.needed_s(request, allowed_s))
        return ahead / rate + needed_s if rate else 0.0

    def needed_s(self, request: RoutingRequest, allowed_s: float) -> float:
        """Seconds that must be left before the deadline for the request to be started.

        If requests started with just the mean time left, all those that take longer than the mean
        would be lost. So nearly all must fit (`ServiceTime.upper_bound_s`). The bound is capped by
        the time that the request came with, so that a request with a short deadline that has hardly
        waited is tried.

        Args:
            allowed_s: seconds until the request's deadline when it arrived.
        """
        times = self._times.get(request.model)
        if times is None:
            return 0.0
        likely_s = min(times.upper_bound_s(request.expected_output), _UNWAITED_SHARE * allowed_s)
        return max(_MIN_SHARE * self._mean_s(request), likely_s)

    def _mean_s(self, request: RoutingRequest) -> float:
        times = self._times.get(request.model)
        return 0.0 if times is None else times.mean_s(request.expected_output)
