"""The committed table: one line for each class, without what may differ from machine to machine.

``python -m tests.models.sweep.table a.json b.json`` makes it from the outputs of several runs, each of some classes.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path

from .batch import PADDINGS
from .cases import MAPPINGS

TABLE = Path(__file__).with_name("table.json")
BAD = {"wrong", "crash", "silent"}
"""What must be nowhere: a wrong number, an error that is not a refusal, a padded run without a warning."""
FLOOR = {
    "AutoModel": 169,
    "AutoModelForCausalLM": 83,
    "AutoModelForSequenceClassification": 66,
    "AutoModelForMaskedLM": 23,
}
"""How many classes must be exact when padded on the right: what version 0.1.0 served."""


def entry(row):
    """The line of a row: its verdict, and where it is exact the paddings and calls that run padded, with the reason."""
    line = {name: row[name] for name in ("auto", "kind", "name", "verdict")}
    if row["verdict"] != "exact":
        line["reason"] = steady(row["reason"])
    checks = {name: row["checks"].get(name, {}) for name in (*PADDINGS, "unlabelled", "plain")}
    padded = {name: steady(each["reason"]) for name, each in checks.items() if each.get("verdict") == "padded"}
    if row["verdict"] in {"exact", "padded", "silent"} and padded:
        line["padded"] = padded
    return line


def steady(reason):
    """A reason without sizes of differences and without lines of code, which change with machines and versions."""
    reason = re.sub(r",? by \S+ of (the|its) largest( value| gradient)?", "", reason)
    return re.sub(r" \[('.*?')?\]", "", reason)


def read():
    """The committed lines, by class."""
    return {key(line): line for line in json.loads(TABLE.read_text(encoding="utf-8"))}


def write(rows):
    """Write these rows: one line each, so that a change shows as what it is."""
    order = list(MAPPINGS)
    ordered = sorted(rows, key=lambda row: (order.index(row["auto"]), row["kind"], row["name"]))
    lines = [json.dumps(entry(row), ensure_ascii=False) for row in ordered]
    TABLE.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def key(line):
    """What names a class in the table."""
    return line["auto"], line["kind"], line["name"]


def differences(rows, *, whole=False):
    """What is not as committed, and what must never be: a line each. The whole sweep has every class of the table."""
    committed = read()
    missing = committed.keys() - {key(row) for row in rows} if whole else ()
    found = [f"{' '.join(each)}: in the table, and not found" for each in sorted(missing)]
    for row in rows:
        line, before = entry(row), committed.get(key(row))
        if line["verdict"] in BAD:
            found.append(f"{' '.join(key(row))}: {line['verdict']}, {row['reason']}")
        elif line != before:
            found.append(f"{' '.join(key(row))}: {_shown(line)}, and the table says {_shown(before)}")
    return found


def _shown(line):
    return (
        "nothing" if line is None else json.dumps({n: v for n, v in line.items() if n not in {"auto", "kind", "name"}})
    )


def exact_on_the_right(lines):
    """How many classes of each mapping are exact, and packed, when padded on the right."""
    return Counter(
        x["auto"] for x in lines if x["verdict"] in {"exact", "silent"} and "right" not in x.get("padded", {})
    )


def sample(share):
    """Every so many classes of the table, of each mapping and each verdict, by name: the same on every run."""
    groups = {}
    for line in sorted(read().values(), key=key):
        if line["verdict"] != "not built":
            groups.setdefault((line["auto"], line["verdict"]), []).append(line)
    return [key(line) for group in groups.values() for line in group[share // 2 :: share]]


if __name__ == "__main__":
    write([row for path in sys.argv[1:] for row in json.loads(Path(path).read_text(encoding="utf-8"))])
