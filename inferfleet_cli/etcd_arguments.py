"""Flags of commands that speak to a fleet's etcd."""

import argparse
from pathlib import Path

_FLAGS = {
    "--etcd-tls-ca-file": "CA of etcd's certificate; with https:// the system's",
    "--etcd-tls-cert-file": "client certificate, if etcd asks for one",
    "--etcd-tls-key-file": "key of that certificate",
    "--etcd-user": "user of etcd's own authentication",
    "--etcd-password-file": "file with that user's password",
}


def add_etcd_arguments(parser: argparse.ArgumentParser) -> None:
    """Where etcd is, how to be let in, and the local fleet that is meant otherwise."""
    parser.add_argument(
        "--etcd",
        default="",
        metavar="HOST:PORT,...",
        help="etcd of the fleet; default: of the local fleet in --state-dir",
    )
    for flag, text in _FLAGS.items():
        parser.add_argument(flag, default="", metavar=flag.rpartition("-")[2].upper(), help=text)
    parser.add_argument("--state-dir", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
