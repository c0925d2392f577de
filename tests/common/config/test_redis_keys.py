"""The URL of a Redis for small things: what no client would make sense of is refused."""

import pytest

from services.common.config.redis_keys import RedisKeys
from services.common.config.settings import ConfigError, resolve


@pytest.mark.parametrize(
    "url",
    [
        "",
        "redis://a",
        "redis://u@a:1/0",
        "rediss://a/12/",
        "redis://[::1]:7/3",
        "unix:///run/a,b.sock?db=2",
    ],
)
def test_one_url_is_taken(url):
    assert resolve(RedisKeys, {"redis": url}, {}).config.redis == url


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://a:1,redis://b:2", "one URL is needed"),
        ("redis://a:1/0, rediss://b:2/0", "one URL is needed"),
        ("redis://a:1,b:2/0", "one URL is needed"),
        ("redis+sentinel://s:5/main", "one URL is needed"),
        ("redis://a:99999/0", "a port from 1 to 65535"),
        ("redis://a:x/0", "a port from 1 to 65535"),
        ("redis://a:0/0", "a port from 1 to 65535"),
        ("redis://a/x", "number of a database"),
        ("redis://a/-1", "number of a database"),
        ("unix:///run/x.sock?db=x", "number of a database"),
        ("redis://[::1/0", "IPv6"),
        ("http://a", "expected redis://"),
    ],
)
def test_others_are_refused_with_the_reason(url, why):
    with pytest.raises(ConfigError, match=f"redis: .*{why}"):
        resolve(RedisKeys, {"redis": url}, {})
