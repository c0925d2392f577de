"""What a service that listens everywhere tells others of itself."""

import socket

import pytest

from services.common.config.service_config import ServiceConfig
from services.common.config.settings import ConfigError
from services.common.service import advertise
from services.common.service.advertise import advertised


def told(address="0.0.0.0:5", peers=("127.0.0.1:2379",), **keys):
    return advertised(ServiceConfig(**keys), address, peers)


def test_what_is_configured_wins_and_a_real_address_is_told_as_it_is():
    assert told(host="0.0.0.0", advertise="me:7") == "me:7"
    assert told("10.0.0.1:5", host="10.0.0.1") == "10.0.0.1:5"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
@pytest.mark.parametrize("peer", ["127.0.0.1:2379", "https://127.0.0.1:2379", "localhost:2379"])
def test_a_wildcard_becomes_the_address_towards_the_peer(host, peer):
    assert told(host=host, peers=(peer,)) in ("127.0.0.1:5", "[::1]:5")


def test_the_first_peer_that_can_be_reached_decides(monkeypatch):
    real = socket.getaddrinfo

    def resolve(host, *more, **options):
        if host == "nowhere":
            raise socket.gaierror("no such host")
        return real(host, *more, **options)

    monkeypatch.setattr(advertise.socket, "getaddrinfo", resolve)
    assert told(host="0.0.0.0", peers=("nowhere:1", "127.0.0.1:1")) == "127.0.0.1:5"
    with pytest.raises(ConfigError, match=r"advertise: needed, because host is '0\.0\.0\.0'"):
        told(host="0.0.0.0", peers=("nowhere:1",))
