"""Another revision behind an alias, when the chosen one has no engine left for a new request."""

import logging
from collections.abc import Awaitable, Callable, Collection

from services.common.errors import FleetError, UnavailableError
from services.gateway.balancers import Upstream
from services.gateway.request.admission import Admitted

log = logging.getLogger(__name__)


async def open_somewhere(
    admitted: Admitted,
    send: Callable[[Admitted], Awaitable[Upstream]],
    admit_again: Callable[[Collection[tuple[str, str]]], Awaitable[Admitted]],
) -> tuple[Admitted, Upstream]:
    """Open the stream at the revision it was admitted for, or at the next of its alias.

    Only before the first message: a stream never changes its revision.

    Args:
        send: opens a stream.
        admit_again: admits the request once more, avoiding these revisions.

    Raises:
        FleetError: of the first try, if no other revision can be had.
    """
    avoid: set[tuple[str, str]] = set()
    first: UnavailableError | None = None
    while True:
        try:
            return admitted, await send(admitted)
        except UnavailableError as error:
            first = first or error
        if not admitted.model.pinned:
            raise first
        avoid.add((admitted.model.name, admitted.model.pinned))
        try:
            other = await admit_again(avoid)
        except FleetError:
            raise first from None
        if (other.model.name, other.model.pinned) in avoid:
            raise first
        log.warning(
            "%s@%s takes no request (%s): trying %s@%s",
            admitted.model.name,
            admitted.model.pinned,
            first.message,
            other.model.name,
            other.model.pinned,
        )
        admitted = other
