"""Print the parity table: model, path, largest error of a logit, tokens equal.

    python -m tests.parity [NAME ...]

Takes a second or two per model. Ends with status 1 if a model misses its limit.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.parity.cases import CASES, Case
from tests.parity.measure import LOGIT_PATHS, TOKEN_PATHS, Row, measure


def main() -> None:
    """Measure the cases and print a Markdown table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases; all if none is given")
    names = parser.parse_args().names
    unknown = set(names) - {case.name for case in CASES}
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    errors = " | ".join(f"{path}: largest error" for path in LOGIT_PATHS)
    print(f"| model | reference | {errors} | greedy tokens equal |")
    print("|---|---|" + "---|" * len(LOGIT_PATHS) + "---|")
    missed = False
    for case in CASES:
        if not names or case.name in names:
            with tempfile.TemporaryDirectory() as folder:
                rows = list(measure(case, case.write(Path(folder) / case.name)))
            print(_line(case, rows), flush=True)
            missed |= any(not row.tokens_equal or (row.error or 0) > case.limit for row in rows)
    sys.exit(1 if missed else 0)


def _line(case: Case, rows: list[Row]) -> str:
    errors = [f"{row.error:.1e}" for row in rows if row.error is not None]
    unequal = [row.path for row in rows if not row.tokens_equal]
    equal = f"not {', '.join(unequal)}" if unequal else f"in all {len(rows)} ways"
    assert len(rows) == len(LOGIT_PATHS) + len(TOKEN_PATHS)
    return f"| {case.name} | {case.reference} | {' | '.join(errors)} | {equal} |"


if __name__ == "__main__":
    main()
