"""The address that a service gives to others."""

import socket

import pytest

from services.common.config.service_config import ServiceConfig
from services.common.config.settings import ConfigError
from services.common.service import advertise
from services.common.service.advertise import advertised_address


def advertised(address="0.0.0.0:5", peers=("127.0.0.1:2379",), **keys):
    return advertised_address(ServiceConfig(**keys), address, peers)


def test_the_configured_address_wins_and_a_real_one_is_used_as_it_is():
    assert advertised(host="0.0.0.0", advertise="me:7") == "me:7"
    assert advertised("10.0.0.1:5", host="10.0.0.1") == "10.0.0.1:5"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
@pytest.mark.parametrize("peer", ["127.0.0.1:2379", "https://127.0.0.1:2379", "localhost:2379"])
def test_a_wildcard_becomes_the_address_towards_the_peer(host, peer):
    assert advertised(host=host, peers=(peer,)) in ("127.0.0.1:5", "[::1]:5")


def test_the_first_peer_that_can_be_reached_decides(monkeypatch):
    real = socket.getaddrinfo

    def resolve(host, *more, **options):
        if host == "nowhere":
            raise socket.gaierror("no such host")
        return real(host, *more, **options)

    monkeypatch.setattr(advertise.socket, "getaddrinfo", resolve)
    assert advertised(host="0.0.0.0", peers=("nowhere:1", "127.0.0.1:1")) == "127.0.0.1:5"
    with pytest.raises(ConfigError, match=r"advertise: needed, because host is '0\.0\.0\.0'"):
        advertised(host="0.0.0.0", peers=("nowhere:1",))


def test_a_service_that_registers_nowhere_keeps_its_listening_address():
    assert advertised(host="0.0.0.0", peers=()) == "0.0.0.0:5"
