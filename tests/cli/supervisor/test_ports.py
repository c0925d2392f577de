"""Ports: the requested one or the next free one, and random free ones."""

import socket

import pytest

from inferfleet_cli.errors import CliError
from inferfleet_cli.supervisor import ports


def test_a_taken_port_gives_the_next_free_one():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        got = ports.next_free(taken)
        assert taken < got < taken + ports.TRIES
        assert ports.is_free(got)


def test_a_port_that_is_promised_to_another_is_avoided():
    first = ports.take(1)[0]
    assert ports.next_free(first, avoid={first}) > first


def test_taken_ports_differ_and_stay_out_of_the_range_of_outgoing_connections():
    got = ports.take(20)
    assert len(set(got)) == 20
    assert all(port in ports.INTERNAL for port in got)


def test_no_free_port_is_an_error(monkeypatch):
    monkeypatch.setattr(ports, "is_free", lambda *_: False)
    with pytest.raises(CliError, match="no free port between 50051 and 50150"):
        ports.next_free(50051)
