"""Falls back to another revision of an alias if the chosen one has no engine left."""

import logging
from collections.abc import Awaitable, Callable, Collection

from services.common.errors import FleetError, UnavailableError
from services.gateway.request.admission import AdmittedRequest
from services.gateway.upstream import Upstream

log = logging.getLogger(__name__)


async def open_with_fallback(
    admitted: AdmittedRequest,
    send: Callable[[AdmittedRequest], Awaitable[Upstream]],
    admit_again: Callable[[Collection[tuple[str, str]]], Awaitable[AdmittedRequest]],
) -> tuple[AdmittedRequest, Upstream]:
    """Open the stream at the revision it was admitted for, else at the next one of its alias.

    Used before the first message only: a stream never changes its revision.

    Args:
        send: opens a stream.
        admit_again: admits the request again, avoiding these models and revisions.

    Returns:
        The request as it was accepted, and its stream.

    Raises:
        FleetError: the error of the first attempt, if no other revision can serve the request.
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
            "%s@%s refused a request (%s): trying %s@%s",
            admitted.model.name,
            admitted.model.pinned,
            first.message,
            other.model.name,
            other.model.pinned,
        )
        admitted = other
