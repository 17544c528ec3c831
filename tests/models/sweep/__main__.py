"""``python -m tests.models.sweep --out table.json``: the sweep, or a part of it."""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

from .cases import MAPPINGS, cases
from .run import sweep


def main():
    """Run, print what was found, and write the rows."""
    parser = argparse.ArgumentParser(description="Whether mw.unpad is exact, class by class.")
    parser.add_argument("--out", type=Path, help="where the rows go, as JSON")
    parser.add_argument("--only", action="append", choices=list(MAPPINGS), help="an auto class; may be repeated")
    parser.add_argument("--kind", action="append", help="a model type (bert, llama, ...); may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--verbose", action="store_true", help="also print each check")
    given = parser.parse_args()
    started = time.monotonic()

    def report(row):
        print(
            f"{row['verdict']:10} {row['auto']} {row['kind']} {row['name']} {row.get('reason') or ''}"[:400], flush=True
        )
        if given.verbose:
            for name, each in row["checks"].items():
                print(f"    {name}: {each}")

    rows = sweep(cases(given.only, given.kind), given.jobs, report)
    for mapping in MAPPINGS:
        counts = Counter(row["verdict"] for row in rows if row["auto"] == mapping)
        if counts:
            print(mapping, dict(counts))
    print(f"{len(rows)} classes in {time.monotonic() - started:.0f} s")
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(any(row["verdict"] in {"wrong", "crash"} for row in rows))


if __name__ == "__main__":
    sys.exit(main())
