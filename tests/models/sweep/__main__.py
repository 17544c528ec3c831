"""``python -m tests.models.sweep --out table.json``: the sweep, or a part of it."""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

from tools import models_page

from . import table
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
    parser.add_argument("--sample", type=int, help="only every so many classes of the committed table")
    parser.add_argument("--check", action="store_true", help="fail where the committed table says otherwise")
    parser.add_argument("--write", action="store_true", help="commit what was found, as the table and its page")
    given = parser.parse_args()
    started = time.monotonic()

    def report(row):
        print(
            f"{row['verdict']:10} {row['auto']} {row['kind']} {row['name']} {row.get('reason') or ''}"[:400], flush=True
        )
        if given.verbose:
            for name, each in row["checks"].items():
                print(f"    {name}: {each}")

    chosen = cases(given.only, given.kind)
    if given.sample:
        listed = set(table.sample(given.sample))
        chosen = [case for case in chosen if (case.auto, case.kind, case.name) in listed]
    rows = sweep(chosen, given.jobs, report)
    for mapping in MAPPINGS:
        counts = Counter(row["verdict"] for row in rows if row["auto"] == mapping)
        if counts:
            print(mapping, dict(counts))
    print("exact and packed, padded on the right:", dict(Counter(row["auto"] for row in rows if right(row))))
    print(f"{len(rows)} classes in {time.monotonic() - started:.0f} s")
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if given.write:
        table.write(rows)
        Path("docs/supported-models.md").write_text(models_page.page(), encoding="utf-8")
    if given.check:
        found = table.differences(rows, whole=not (given.only or given.kind or given.sample))
        print("\n".join(["", *found, f"{len(found)} classes differ from the table"]))
        return int(bool(found))
    return int(any(row["verdict"] in table.BAD for row in rows))


def right(row):
    """Whether a class is exact where it is padded on the right, whatever else was found."""
    return row["checks"].get("right", {}).get("verdict") == "exact"


if __name__ == "__main__":
    sys.exit(main())
