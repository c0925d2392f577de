"""Authenticates callers of both faces and records the decision in the audit log and the metrics."""

from services.common.errors import UnauthenticatedError
from services.gateway.callers.keys_file import Identity
from services.gateway.callers.records.audit import Audit
from services.gateway.callers.tenants import Tenants
from services.gateway.metrics import GatewayMetrics


class Access:
    """Identifies callers; refused callers are recorded as well."""

    def __init__(self, tenants: Tenants, audit: Audit, metrics: GatewayMetrics) -> None:
        self._tenants = tenants
        self._audit = audit
        self._refused = metrics.unauthenticated

    def identify(self, authorization: str | None, *, face: str, method: str, peer: str) -> Identity:
        """The caller's identity.

        Args:
            authorization: the header or metadata value.
            face: "http" or "grpc", for the metrics.

        Raises:
            UnauthenticatedError: a key is required, and this is missing or not valid.
        """
        try:
            return self._tenants.identify(authorization)
        except UnauthenticatedError as error:
            self._refused.labels(face, error.reason).inc()
            self._audit.record_refused(method, None, peer, error)
            raise

    def enter(self, authorization: str | None, *, face: str, method: str, peer: str) -> Identity:
        """Identify a caller of a method that needs no further check, and record the entry.

        Raises:
            UnauthenticatedError: as `identify`.
        """
        who = self.identify(authorization, face=face, method=method, peer=peer)
        self.record_entry(who, method=method, peer=peer)
        return who

    def record_entry(self, who: Identity, *, method: str, peer: str) -> None:
        """Record that an identified caller was let in."""
        self._audit.record_allowed(method, who, peer)
