"""Redis over TLS whose certificates may be replaced: every new connection reads the files again."""

from collections.abc import Mapping
from typing import Any

from redis.asyncio.connection import ConnectionPool, SSLConnection


class FreshSslConnection(SSLConnection):
    """Files that do not fit together yet fail this one connection; the next try reads them anew."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context.context = None
        return super()._connection_arguments()


def read_files_anew(pool: ConnectionPool) -> None:
    """Make the connections of a pool do so, if they are TLS at all."""
    if issubclass(pool.connection_class, SSLConnection):
        pool.connection_class = FreshSslConnection
