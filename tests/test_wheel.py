"""The published wheel: its content, its dependencies, and the client alone in an interpreter."""

import subprocess
import sys
import zipfile
from pathlib import Path

import grpc
import pytest

ROOT = Path(__file__).resolve().parent.parent
SITE_PACKAGES = Path(grpc.__file__).parents[1]
DEPENDENCIES = ("grpc", "google", "typing_extensions.py")
"""What grpcio, protobuf and googleapis-common-protos install, without anything else."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("inferfleet-*.whl")
    return path


@pytest.fixture(scope="module")
def run_with_wheel(wheel, tmp_path_factory):
    """Runs code where only the wheel, its dependencies and the standard library are importable."""
    site = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(site)
    for name in DEPENDENCIES:
        (site / name).symlink_to(SITE_PACKAGES / name)

    def run(code):
        start = f"import sys; sys.path.append({str(site)!r})\n"
        return subprocess.run(
            [sys.executable, "-I", "-S", "-c", start + code], capture_output=True, text=True
        )

    return run


def test_it_holds_client_and_stubs_and_no_script(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names}
    metadata = {name for name in packages if name.endswith(".dist-info")}
    assert packages - metadata == {"inferfleet", "inferfleet_proto"}
    assert not [name for name in names if name.endswith("entry_points.txt")]


def test_it_depends_on_grpc_and_protobuf_only(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        lines = archive.read(metadata).decode().splitlines()
    requirements = [
        line.split(":")[1].strip()
        for line in lines
        if line.startswith("Requires-Dist") and "extra ==" not in line
    ]
    assert sorted(line.split(">")[0].split("<")[0] for line in requirements) == [
        "googleapis-common-protos",
        "grpcio",
        "protobuf",
    ]


def test_the_client_works_with_the_wheel_alone(run_with_wheel):
    code = """
from inferfleet import AsyncClient, Client
from inferfleet.errors import UnavailableError
try:
    Client("127.0.0.1:1", model="m").complete("x")
except UnavailableError:
    print(Client.__module__)
"""
    done = run_with_wheel(code)
    assert (done.stdout.strip(), done.stderr) == ("inferfleet.client", "")


@pytest.mark.parametrize("name", ["LLM", "SamplingParams"])
def test_the_offline_engine_says_what_it_needs(run_with_wheel, name):
    done = run_with_wheel(f"from inferfleet import {name}")
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: {name} runs the engine in this process, and the module 'services' is not "
        "installed: clone the repository and run `pip install -e '.[engine]'` there"
    )
