"""API keys: known by their hashes, reloaded when the file changes."""

import asyncio
import contextlib
import hashlib
import logging

import pytest

from services.common.config.settings import ConfigError
from services.common.errors import UnauthenticatedError
from services.gateway.callers.tenants import Tenants


def line(tenant, key):
    return f"{tenant} sha256:{hashlib.sha256(key.encode()).hexdigest()}\n"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# valid keys\n\n" + line("acme", "k1") + line("acme", "k2"))
    return path


def test_without_a_file_all_are_anonymous():
    assert Tenants("").identify(None).tenant == ""
    assert Tenants("").identify("Bearer anything").tenant == ""


def test_keys_name_tenants(path):
    tenants = Tenants(str(path))
    assert tenants.identify("Bearer k1").tenant == tenants.identify("bearer  k2").tenant == "acme"


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        (None, "MISSING_API_KEY"),
        ("", "MISSING_API_KEY"),
        ("Basic k1", "MISSING_API_KEY"),
        ("Bearer ", "MISSING_API_KEY"),
        ("Bearer k3", "INVALID_API_KEY"),
        ("Bearer ключ", "INVALID_API_KEY"),
    ],
)
def test_other_keys_are_refused(path, shown, reason):
    with pytest.raises(UnauthenticatedError) as caught:
        Tenants(str(path)).identify(shown)
    assert caught.value.reason == reason


def test_changes_are_loaded_and_errors_keep_the_last_valid_keys(path):
    clock = Clock()
    tenants = Tenants(str(path), clock)
    path.write_text(line("beta", "k3"))
    clock.now += 2
    assert tenants.identify("Bearer k3").tenant == "beta"
    with pytest.raises(UnauthenticatedError):
        tenants.identify("Bearer k1")
    path.write_text("half a li")
    clock.now += 2
    assert tenants.identify("Bearer k3").tenant == "beta"
    path.unlink()
    clock.now += 2
    assert tenants.identify("Bearer k3").tenant == "beta"


@pytest.mark.parametrize("content", ["acme", "acme md5:12", "a b sha256:" + "0" * 64])
def test_a_bad_line_is_named_at_start(path, content):
    path.write_text("# first\n" + content)
    with pytest.raises(ConfigError, match=r"api_keys_file: .* line 2"):
        Tenants(str(path))


def test_a_missing_file_is_named_at_start(tmp_path):
    with pytest.raises(ConfigError, match="api_keys_file"):
        Tenants(str(tmp_path / "none"))


@pytest.mark.parametrize("content", ["", "\n", "# being written", "acme limits concurrency=1\n"])
def test_a_file_without_a_key_keeps_the_last_good_and_is_refused_at_start(path, content, caplog):
    clock = Clock()
    tenants = Tenants(str(path), clock)
    path.write_text(content)
    clock.now += 2
    with caplog.at_level(logging.WARNING, logger="services.gateway.callers.tenants"):
        assert tenants.identify("Bearer k1").tenant == "acme"
    assert "has no key" in caplog.text
    with pytest.raises(ConfigError, match=r"api_keys_file: .* has no key"):
        Tenants(str(path))


async def test_changes_are_reported_without_any_request(path, monkeypatch):
    monkeypatch.setattr("services.gateway.callers.tenants.CHECK_FILE_EVERY_S", 0.01)
    reloads: asyncio.Queue[tuple[bool, str]] = asyncio.Queue()
    tenants = Tenants(str(path), on_reload=lambda *reload: reloads.put_nowait(reload))
    following = asyncio.create_task(tenants.follow())
    async with asyncio.timeout(20):
        path.with_name("new").write_text(line("beta", "k3"))
        path.with_name("new").rename(path)
        assert await reloads.get() == (True, "1 keys")
        path.unlink()
        usable, description = await reloads.get()
        assert (usable, "cannot read" in description) == (False, True)
        path.with_name("new").write_text(line("beta", "k4"))
        path.with_name("new").rename(path)
        # A file that stays away is reported once.
        assert await reloads.get() == (True, "1 keys")
    following.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await following
    assert tenants.identify("Bearer k4").tenant == "beta"
