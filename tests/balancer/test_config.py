"""The names of the balancer: in the registry, and in what it says on its command line."""

import socket
import subprocess
import sys

from services.balancer.config import BalancerConfig, balancer_id_of


def test_a_name_is_made_that_other_machines_and_ports_do_not_have(monkeypatch):
    config = BalancerConfig(host="0.0.0.0")
    names = set()
    for machine in ("node-1", "node-2"):
        monkeypatch.setattr(socket, "gethostname", lambda machine=machine: machine)
        names |= {balancer_id_of(config, port) for port in (50052, 50053)}
    assert len(names) == 4
    assert "balancer-node-1-50052" in names


def test_a_name_is_one_part_of_a_key(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "a/b c")
    assert balancer_id_of(BalancerConfig(), 1) == "balancer-a-b-c-1"


def test_a_configured_name_is_kept():
    assert balancer_id_of(BalancerConfig(balancer_id="b1"), 50052) == "b1"


def test_an_error_names_the_program_as_it_is_started():
    command = [sys.executable, "-m", "services.balancer", "--etcd", "x:1", "--policy", "nonsense"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert ended.returncode == 2
    assert ended.stderr.startswith("python -m services.balancer: policy:")
