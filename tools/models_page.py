"""The page docs/supported-models.md, made from the committed table.

``python -m tools.models_page docs/supported-models.md`` writes it; a test fails when it is stale.
"""

import sys
from pathlib import Path

import transformers

from tests.models.sweep.table import BAD, read

VERDICTS = ("exact", "padded", "refused", "not built")
INTRODUCTION = f"""# Supported models

*Made by `make models-page`; the tests fail when it is stale.*

Every class of transformers {transformers.__version__} that reads text and that an auto class lists, built small, with
random weights in float64, and run padded and unpadded: right padding, left padding and holes, every output, the loss,
the gradient of every parameter; unpadded before its weights were loaded, and on the meta device; pickled and loaded in
another process; repadded, bit for bit. `make test-models` runs all of it and fails where this page is stale.

- **exact**: all of that is equal at kept positions, to rounding.
- **padded**: `mw.unpad` accepts the class, and the calls of the sweep run padded, for the reason given.
- **refused**: `mw.unpad` raises `UnsupportedModelError` with the reason given.
- **not built**: the sweep cannot build the class small, or cannot call it from text; untested.
"""


def page(lines=None):
    """The text of the page."""
    lines = list(read().values()) if lines is None else lines
    mappings = list(dict.fromkeys(line["auto"] for line in lines))
    parts = [INTRODUCTION, _counts(lines, mappings)]
    for mapping in mappings:
        listed = [line for line in lines if line["auto"] == mapping]
        parts += [f"## {mapping}\n", *_section(listed)]
    return "\n".join(parts)


def _counts(lines, mappings):
    # The last ones are to be nowhere; while they are, the page shows them.
    verdicts = [*VERDICTS, *sorted({line["verdict"] for line in lines} & BAD)]
    rows = ["| auto class | " + " | ".join(verdicts) + " |", "|---" * (len(verdicts) + 1) + "|"]
    for mapping in mappings:
        found = [line["verdict"] for line in lines if line["auto"] == mapping]
        rows.append(
            f"| [{mapping}](#{mapping.lower().replace(' ', '-')}) | "
            + " | ".join(str(found.count(v)) for v in verdicts)
            + " |"
        )
    return "\n".join(rows) + "\n"


def _section(listed):
    exact = [line for line in listed if line["verdict"] == "exact"]
    if exact:
        yield f"**Exact**: {_names(exact)}\n"
        notes = {}
        for line in exact:
            for call, reason in line.get("padded", {}).items():
                notes.setdefault((call, reason), []).append(line)
        if notes:
            yield "Of these, some calls run padded:\n"
            yield (
                "\n".join(f"- {_call(call)}, {reason}: {_names(found)}" for (call, reason), found in notes.items())
                + "\n"
            )
    for verdict in (*VERDICTS[1:], *sorted(BAD)):
        reasons = {}
        for line in listed:
            if line["verdict"] == verdict:
                reasons.setdefault(line["reason"], []).append(line)
        if reasons:
            yield f"**{verdict.capitalize()}**:\n"
            yield "\n".join(f"- {_escaped(reason)}: {_names(found)}" for reason, found in reasons.items()) + "\n"


def _call(name):
    return {"plain": "a call without options", "holes": "holes"}.get(name, f"{name} padding")


def _names(lines):
    return ", ".join(f"`{name}`" for name in dict.fromkeys(line["name"] for line in lines))


def _escaped(text):
    return text.replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[").replace("_", "\\_")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
