"""Whether a Redis server can hold the index."""

import logging
import re
from collections.abc import Mapping
from typing import Any

from redis.exceptions import NoPermissionError

log = logging.getLogger(__name__)

_OLDEST_REDIS = (6, 2)


class ReplicaError(Exception):
    """The server answers and is not a primary."""


async def problem_of(client: Any) -> str | None:
    """Why the client's server cannot hold the index; None if it can.

    Raises:
        ReplicaError: the server is not a primary.
        RedisError, OSError: the server did not answer.
    """
    try:
        info: dict[str, Any] = await client.info()
    except NoPermissionError:
        log.warning("the ACL does not allow INFO: the version and mode of Redis are not checked")
        await require_primary(client)
        return None
    if info.get("role", "master") != "master":
        raise ReplicaError("the only server that answers is a replica")
    return problem_in(info)


async def require_primary(client: Any) -> None:
    """Check that the client's server is a primary, or at least answers if ROLE is not allowed.

    Raises:
        ReplicaError: the server is not a primary.
        RedisError, OSError: the server did not answer.
    """
    try:
        role = (await client.execute_command("ROLE"))[0]
    except NoPermissionError:
        await client.execute_command("PING")
        return
    if role != b"master":
        raise ReplicaError("the server in use became a replica")


def problem_in(info: Mapping[str, Any]) -> str | None:
    """Why a server with this INFO cannot hold the index; None if it can.

    Logs a warning about an eviction policy that costs snapshots.
    """
    # Valkey 9 calls it server_mode.
    mode = info.get("redis_mode") or info.get("server_mode", "standalone")
    if mode == "sentinel":
        return "this is a Sentinel, not a Redis: give redis+sentinel://host:port/primary-name"
    if mode != "standalone":
        return (
            f"this Redis runs in {mode} mode: one Match reads all keys of a prompt at once, and a "
            "Cluster would spread them over nodes; give a single primary"
        )
    version = str(info.get("redis_version", "0"))
    if tuple(int(n) for n in re.findall(r"\d+", version)[:2]) < _OLDEST_REDIS:
        return f"Redis {version} is too old: 6.2 or Valkey is needed"
    policy = str(info.get("maxmemory_policy", ""))
    if policy.startswith("allkeys") and info.get("maxmemory"):
        log.warning(
            "Redis may evict the engines' records (maxmemory-policy %s), and every such eviction "
            "costs a snapshot: use volatile-lru",
            policy,
        )
    return None
