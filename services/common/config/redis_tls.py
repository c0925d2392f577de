"""Redis over TLS with replaceable certificates: every new connection reads the files again."""

from collections.abc import Mapping
from typing import Any

from redis.asyncio.connection import ConnectionPool, SSLConnection


class FreshSslConnection(SSLConnection):
    """While the files do not fit together, the connection fails; the next one reads them again."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context.context = None
        return super()._connection_arguments()


def read_files_anew(pool: ConnectionPool) -> None:
    """Make a pool's new connections read their certificates again, if they use TLS."""
    if issubclass(pool.connection_class, SSLConnection):
        pool.connection_class = FreshSslConnection
