"""Configuration of a service: one set of keys for flags, environment and file.

A service declares one frozen dataclass whose fields are made with `setting(...)`. `load` reads, in
rising priority, the default, a TOML or JSON file (`--config`), the environment
(`INFERFLEET_<KEY>`) and the flags (`--<key>`). It checks every value and records its source. This
is the only module that reads os.environ. A secret is never a value: its key ends in `_file` and
names a file.
"""

import argparse
import dataclasses
import json
import os
import re
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from services.common.config.near_miss import meant, misspelt

ENV_PREFIX = "INFERFLEET_"
NO_KEYS = ("config", "models", "venv")
"""Variables with the prefix that are not keys of a service."""
C = TypeVar("C")


class ConfigError(ValueError):
    """A value that cannot be used; the message names the key and the source of the value."""


class Loaded(NamedTuple, Generic[C]):
    """A checked configuration, and the source of each value by key."""

    config: C
    sources: Mapping[str, str]


def setting(
    default: Any,
    help: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[str] = (),
    check: Callable[[Any], str | None] | None = None,
    written: bool = False,
) -> Any:
    """Declare one key.

    Args:
        default: the value if no source sets one; a tuple for a list of strings.
        help: one sentence for --help.
        unit: unit of a number, for --help.
        low, high: inclusive bounds of a number.
        choices: the allowed strings.
        check: returns the problem of a value, or None.
        written: for a `*_file` key: the service writes the file instead of reading it.
    """
    return dataclasses.field(
        default=default,
        metadata={
            "help": help,
            "unit": unit,
            "low": low,
            "high": high,
            "choices": tuple(choices),
            "check": check,
            "written": written,
        },
    )


def load(
    cls: type[C],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    environ: Mapping[str, str] | None = None,
) -> Loaded[C]:
    """Read and check the configuration of a service.

    It handles --help, --print-config and --check-config itself by exiting. It warns on stderr of a
    variable whose name nearly matches a key; other unknown variables may be for other services.

    Raises:
        ConfigError: a bad or unknown key or value.
        SystemExit: after --help, --print-config and --check-config, and on unknown flags.
    """
    environ = os.environ if environ is None else environ
    args = _parser(cls, prog, description).parse_args(argv)
    for warning in _misspelt_variables(cls, environ):
        print(f"{prog}: {warning}", file=sys.stderr)
    try:
        loaded = resolve(cls, vars(args), environ)
        if args.check_config:
            check_files(loaded.config)
    except ConfigError as error:
        if args.check_config or args.print_config:
            print(f"{prog}: {error}", file=sys.stderr)
            raise SystemExit(2) from error
        raise
    if args.print_config:
        _print(loaded)
        raise SystemExit(0)
    if args.check_config:
        print(f"{prog}: configuration is valid")
        raise SystemExit(0)
    return loaded


def load_or_exit(cls: type[C], argv: Sequence[str], *, prog: str, description: str) -> C:
    """`load` for a main function: one line on stderr and status 2 instead of a traceback."""
    try:
        return load(cls, argv, prog=prog, description=description).config
    except ConfigError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def resolve(
    cls: type[C], flags: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> Loaded[C]:
    """Merge default < file < environment < flag, and check every value.

    Raises:
        ConfigError: a bad value, or an unknown key in the file.
    """
    environ = os.environ if environ is None else environ
    path = flags.get("config") or environ.get(f"{ENV_PREFIX}CONFIG")
    from_file = _read_file(Path(path)) if path else {}
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(from_file) - set(fields))
    if unknown:
        hint = meant(unknown[0], fields)
        raise ConfigError(f"{unknown[0]}: no such key (in {path}){hint}")
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, field in fields.items():
        raw, source = _pick(field, flags, environ, from_file, path)
        values[name] = _checked(name, field, hints[name], raw, source)
        sources[name] = source
    return Loaded(cls(**values), sources)


def check_files(config: Any) -> None:
    """Check that every `*_file` key that is read names an existing file.

    Raises:
        ConfigError: a file does not exist.
    """
    for field in dataclasses.fields(config):
        path = getattr(config, field.name) if field.name.endswith("_file") else ""
        if not path or field.metadata["written"]:
            continue
        if Path(path).is_dir():
            raise ConfigError(f"{field.name}: cannot read {path}: Is a directory")
        if not Path(path).exists():
            raise ConfigError(f"{field.name}: cannot read {path}: No such file or directory")


def environment(key: str) -> str:
    """A variable that is not a service's key, e.g. the folder of models; "" if it is not set."""
    return os.environ.get(f"{ENV_PREFIX}{key}", "")


def read_secret(path: str, key: str) -> str:
    """Read the file of a `*_file` key; returns its content without surrounding white space.

    Raises:
        ConfigError: the file cannot be read or is empty.
    """
    try:
        text = Path(path).read_text().strip()
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from error
    if not text:
        raise ConfigError(f"{key}: {path} is empty")
    return text


def _misspelt_variables(cls: type[Any], environ: Mapping[str, str]) -> list[str]:
    keys = [field.name for field in dataclasses.fields(cls)]
    warnings = []
    for variable in sorted(environ):
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name == variable.lower() or name in keys or name in NO_KEYS:
            continue
        if key := misspelt(name, keys):
            right = f"{ENV_PREFIX}{key.upper()}"
            warnings.append(f"{variable} is not a key of this service; did you mean {right}?")
    return warnings


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, because the usage of so many flags would hide it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists every flag\n")

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        parsed, rest = self.parse_known_args(*args, **kwargs)
        if rest:
            flag = rest[0].partition("=")[0]
            known = [one for action in self._actions for one in action.option_strings]
            self.exit(2, f"{self.prog}: {flag}: no such flag{meant(flag, known)}\n")
        return parsed


def _parser(cls: type[Any], prog: str, description: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        description=description,
        epilog=f"Every key is also {ENV_PREFIX}<KEY> in the environment and <key> in --config.",
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML or JSON file with the same keys")
    parser.add_argument(
        "--print-config", action="store_true", help="print each value and its source, then exit"
    )
    parser.add_argument(
        "--check-config", action="store_true", help="check the configuration, then exit"
    )
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        meta = field.metadata
        parts = [meta["help"]]
        if meta["unit"]:
            parts.append(f"[{meta['unit']}]")
        if meta["choices"]:
            parts.append(f"one of {', '.join(meta['choices'])};")
        parts.append(f"default: {_shown(field.default)}")
        text = " ".join(parts).replace("%", "%%")
        flag = "--" + field.name.replace("_", "-")
        if hints[field.name] is bool:
            _add_switch(parser, field.name, text)
        else:
            parser.add_argument(flag, dest=field.name, metavar="VALUE", default=None, help=text)
    return parser


def _add_switch(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    """--key, --no-key and, so that every key can be given as key=value, --key=true."""
    flag = name.replace("_", "-")
    parser.add_argument(
        f"--{flag}",
        dest=name,
        nargs="?",
        const=True,
        default=None,
        metavar="true|false",
        help=f"{text}; --no-{flag} is false",
    )
    parser.add_argument(
        f"--no-{flag}", dest=name, action="store_const", const=False, help=argparse.SUPPRESS
    )


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"config: cannot read {path}: {error.strerror}") from error
    try:
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"config: {path}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"config: {path}: expected a table of keys")
    return data


def _pick(
    field: "dataclasses.Field[Any]",
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    from_file: Mapping[str, Any],
    path: str | None,
) -> tuple[Any, str]:
    name = field.name
    if flags.get(name) is not None:
        return flags[name], "flag --" + name.replace("_", "-")
    variable = ENV_PREFIX + name.upper()
    if variable in environ:
        return environ[variable], f"environment {variable}"
    if name in from_file:
        return from_file[name], f"file {path}"
    return field.default, "default"


def _checked(name: str, field: "dataclasses.Field[Any]", hint: Any, raw: Any, source: str) -> Any:
    if source == "default":
        return raw
    meta = field.metadata
    try:
        value = _convert(hint, raw)
    except (TypeError, ValueError) as error:
        raise ConfigError(redacted(f"{name}: {error} (from {source})")) from error
    problem = _problem(value, meta)
    if problem:
        raise ConfigError(redacted(f"{name}: {problem}, got {raw!r} (from {source})"))
    return value


_USER = re.compile(r"(://[^\s/@:]*:).*@", re.DOTALL)  # to the last @: a password may hold one
_PARAMETER = re.compile(
    r"(?i)([?&;](?:password|passwd|secret|token|api_?key)=)[^&;]*?(?=[&;\s'\"]|$)"
)


def redacted(text: str) -> str:
    """A text for a message or a log line without the passwords of the URLs in it."""
    return _PARAMETER.sub(r"\1***", _USER.sub(r"\1***@", text))


def _problem(value: Any, meta: Mapping[str, Any]) -> str | None:
    low, high, choices, check = meta["low"], meta["high"], meta["choices"], meta["check"]
    if choices and value not in choices:
        return f"must be one of {', '.join(choices)}"
    if value is not None and low is not None and not value >= low:
        return f"must be at least {low:g}"
    if value is not None and high is not None and not value <= high:
        return f"must be at most {high:g}"
    return typing.cast("str | None", check(value)) if check else None


_BOOLS = {"1": True, "true": True, "yes": True, "on": True}
_BOOLS |= {"0": False, "false": False, "no": False, "off": False}


def _convert(hint: Any, raw: Any) -> Any:
    """Convert text, or a native value of a file, to the field's type."""
    if isinstance(hint, types.UnionType):
        if raw is None or raw == "":
            return None
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if hint is bool:
        return raw if isinstance(raw, bool) else _bool(str(raw))
    if hint in (int, float):
        return _number(hint, raw)
    if typing.get_origin(hint) is tuple:
        items = raw.split(",") if isinstance(raw, str) else raw
        return tuple(str(item).strip() for item in items if str(item).strip())
    if not isinstance(raw, str):
        raise ValueError(f"expected text, got {raw!r}")
    return raw


def _bool(raw: str) -> bool:
    if raw.lower() not in _BOOLS:
        raise ValueError(f"expected true or false, got {raw!r}")
    return _BOOLS[raw.lower()]


def _number(hint: type[int] | type[float], raw: Any) -> int | float:
    if isinstance(raw, bool):
        raise ValueError(f"expected a number, got {raw!r}")
    try:
        value = hint(raw)
    except (TypeError, ValueError):
        kind = "a whole number" if hint is int else "a number"
        raise ValueError(f"expected {kind}, got {raw!r}") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError(f"expected a finite number, got {raw!r}")
    return value


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return redacted(",".join(value)) or "none"
    return "none" if value in (None, "") else redacted(str(value))


def _print(loaded: Loaded[Any]) -> None:
    rows = [(n, _shown(getattr(loaded.config, n)), s) for n, s in loaded.sources.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    for name, value, source in rows:
        print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}")
