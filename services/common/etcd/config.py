"""The configuration keys for etcd, and the connection made from them."""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.config.settings import ConfigError, read_secret, setting
from services.common.etcd.client import DEFAULT_TIMEOUT_S, Etcd, Tls, parse_endpoint
from services.common.rpc.tls_files import TlsFiles

_CA, _CERT, _KEY = "etcd_tls_ca_file", "etcd_tls_cert_file", "etcd_tls_key_file"


def _bad_endpoints(endpoints: Sequence[str]) -> str | None:
    try:
        for endpoint in endpoints:
            parse_endpoint(endpoint)
    except ValueError as error:
        return str(error)
    return None


def endpoints_setting(help: str) -> Any:
    """The key `etcd`; `help` states what the service uses it for."""
    return setting((), help, check=_bad_endpoints)


@dataclass(frozen=True)
class EtcdKeys:
    """Keys of every service that uses etcd."""

    etcd: tuple[str, ...] = endpoints_setting(
        "host:port of etcd's members, separated by commas; https://host:port for TLS"
    )
    etcd_tls_ca_file: str = setting(
        "", "CA of etcd's certificate, turns TLS on; empty: with https:// the system's"
    )
    etcd_tls_cert_file: str = setting("", "client certificate for etcd, if it asks for one")
    etcd_tls_key_file: str = setting("", "key of etcd_tls_cert_file")
    etcd_user: str = setting("", "user of etcd's own authentication; empty: none")
    etcd_password_file: str = setting("", "file with the password of etcd_user")


def connect(config: EtcdKeys, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Etcd:
    """Make the connection that the keys describe; reads their files and sends nothing yet.

    Raises:
        ConfigError: an endpoint is not host:port, a file cannot be used, or a key is missing.
    """
    problem = "needed" if not config.etcd else _bad_endpoints(config.etcd)
    if problem is not None:
        raise ConfigError(f"etcd: {problem}")
    _require_both(config, _CERT, _KEY)
    _require_both(config, "etcd_user", "etcd_password_file")
    password = ""
    if config.etcd_user:
        password = read_secret(config.etcd_password_file, "etcd_password_file")
    tls = _tls(config)
    return Etcd(
        config.etcd,
        tls=tls,
        user=config.etcd_user,
        password=password,
        timeout_s=timeout_s,
        files=TlsFiles(*(getattr(config, name) for name in (_CA, _CERT, _KEY))) if tls else None,
    )


def _require_both(config: EtcdKeys, *names: str) -> None:
    given = [name for name in names if getattr(config, name)]
    if len(given) == 1:
        missing = next(name for name in names if name not in given)
        raise ConfigError(f"{missing}: needed, because {given[0]} is set")


def _tls(config: EtcdKeys) -> Tls | None:
    given = [name for name in (_CA, _CERT) if getattr(config, name)]
    if not given:
        return None
    plain = [endpoint for endpoint in config.etcd if endpoint.startswith("http://")]
    if plain:
        raise ConfigError(f"etcd: {plain[0]!r} is without TLS, but {given[0]} is set")
    ca, cert, key = (_read(config, name) for name in (_CA, _CERT, _KEY))
    _check_files(config)
    return Tls(ca, cert, key)


def _read(config: EtcdKeys, name: str) -> bytes | None:
    path = getattr(config, name)
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path}: {error.strerror}") from error


def _check_files(config: EtcdKeys) -> None:
    """Refuse unusable files now; gRPC would only report that etcd does not answer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    name = _CA
    try:
        if config.etcd_tls_ca_file:
            context.load_verify_locations(config.etcd_tls_ca_file)
        name = _CERT
        if config.etcd_tls_cert_file:
            # With an empty password an encrypted key fails here instead of prompting on a terminal.
            pair = (config.etcd_tls_cert_file, config.etcd_tls_key_file)
            context.load_cert_chain(*pair, password="")
    except (OSError, ValueError) as error:
        what = "CA in PEM" if name == _CA else f"pair in PEM with {_KEY}"
        raise ConfigError(f"{name}: {getattr(config, name)} is not a {what}: {error}") from error
