"""What becomes of each group of the JSON-Schema test suite: refused, or enforced.

`python -m tests.schema_suite PATH/TO/json`: the folder `json` of the `jsonschema` source
distribution, or a checkout of the suite. An enforced schema is compiled as the engine does it, must
match no instance that the suite calls invalid, and answers drawn under it at random must validate
by the `jsonschema` package. A valid instance that it does not match is counted: what we produce may
be narrower than what a schema allows.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np

from services.engine.contract.sampling_params import Constraint
from services.engine.grammar.schema_plan import plan_schema
from services.engine.grammar.schema_refused import SchemaRefusedError
from services.engine.grammar.structured_output import Built, SOMatcher, SOMatcherBuilder
from services.engine.grammar.wire import Setup

END = 258
MAX_TOKENS = 400
_CLOSING = frozenset(b'"}],:')


@dataclass
class Row:
    """One file of the suite."""

    groups: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    enforced: int = 0
    not_compiled: list[str] = field(default_factory=list)
    matched: int = 0
    narrower: list[str] = field(default_factory=list)
    rejected: int = 0
    wrong: list[str] = field(default_factory=list)
    samples: int = 0
    cut: int = 0


class Suite:
    """Runs groups; owns the compiler."""

    def __init__(self, samples: int, seed: int) -> None:
        self._builder = SOMatcherBuilder(Setup("", 300, [END], 1 << 30), timeout_s=8.0)
        self._samples = samples
        self._random = random.Random(seed)
        self._count = 0

    def close(self) -> None:
        """End the compiler."""
        self._builder.close()

    def run_group(self, group: dict[str, Any], row: Row) -> None:
        """Decide, and try what the decision promises."""
        row.groups += 1
        name, schema = group["description"], group["schema"]
        text = json.dumps(schema)
        try:
            plan_schema(text)
        except SchemaRefusedError as error:
            row.refused[_keyword(error)] += 1
            return
        built = self._compile(text)
        if built.grammar is None:
            row.not_compiled.append(f"{name}: {built.problem}")
            return
        row.enforced += 1
        for case in group["tests"]:
            matches = any(_matches(built, text) for text in _written(case["data"]))
            label = f"{name}: {case['description']}"
            if case["valid"]:
                row.matched += matches
                row.narrower += [] if matches else [label]
            else:
                row.rejected += not matches
                row.wrong += [f"takes {label}"] if matches else []
        self._draw(name, schema, built, row)

    def _draw(self, name: str, schema: Any, built: Built, row: Row) -> None:
        validator = _Validator(schema)
        for _ in range(self._samples):
            answer = self._answer(built)
            if answer is None:
                row.cut += 1
                continue
            row.samples += 1
            problem = _problem(validator, answer)
            if problem:
                row.wrong.append(f"draws {answer!r} for {name}: {problem}")

    def _answer(self, built: Built) -> str | None:
        """A random answer, ever more in a hurry to end; None if it does not."""
        if built.grammar is None:
            return None
        matcher, drawn = built.grammar.matcher(), bytearray()
        for _ in range(MAX_TOKENS):
            if matcher.must_end:
                return drawn.decode()
            ids = _allowed(matcher)
            if END in ids and self._random.random() < 0.5:
                return drawn.decode()
            texts = [i for i in ids if i < 256]
            if not texts:
                return drawn.decode()
            closing = [i for i in texts if i in _CLOSING]
            hurry = closing and self._random.random() < len(drawn) / 60
            token = self._random.choice(closing if hurry else texts)
            if not matcher.accept(token):
                raise RuntimeError(f"the mask allows {token}, the matcher does not")
            drawn.append(token)
        return None

    def _compile(self, text: str) -> Built:
        self._count += 1
        key = str(self._count)
        self._builder.submit(key, Constraint("json_schema", text))
        give_up = time.monotonic() + 600
        while time.monotonic() < give_up:
            for built in self._builder.pump():
                if built.request_key == key:
                    return built
            self._builder.wait(1)
        raise RuntimeError("no answer of the compiler in 600 s")


def _multiple_of(validator: Any, factor: Any, value: Any, schema: Any) -> Iterator[Any]:
    """Exact: the package divides doubles, and takes 0.3 for no multiple of 0.0001."""
    if validator.is_type(value, "number") and Fraction(repr(value)) % Fraction(repr(factor)):
        yield jsonschema.ValidationError(f"{value!r} is not a multiple of {factor!r}")


_Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator, {"multipleOf": _multiple_of}
)


def _keyword(error: SchemaRefusedError) -> str:
    words = [word for word in error.path.split("/") if word and not word.isdigit()]
    return words[-1] if words else error.problem


def _allowed(matcher: SOMatcher) -> list[int]:
    if matcher.mask is None:
        return list(range(256))
    bits = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")
    return [int(i) for i in bits.nonzero()[0]]


def _written(value: Any) -> Iterator[str]:
    """With blanks as a model likes them, and without, as listed values are written."""
    yield json.dumps(value, ensure_ascii=False)
    yield json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _matches(built: Built, text: str) -> bool:
    if built.grammar is None:
        return False
    matcher = built.grammar.matcher()
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(END)


def _problem(validator: Any, answer: str) -> str:
    try:
        value = json.loads(answer)
    except ValueError as error:
        return f"no JSON: {error}"
    errors = [str(error.message) for error in validator.iter_errors(value)]
    return errors[0][:200] if errors else ""


def files_of(root: Path, draft: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Name and groups of each file of a draft; `format` and the optional ones are left out."""
    folder = root / "tests" / draft
    if not folder.is_dir():
        raise SystemExit(f"{folder}: no such folder; give the suite's folder that holds tests/")
    for path in sorted(folder.glob("*.json")):
        yield path.stem, json.loads(path.read_text())


def table(rows: dict[str, Row]) -> Iterator[str]:
    """Markdown, a line a file and the sum."""
    yield (
        "| file | groups | refused at | by the engine | enforced | valid: accepted / not "
        "| invalid | drawn |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for name, row in [*rows.items(), ("all", _sum(rows))]:
        reasons = ", ".join(f"{key} {count}" for key, count in row.refused.most_common())
        refused = f"{row.refused.total()}: {reasons}" if name != "all" else row.refused.total()
        yield (
            f"| {name} | {row.groups} | {refused if row.refused else 0} | "
            f"{len(row.not_compiled)} | {row.enforced} | "
            f"{row.matched} / {len(row.narrower)} | {row.rejected} | {row.samples} |"
        )


def _sum(rows: dict[str, Row]) -> Row:
    total = Row()
    for row in rows.values():
        total.groups += row.groups
        total.refused += row.refused
        total.enforced += row.enforced
        total.not_compiled += row.not_compiled
        total.matched += row.matched
        total.narrower += row.narrower
        total.rejected += row.rejected
        total.samples += row.samples
        total.cut += row.cut
    return total


def main() -> int:
    """Run the suite; 1 if a schema that was taken did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.schema_suite", description=__doc__)
    parser.add_argument("suite", type=Path, help="folder that holds tests/draft2020-12")
    parser.add_argument("--samples", type=int, default=20, help="answers drawn per schema")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="one file, without .json")
    args = parser.parse_args()
    suite, rows = Suite(args.samples, args.seed), {}
    try:
        for name, groups in files_of(args.suite, "draft2020-12"):
            if args.only in ("", name):
                rows[name] = Row()
                for group in groups:
                    suite.run_group(group, rows[name])
    finally:
        suite.close()
    names = ("xgrammar", "llguidance", "jsonschema")
    print(date.today(), *(f"{name} {version(name)}" for name in names), f"seed {args.seed}\n")
    print("\n".join(table(rows)))
    bad = [f"{name}: {what}" for name, row in rows.items() for what in row.wrong]
    refused = [f"{name}: {what}" for name, row in rows.items() for what in row.not_compiled]
    narrower = [f"{name}: {what}" for name, row in rows.items() for what in row.narrower]
    print("\nvalid instances that are not produced:", *narrower, sep="\n- ")
    print(f"\n{_sum(rows).cut} answers were cut at {MAX_TOKENS} tokens")
    print("\nrefused by the engine, without a path:", *refused, sep="\n- ")
    print("\nwrong:", *(bad or ["nothing"]), sep="\n- ")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
