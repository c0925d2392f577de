"""Three etcd members with TLS between themselves and to their clients, and which of them leads."""

import ssl
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from etcd3 import etcdrpc

from inferfleet_cli.supervisor.dev_backends import Binary, EtcdProcess, find_etcd, free_port
from tests.chaos.certificates import Certificates, write_certificates

_LIMIT_S = 60.0


class Member(EtcdProcess):
    """One member; all of them know the whole cluster from the start."""

    def __init__(
        self, name: str, binary: Binary, directory: Path, peers: dict[str, int], files: Certificates
    ) -> None:
        super().__init__(binary, directory, free_port(), ())
        self.name = name
        self._peers = peers
        self._files = files
        self._fixed_port = True

    def leads(self) -> bool:
        """Whether this member says that it is the leader; False if it does not answer."""
        files = self._files
        credentials = grpc.ssl_channel_credentials(
            files.ca.read_bytes(), files.key.read_bytes(), files.cert.read_bytes()
        )
        with grpc.secure_channel(self.address, credentials) as channel:
            try:
                status = etcdrpc.MaintenanceStub(channel).Status(
                    etcdrpc.StatusRequest(), timeout=2.0
                )
            except grpc.RpcError:
                return False
        return bool(status.leader == status.header.member_id)

    def _arguments(self) -> list[str]:
        files, client = self._files, f"https://{self.address}"
        peer = f"https://127.0.0.1:{self._peers[self.name]}"
        cluster = ",".join(f"{n}=https://127.0.0.1:{port}" for n, port in self._peers.items())
        options = {
            "name": self.name,
            "data-dir": str(self.directory / "data"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": cluster,
            "initial-cluster-token": "chaos",
            "logger": "zap",
        }
        for prefix in ("", "peer-"):
            options |= {
                f"{prefix}cert-file": str(files.cert),
                f"{prefix}key-file": str(files.key),
                f"{prefix}trusted-ca-file": str(files.ca),
                f"{prefix}client-cert-auth": "true",
            }
        return [f"--{key}={value}" for key, value in options.items()]

    def _answers(self) -> bool:
        context = ssl.create_default_context(cafile=str(self._files.ca))
        context.load_cert_chain(self._files.cert, self._files.key)
        url = f"https://{self.address}/health"
        try:
            with urllib.request.urlopen(url, timeout=1.0, context=context) as reply:
                return b'"true"' in reply.read()
        except OSError:
            return False


class EtcdCluster:
    """Three members; blocking, each member in a thread of its own that lives as long as it."""

    def __init__(self, directory: Path, size: int = 3) -> None:
        self.files = write_certificates(directory / "certificates")
        names = [f"etcd-{number}" for number in range(1, size + 1)]
        peers = {name: free_port() for name in names}
        binary = find_etcd()
        self.members = [Member(name, binary, directory / name, peers, self.files) for name in names]
        self._threads = {m.name: ThreadPoolExecutor(1, m.name) for m in self.members}

    def start(self) -> None:
        """Return when all members answer: none does before most of them are there."""
        starts = [self._threads[m.name].submit(m.launch, _LIMIT_S) for m in self.members]
        for one in starts:
            one.result()

    def restart(self, member: Member) -> None:
        """Start a killed member again, with its data."""
        self._threads[member.name].submit(member.launch, _LIMIT_S).result()

    def leader(self) -> Member | None:
        """The member that leads now."""
        return next((member for member in self.members if member.leads()), None)

    def stop(self) -> None:
        """End all members."""
        for member in self.members:
            member.kill()
        for thread in self._threads.values():
            thread.shutdown()

    @property
    def keys(self) -> dict[str, str]:
        """The configuration keys of a service that uses the cluster."""
        return {
            "etcd": ",".join(f"https://{member.address}" for member in self.members),
            "etcd_tls_ca_file": str(self.files.ca),
            "etcd_tls_cert_file": str(self.files.cert),
            "etcd_tls_key_file": str(self.files.key),
        }
