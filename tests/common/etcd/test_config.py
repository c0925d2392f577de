"""Keys of the connection to etcd: what is refused, and a real etcd with TLS and users."""

import asyncio
import contextlib
import json
import sys
from dataclasses import fields

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from etcd3 import etcdrpc
from opentelemetry.sdk.trace import TracerProvider

from inferfleet_cli.supervisor.dev_backends import free_port
from services.balancer.config import BalancerConfig
from services.common.config.settings import ConfigError, resolve
from services.common.etcd.client import EtcdRefusedError, EtcdUnavailableError
from services.common.etcd.config import EtcdKeys, connect
from services.common.etcd.registry import BALANCERS_PREFIX
from services.common.service.telemetry import Telemetry
from services.engine.front.config import FrontConfig
from services.engine.front.service import EngineService
from services.gateway.config import GatewayConfig
from services.gateway.service import GatewayService

E1 = ("e:2379",)


@pytest.mark.parametrize("config", [GatewayConfig, BalancerConfig, FrontConfig])
def test_every_service_with_a_part_in_etcd_has_the_keys(config):
    names = {field.name for field in fields(EtcdKeys)}
    assert names <= {field.name for field in fields(config)}
    with pytest.raises(ConfigError, match=r"^etcd: 'nowhere' is not host:port"):
        resolve(config, {"etcd": "nowhere"}, {})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"etcd": ()}, "etcd: needed"),
        ({"etcd": ("e:1", "e")}, "etcd: 'e' is not host:port"),
        ({"etcd_tls_cert_file": "{cert}"}, "etcd_tls_key_file: needed, because etcd_tls_cert_file"),
        ({"etcd_tls_key_file": "{key}"}, "etcd_tls_cert_file: needed, because etcd_tls_key_file"),
        ({"etcd_user": "u"}, "etcd_password_file: needed, because etcd_user"),
        ({"etcd_password_file": "{word}"}, "etcd_user: needed, because etcd_password_file"),
        ({"etcd_user": "u", "etcd_password_file": "/none"}, "etcd_password_file: cannot read"),
        ({"etcd_user": "u", "etcd_password_file": "{empty}"}, "etcd_password_file: .* is empty"),
        ({"etcd_tls_ca_file": "/none"}, "etcd_tls_ca_file: cannot read /none: No such file"),
        ({"etcd_tls_ca_file": "{word}"}, "etcd_tls_ca_file: .* is not a CA in PEM"),
        (
            {"etcd_tls_cert_file": "/none", "etcd_tls_key_file": "{key}"},
            "etcd_tls_cert_file: cannot read",
        ),
        (
            {"etcd_tls_cert_file": "{ca}", "etcd_tls_key_file": "{key}"},
            "etcd_tls_cert_file: .* is not a pair in PEM with etcd_tls_key_file",
        ),
        (
            {"etcd_tls_cert_file": "{cert}", "etcd_tls_key_file": "{encrypted}"},
            "etcd_tls_cert_file: .* is not a pair in PEM with etcd_tls_key_file",
        ),
        (
            {"etcd": ("e:1", "http://e:2"), "etcd_tls_ca_file": "{ca}"},
            "etcd: 'http://e:2' is without TLS, but etcd_tls_ca_file is set",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_key(keys, message, certificates, tmp_path):
    files = {name: tmp_path / name for name in ("word", "empty", "encrypted")}
    files["word"].write_text("secret\n")
    files["empty"].write_text("\n")
    key = serialization.load_pem_private_key(certificates.key.read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"word")
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    files["encrypted"].write_bytes(key.private_bytes(pem, pkcs8, locked))
    files |= certificates._asdict()
    filled = {
        name: value.format_map(files) if isinstance(value, str) else value
        for name, value in keys.items()
    }
    with pytest.raises(ConfigError, match=f"^{message}"):
        connect(EtcdKeys(**{"etcd": E1, **filled}))


async def test_services_refuse_before_they_load_anything():
    keys = {"etcd": E1, "etcd_user": "u"}
    with pytest.raises(ConfigError, match="etcd_password_file: needed"):
        await GatewayService(GatewayConfig(**keys), Telemetry(TracerProvider())).start()
    with pytest.raises(ConfigError, match="etcd_password_file: needed"):
        EngineService(FrontConfig(**keys), telemetry=None)


@pytest.fixture
def secured(start_etcd, certificates, tmp_path):
    """Keys for an etcd that asks for a certificate, and lets `fleet` use /inferfleet/ only."""
    port, tls_port = free_port(), free_port()
    secure = f"https://127.0.0.1:{tls_port}"
    start_etcd(
        port=port,
        extra=[
            f"--listen-client-urls=http://127.0.0.1:{port},{secure}",
            f"--cert-file={certificates.cert}",
            f"--key-file={certificates.key}",
            f"--trusted-ca-file={certificates.ca}",
            "--client-cert-auth",
        ],
    )
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        auth = etcdrpc.AuthStub(channel)
        auth.RoleAdd(etcdrpc.AuthRoleAddRequest(name="fleet"))
        space = {"permType": "READWRITE", "key": b"/inferfleet/", "range_end": b"/inferfleet0"}
        auth.RoleGrantPermission(etcdrpc.AuthRoleGrantPermissionRequest(name="fleet", perm=space))
        for user, role in (("root", "root"), ("fleet", "fleet")):
            auth.UserAdd(etcdrpc.AuthUserAddRequest(name=user, password=f"{user} word"))
            auth.UserGrantRole(etcdrpc.AuthUserGrantRoleRequest(user=user, role=role))
        auth.AuthEnable(etcdrpc.AuthEnableRequest())
    password = tmp_path / "password"
    password.write_text("fleet word\n")
    return {
        "etcd": f"127.0.0.1:{tls_port}",
        "etcd_tls_ca_file": str(certificates.ca),
        "etcd_tls_cert_file": str(certificates.cert),
        "etcd_tls_key_file": str(certificates.key),
        "etcd_user": "fleet",
        "etcd_password_file": str(password),
    }


def keys_of(values):
    return resolve(EtcdKeys, {}, {f"INFERFLEET_{k.upper()}": v for k, v in values.items()}).config


@pytest.mark.services
async def test_tls_and_the_user_let_in_and_nothing_less_does(secured):
    etcd = connect(keys_of(secured))
    await etcd.put("/inferfleet/a", b"1")
    with pytest.raises(EtcdRefusedError, match="permission denied"):
        await etcd.put("/other", b"1")
    await etcd.close()
    without_user = {**secured, "etcd_user": "", "etcd_password_file": ""}
    without_cert = {**secured, "etcd_tls_cert_file": "", "etcd_tls_key_file": ""}
    for less, refusal in (
        (without_user, EtcdRefusedError),
        (without_cert, EtcdUnavailableError),
        ({"etcd": secured["etcd"]}, EtcdUnavailableError),
    ):
        etcd = connect(keys_of(less), timeout_s=1.0)
        with pytest.raises(refusal):
            await etcd.get("/inferfleet/a")
        await etcd.close()


async def appeared(read, process):
    async with asyncio.timeout(40):
        while (found := await read()) is None:
            assert process.returncode is None, "the service ended"
            await asyncio.sleep(0.05)
        return found


@pytest.mark.services
async def test_a_balancer_registers_over_tls_as_its_user(secured, tmp_path):
    ready = tmp_path / "ready.json"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in secured.items()]
    command = [sys.executable, "-m", "services.balancer", "--balancer-id=b1"]
    process = await asyncio.create_subprocess_exec(*command, f"--ready-file={ready}", *flags)
    etcd = connect(keys_of(secured))
    try:
        entry = await appeared(lambda: etcd.get(f"{BALANCERS_PREFIX}b1"), process)
        assert json.loads(entry.value)["address"] == json.loads(ready.read_text())["address"]
        process.terminate()
        async with asyncio.timeout(20):
            assert await process.wait() == 0
        assert await etcd.get(f"{BALANCERS_PREFIX}b1") is None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await etcd.close()
