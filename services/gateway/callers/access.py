"""The way in for callers: who they are; in the audit log, also those who are not let in."""

from services.common.errors import UnauthenticatedError
from services.gateway.callers.keys_file import Identity
from services.gateway.callers.records.audit import Audit
from services.gateway.callers.tenants import Tenants


class Access:
    """What both faces ask about a caller."""

    def __init__(self, tenants: Tenants, audit: Audit) -> None:
        self._tenants = tenants
        self._audit = audit

    def identify(self, authorization: str | None, *, method: str, peer: str) -> Identity:
        """Who calls, by the `authorization` header or metadata value.

        Raises:
            UnauthenticatedError: a key is needed and this is none, or nobody's.
        """
        try:
            return self._tenants.identify(authorization)
        except UnauthenticatedError as error:
            self._audit.refused(method, None, peer, error)
            raise

    def enter(self, authorization: str | None, *, method: str, peer: str) -> Identity:
        """`identify` for calls that have no more to pass than this.

        Raises:
            UnauthenticatedError: as there.
        """
        who = self.identify(authorization, method=method, peer=peer)
        self.entered(who, method=method, peer=peer)
        return who

    def entered(self, who: Identity, *, method: str, peer: str) -> None:
        """Note that a caller who was identified has passed."""
        self._audit.allowed(method, who, peer)
