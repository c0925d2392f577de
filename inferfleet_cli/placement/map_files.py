"""Reads and writes the JSON files of `placement`: maps and loads."""

import re
import sys
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from inferfleet_cli.errors import REJECTED, CliError, to_json
from services.engine.contract.runner import ExpertShape
from services.engine.eplb.packing import Ints
from services.engine.eplb.placement_map import PlacementMap, Table, count_copies

T = TypeVar("T")
_TABLE_ROW = re.compile(r"\[\s*([\d,\s]+?)\s*\]")


class MapFile(msgspec.Struct):
    """A map in a file. Only `phy2log` is required; the engines supply what is missing."""

    phy2log: Table
    model_revision: str | None = None
    num_ranks: int | None = None
    policy: str = "manual"
    window_rounds: int = 0
    load: Table = ()
    balance_before: float | None = None
    balance_after: float | None = None


class _Wrapped(msgspec.Struct):
    map: MapFile


class _LoadFile(msgspec.Struct):
    load: Table


def read_map(path: str) -> MapFile:
    """Read a map file for `set`; "-" is standard input.

    Raises:
        CliError: the file cannot be read, or it is not a map.
    """
    parsed = _parse(path, dict[str, object])
    if isinstance(parsed.get("map"), dict):
        return _convert(path, parsed, _Wrapped).map
    return _convert(path, parsed, MapFile)


def read_load(path: str) -> Ints:
    """Read a file of loads: tokens by [layer, expert].

    Raises:
        CliError: the file cannot be read, or it is not a rectangular table.
    """
    parsed = _parse(path, object)
    if isinstance(parsed, dict):
        table = _convert(path, parsed, _LoadFile).load
    else:
        table = _convert(path, parsed, Table)
    if not table or not table[0] or len({len(row) for row in table}) != 1:
        raise CliError(f"{path}: all layers must have the same number of experts, at least one")
    return np.array(table, np.int64)


def to_draft(
    file: MapFile, shape: ExpertShape, *, model: str, model_revision: str, **origin: object
) -> PlacementMap:
    """The file's map, completed for these engines; `origin` has author and created_unix_ms."""
    fits = len(file.load) == shape.num_layers and all(
        len(row) == shape.num_experts for row in file.load
    )
    load = {"load": file.load, "window_rounds": file.window_rounds} if fits else {}
    return msgspec.convert(
        {
            "version": 0,
            "model": model,
            "model_revision": file.model_revision or model_revision,
            "num_ranks": file.num_ranks or shape.num_ranks,
            "phy2log": file.phy2log,
            "copies": count_copies(file.phy2log, shape.num_experts),
            "policy": file.policy or "manual",
            "balance_before": file.balance_before,
            "balance_after": file.balance_after,
            **load,
            **origin,
        },
        PlacementMap,
    )


def maps_json(value: object) -> str:
    """Format maps as JSON, with each row of a table on one line."""
    text = to_json(msgspec.to_builtins(value))
    return _TABLE_ROW.sub(lambda row: "[" + " ".join(row[1].split()) + "]", text)


def _parse(path: str, kind: type[T]) -> T:
    try:
        raw = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
        return msgspec.json.decode(raw, type=kind)
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"cannot read {path}: {error}") from error
    except msgspec.DecodeError as error:
        raise CliError(f"{path}: {error}", REJECTED) from error


def _convert(path: str, value: object, kind: type[T]) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise CliError(f"{path}: {error}", REJECTED) from error
