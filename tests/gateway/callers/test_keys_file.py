"""The file of keys and limits: its meaning, and errors that name the line."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.callers.keys_file import Identity, Limits, parse_keys

ONE, TWO = (hashlib.sha256(key).hexdigest() for key in (b"k1", b"k2"))


def test_limits_of_tenants_keys_and_everybody_else():
    keys = parse_keys(
        f"acme sha256:{ONE} id=laptop concurrency=2\n"
        "# later lines count for earlier ones\n"
        "acme limits requests_per_min=600 tokens_per_min=1000\n"
        "*    limits requests_per_min=60\n"
        f"beta sha256:{TWO.upper()}\n"
    )
    acme = Limits(requests_per_min=600, tokens_per_min=1000)
    assert keys[ONE] == Identity("acme", "laptop", acme, Limits(concurrency=2))
    assert keys[TWO] == Identity("beta", TWO[:8], Limits(requests_per_min=60), Limits())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("acme", "neither"),
        (f"acme sha256:{ONE} rpm=4", "'rpm=4'"),
        (f"acme sha256:{ONE} concurrency", "'concurrency'"),
        (f"acme sha256:{ONE} concurrency=0", "concurrency=0"),
        (f"acme sha256:{ONE} concurrency=-1", "concurrency=-1"),
        (f"acme sha256:{ONE} concurrency=1.5", "concurrency=1.5"),
        (f"acme sha256:{ONE} concurrency=²", "concurrency=²"),
        (f"acme sha256:{ONE} concurrency=1 concurrency=2", "once each"),
        (f"acme sha256:{ONE} id=a/b", "id=a/b"),
        (f"* sha256:{ONE}", "stands for all tenants"),
        ("acme limits id=x", "id="),
        (f"acme sha256:{ONE} id=x\nacme sha256:{TWO} id=x", "a second key x"),
        (f"acme sha256:{ONE}\nbeta sha256:{ONE.upper()}", "the key of line 1"),
        (f"acme sha256:{ONE} id=x\nacme sha256:{ONE} id=y", "the key of line 1"),
        ("acme limits concurrency=1\nacme limits concurrency=2", "second time"),
    ],
)
def test_a_bad_line_is_named_with_its_problem(line, words):
    with pytest.raises(ValueError, match=rf"^line {line.count(chr(10)) + 1} ") as caught:
        parse_keys(line)
    assert words in str(caught.value)


@given(st.text(alphabet=f"a*# \n=:{ONE[:4]}limitsd56concurrency1", max_size=120))
def test_any_text_is_keys_or_a_named_line(text):
    problem = ""
    try:
        parse_keys(text)
    except ValueError as error:
        problem = str(error)
    assert not problem or problem.startswith("line ")
