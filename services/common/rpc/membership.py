"""How the members of a fleet authenticate to one another, connect and listen."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from services.common.config.service_config import ServiceConfig
from services.common.config.settings import ConfigError, read_secret
from services.common.rpc.fresh_channel import FreshChannel
from services.common.rpc.metadata import TOKEN_KEY
from services.common.rpc.proof import Peer
from services.common.rpc.tls_files import Pems, TlsFiles

MAX_RECEIVE_BYTES = 16 * 1024 * 1024
STREAM_OPTIONS: list[tuple[str, Any]] = [
    # Flow-control window of a stream. Kept small, so that a slow reader holds its producer back,
    # which then joins events into fewer, longer messages. A message longer than this still passes.
    ("grpc.http2.lookahead_bytes", 2048),
    ("grpc.http2.bdp_probe", 0),
]
# For a call that carries many streams, each with a window of its own.
_CARRIER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.http2.lookahead_bytes", 256 * 1024),
    ("grpc.http2.bdp_probe", 0),
]
_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    ("grpc.max_send_message_length", MAX_RECEIVE_BYTES),
    # A silent peer is given up after 11 + 8 s. The ping timeout decides; its default is a minute.
    # Servers of the version before refuse more than one ping in 10 s.
    ("grpc.keepalive_time_ms", 11_000),
    ("grpc.keepalive_timeout_ms", 8_000),
    ("grpc.http2.ping_timeout_ms", 8_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # A peer that restarted on the same address is reached again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
_TLS_KEYS = ("tls_ca_file", "tls_cert_file", "tls_key_file")


@dataclass(frozen=True)
class Membership:
    """What members of the fleet authenticate with: a token, mutual TLS, both, or neither."""

    token: str | None = None
    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = None
    files: TlsFiles | None = None
    """The files of `ca`, `cert` and `key`; new connections use their newest content."""
    trust_unproven: bool = False
    """Whether peers that know no proofs get the token."""

    @classmethod
    def from_config(cls, config: ServiceConfig) -> "Membership":
        """Read the files named in the configuration.

        Raises:
            ConfigError: a file cannot be used, or only a part of the TLS keys is set.
        """
        paths = {name: getattr(config, name) for name in _TLS_KEYS}
        missing = [name for name, path in paths.items() if not path]
        if missing and len(missing) < len(_TLS_KEYS):
            raise ConfigError(f"{missing[0]}: needed, because other tls_*_file keys are set")
        token = None
        if config.fleet_token_file:
            token = read_secret(config.fleet_token_file, "fleet_token_file")
        if missing:
            return cls(token=token, trust_unproven=config.trust_unproven)
        for name in _TLS_KEYS:
            _check_readable(paths[name], name)
        try:
            files = TlsFiles(*(paths[name] for name in _TLS_KEYS))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"tls_cert_file: {paths['tls_cert_file']} with its tls_key_file and tls_ca_file is "
                f"no certificate in PEM: {error}"
            ) from error
        _, pems = files.newest()
        return cls(token=token, ca=pems.ca, cert=pems.cert, key=pems.key, files=files)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The token itself. `peer` says what a call may show instead."""
        return ((TOKEN_KEY, self.token),) if self.token else ()

    @property
    def shown_unasked(self) -> tuple[tuple[str, str], ...] | None:
        """What calls show to a peer that was not asked for a proof; None: it must be asked.

        With TLS the peer's certificate has proven it.
        """
        return None if self.token and self.ca is None else self.metadata

    def peer(self, channel: grpc.aio.Channel, address: str, *, registered: bool) -> Peer:
        """What calls over `channel` may show; see `Peer`."""
        return Peer(self, channel, address, registered=registered)

    @property
    def version(self) -> int:
        """Version of the certificates; grows when their files change. 0 without TLS."""
        return self.files.newest()[0] if self.files is not None else 0

    def channel(self, address: str, *, carries_many: bool = False) -> grpc.aio.Channel:
        """Make a channel to another member; it connects on first use and reconnects by itself.

        Args:
            carries_many: whether one stream of a call holds those of many requests.
        """
        options = (_CARRIER_OPTIONS if carries_many else STREAM_OPTIONS) + _CHANNEL_OPTIONS
        if self.ca is None:
            return grpc.aio.insecure_channel(address, options=options)
        if self.files is not None:
            return FreshChannel(address, self.files, options)
        credentials = grpc.ssl_channel_credentials(self.ca, self.key, self.cert)
        return grpc.aio.secure_channel(address, credentials, options=options)

    def bind(self, server: grpc.aio.Server, address: str, *, members_only: bool = True) -> int:
        """Let a server listen on host:port (port 0: a free one); returns the port.

        Args:
            members_only: with TLS, demand a certificate of the caller as well.

        Raises:
            ConfigError: the port is taken or not allowed.
        """
        try:
            if self.ca is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, self._server_credentials(members_only))
        except RuntimeError as error:
            raise ConfigError(f"port: cannot listen on {address}: {error}") from error
        if port == 0:
            raise ConfigError(f"port: cannot listen on {address}")
        return port

    def _server_credentials(self, members_only: bool) -> grpc.ServerCredentials:
        """Credentials that follow replaced files."""
        used, files = 1, self.files

        def configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration(
                [(pems.key or b"", pems.cert or b"")],
                root_certificates=pems.ca if members_only else None,
            )

        def newer() -> grpc.ServerCertificateConfiguration | None:
            """Called by a thread of gRPC's before each handshake; None: nothing has changed."""
            nonlocal used
            if files is None:
                return None
            version, pems = files.newest()
            if version == used:
                return None
            used = version
            return configuration(pems)

        first = Pems(self.ca, self.cert, self.key)
        if files is not None:
            used, first = files.newest()
        fetch: Any = newer  # the stub's type does not allow None; gRPC does
        return grpc.dynamic_ssl_server_credentials(
            configuration(first), fetch, require_client_authentication=members_only
        )


def _check_readable(path: str, key: str) -> None:
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from error
