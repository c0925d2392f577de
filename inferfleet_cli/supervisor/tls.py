"""The TLS files of a local fleet, and the channels of commands that use them."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from inferfleet_cli.errors import CliError
from inferfleet_cli.supervisor.options import REPOSITORY, Options


@dataclass(frozen=True)
class ClientTls:
    """How a command connects: unencrypted, or with TLS and what it shows."""

    used: bool = False
    ca_file: str = ""
    """CA that signed the server's certificate; empty: the system's."""
    cert_file: str = ""
    """Certificate that the command shows; empty: none."""
    key_file: str = ""

    def credentials(self) -> grpc.ChannelCredentials | None:
        """The channel's credentials; None for an unencrypted channel.

        Raises:
            CliError: a file cannot be read, or only one of certificate and key is given.
        """
        if not self.used:
            return None
        if bool(self.cert_file) != bool(self.key_file):
            missing = "--key-file" if self.cert_file else "--cert-file"
            raise CliError(f"{missing}: needed, because the other of the pair is given", status=2)
        ca, cert, key = (
            _read(flag, path)
            for flag, path in (
                ("--ca-file", self.ca_file),
                ("--cert-file", self.cert_file),
                ("--key-file", self.key_file),
            )
        )
        return grpc.ssl_channel_credentials(ca, key, cert)

    def to_json(self) -> dict[str, Any]:
        """What fleet.json holds of it: `of_record` is the inverse."""
        files = {"ca_file": self.ca_file, "cert_file": self.cert_file, "key_file": self.key_file}
        return {"used": self.used, **files}

    @classmethod
    def of_record(cls, record: dict[str, Any] | None) -> "ClientTls":
        """That of a running local fleet."""
        return cls(**(record or {}).get("tls", {}))


def gateway_files(options: Options) -> ClientTls:
    """What a command needs for the gateways: they ask for no certificate."""
    return _files_of(options, "gateway", member=False)


def balancer_files(options: Options) -> ClientTls:
    """What the supervisor needs for the balancers: they ask for a member's certificate."""
    return _files_of(options, "balancer", member=True)


def _files_of(options: Options, kind: str, *, member: bool) -> ClientTls:
    from inferfleet_cli.supervisor.preflight import configurations

    with contextlib.chdir(REPOSITORY):  # where the services read their files
        configs = configurations(options)
    config = next(one for name, one in configs.items() if name.partition("-")[0] == kind)
    if not config.tls_ca_file:
        return ClientTls()
    if not member:
        return ClientTls(True, _absolute(config.tls_ca_file))
    files = (config.tls_ca_file, config.tls_cert_file, config.tls_key_file)
    return ClientTls(True, *map(_absolute, files))


def _absolute(path: str) -> str:
    """A path that the services read in the repository, for a command that runs anywhere."""
    return str(REPOSITORY / path)


def _read(flag: str, path: str) -> bytes | None:
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise CliError(f"{flag}: cannot read {path}: {error.strerror}", status=2) from error
