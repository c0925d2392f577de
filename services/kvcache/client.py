"""redis-py's client, and a short way past it for the one call that every request waits for.

Per command the client costs about as much as Redis itself needs for a thousand keys: a lock, a
condition, a task for each time limit, events that nobody hears. `Client.ask` sends ready-made bytes
over the pool's own connections (their URL, TLS, user, reconnection) and reads the replies.
"""

import asyncio
from typing import Any

import redis.asyncio as aioredis
from redis.asyncio.connection import ConnectionPool

_MAX_ASKING = 64


class Client(aioredis.Redis):
    """A client of one server. `drop` or `aclose` it."""

    def __init__(self, pool: ConnectionPool) -> None:
        super().__init__(connection_pool=pool)
        self._idle: list[Any] = []
        self._room = asyncio.Semaphore(_MAX_ASKING)
        self._asked_pool: Any = pool

    async def ask(self, packed: bytes, replies: int) -> list[Any]:
        """Send commands and read so many replies. Unbounded in time: the caller has the limit.

        Raises:
            RedisError, OSError: an error reply, or the connection broke; it is not used again.
        """
        async with self._room:
            connection = self._idle.pop() if self._idle else self._asked_pool.make_connection()
            try:
                # Connects, and connects again what the server has closed meanwhile.
                await self._asked_pool.ensure_connection(connection)
                connection.socket_timeout = None
                await connection.send_packed_command(packed, check_health=False)
                answers = [await connection.read_response() for _ in range(replies)]
            except BaseException:
                # What is still to come would be read as the answer to something else.
                await connection.disconnect(nowait=True)
                raise
            self._idle.append(connection)
            return answers

    async def drop(self) -> None:
        """Close the connections; the client may be used again."""
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.disconnect(nowait=True)
        await self.connection_pool.disconnect()


def pack(*words: bytes) -> bytes:
    """One command as Redis reads it."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        parts += (b"$%d\r\n" % len(word), word, b"\r\n")
    return b"".join(parts)
