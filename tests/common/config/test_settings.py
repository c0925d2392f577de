"""Typing errors are named, switches take values, and --check-config finds missing files."""

from dataclasses import dataclass, fields

import pytest

from services.balancer.config import BalancerConfig
from services.common.config.service_config import ServiceConfig
from services.common.config.settings import (
    ConfigError,
    check_files,
    load,
    redacted,
    resolve,
    setting,
)
from services.engine.front.config import FrontConfig
from services.gateway.config import GatewayConfig
from services.kvcache.config import KvCacheConfig

SERVICES = (FrontConfig, GatewayConfig, BalancerConfig, KvCacheConfig)


@dataclass(frozen=True)
class Config(ServiceConfig):
    threads: int = setting(0, "threads of one product", low=0)
    fast: bool = setting(False, "be fast")
    careful: bool = setting(True, "be careful")


def read(*argv, environ=None):
    return load(Config, argv, prog="svc", description="", environ=environ or {}).config


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("INFERFLEET_THRAEDS", "INFERFLEET_THREADS"),
        ("INFERFLEET_THREAD", "INFERFLEET_THREADS"),
        ("INFERFLEET_LOGLEVEL", "INFERFLEET_LOG_LEVEL"),
    ],
)
def test_a_variable_that_is_nearly_a_key_is_named_once(capsys, variable, meant):
    read(environ={variable: "1"})
    assert capsys.readouterr().err == (
        f"svc: {variable} is not a key of this service; did you mean {meant}?\n"
    )


@pytest.mark.parametrize("cls", SERVICES)
def test_what_is_meant_for_another_service_or_for_no_service_is_not_named(cls, capsys):
    names = {field.name for other in SERVICES for field in fields(other)} - {
        field.name for field in fields(cls)
    }
    variables = {f"INFERFLEET_{name.upper()}": "x" for name in (*names, "venv", "models")}
    load(cls, [], prog="svc", description="", environ=variables)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--thraeds=3"], "svc: --thraeds: no such flag; did you mean --threads?\n"),
        (["--thraeds", "3"], "svc: --thraeds: no such flag; did you mean --threads?\n"),
        (["--zzz"], "svc: --zzz: no such flag\n"),
        (
            ["--threads"],
            "svc: argument --threads: expected one argument; --help lists every flag\n",
        ),
    ],
)
def test_a_flag_that_is_none_is_one_line(capsys, argv, message):
    with pytest.raises(SystemExit) as exit:
        read(*argv)
    assert exit.value.code == 2
    assert capsys.readouterr().err == message


def test_an_unknown_key_in_the_file_gets_a_suggestion(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("thread = 1\n")
    with pytest.raises(ConfigError, match=r"^thread: no such key .*did you mean threads\?$"):
        read(f"--config={file}")


SECRETS = [
    "redis://:s3cr-et@h",
    "redis://u:s3cr-et@h:1/0",
    "redis://u:a@b s3cr-et'@h",
    "redis://h:1/0?password=s3cr-et",
    "rediss://a:1,rediss://u:s3cr-et@h:2",
    "http://u:s3cr-et@h",
]


@pytest.mark.parametrize("url", SECRETS)
@pytest.mark.parametrize("cls", [GatewayConfig, KvCacheConfig])
@pytest.mark.parametrize("option", ["--check-config", "--print-config"])
def test_a_password_in_a_url_is_never_repeated(cls, url, option, capsys):
    with pytest.raises(SystemExit):
        load(cls, ["--redis", url, option], prog="svc", description="", environ={})
    output = "".join(capsys.readouterr())
    assert "redis" in output
    assert "s3cr-et" not in output


def test_a_printed_url_has_no_password(capsys):
    argv = ["--otlp-endpoint=http://u:s3cr-et@h:4317", "--print-config"]
    with pytest.raises(SystemExit):
        load(GatewayConfig, argv, prog="svc", description="", environ={})
    output = "".join(capsys.readouterr())
    assert "http://u:***@h:4317" in output
    assert "s3cr-et" not in output


def test_redaction_keeps_what_is_no_secret():
    assert (
        redacted("redis: bad, got 'redis://u:pw@h:1/0'") == "redis: bad, got 'redis://u:***@h:1/0'"
    )
    assert redacted("http://h/x?token=abc&db=1") == "http://h/x?token=***&db=1"
    assert redacted("redis://h/0 is away") == "redis://h/0 is away"


def test_a_switch_is_a_flag_its_opposite_or_a_value():
    config = read("--fast", "--no-careful")
    assert (config.fast, config.careful) == (True, False)
    config = read("--fast=true", "--careful=off")
    assert (config.fast, config.careful) == (True, False)
    assert read("--fast", "--threads", "3").threads == 3
    with pytest.raises(ConfigError, match=r"^fast: expected true or false, got 'much'"):
        read("--fast=much")


def test_check_config_finds_a_missing_file_and_asks_for_none_that_is_written(tmp_path, capsys):
    ready, token = f"--ready-file={tmp_path}/new.json", tmp_path / "token"
    for given, status in ((token, 2), (tmp_path, 2), (None, 0)):
        flags = [f"--fleet-token-file={given}"] if given else []
        with pytest.raises(SystemExit) as exit:
            read("--check-config", ready, *flags)
        assert exit.value.code == status
    err = capsys.readouterr().err.splitlines()
    assert err == [
        f"svc: fleet_token_file: cannot read {token}: No such file or directory",
        f"svc: fleet_token_file: cannot read {tmp_path}: Is a directory",
    ]
    token.write_text("x")
    check_files(resolve(Config, {"fleet_token_file": str(token)}, {}).config)


@pytest.mark.parametrize("text", ["1.5", "9000TiB", "9" * 400 + "TiB", "2GB", "half"])
def test_memory_that_no_engine_can_start_with_is_refused_by_check_config(text, capsys):
    with pytest.raises(SystemExit) as exit:
        load(FrontConfig, ["--check-config", f"--kv-memory={text}"], prog="e", description="")
    assert exit.value.code == 2
    assert capsys.readouterr().err.startswith("e: kv_memory: expected ")
    for good in ("0.9", "1", "2GiB", "1.5GiB", "1073741824"):
        assert resolve(FrontConfig, {"kv_memory": good}, {}).config.kv_memory == good
