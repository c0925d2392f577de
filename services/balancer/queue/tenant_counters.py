"""Counts the tokens served to each tenant, so that the least served one can be next."""

from collections.abc import Mapping


class TenantCounters:
    """Weighted tokens served to each tenant; the queues of all models share it.

    Only tenants with waiting or running requests are kept, so memory follows the load. A tenant
    that returns after a pause starts level with the least served one: idleness earns no credit.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._active: dict[str, int] = {}
        self._floor = 0.0

    def enter(self, tenant: str) -> None:
        """Count one more waiting or running request of the tenant."""
        if tenant not in self._active:
            if self._served:
                self._floor = max(self._floor, min(self._served.values()))
            self._active[tenant] = 0
            self._served[tenant] = self._floor
        self._active[tenant] += 1

    def leave(self, tenant: str) -> None:
        """Count the end of one of the tenant's requests."""
        self._active[tenant] -= 1
        if not self._active[tenant]:
            del self._active[tenant]
            served = self._served.pop(tenant)
            if not self._served:
                self._floor = max(self._floor, served)

    def charge(self, tenant: str, weighted_tokens: float) -> None:
        """Add served tokens; ignored for a tenant without requests."""
        if tenant in self._served:
            self._served[tenant] += weighted_tokens

    def served(self, tenant: str) -> float:
        """The tenant's counter, to be compared with those of other tenants."""
        return self._served.get(tenant, self._floor)

    @property
    def active(self) -> Mapping[str, int]:
        """Waiting and running requests by tenant."""
        return self._active
