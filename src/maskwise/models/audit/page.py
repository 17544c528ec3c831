"""An audit as a page that needs nothing else: findings, the batch with its padding, modules as bars of their time."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from torch import Tensor

from maskwise.models.audit.waste import CAUSES, Cost
from maskwise.plan.measure import in_words

if TYPE_CHECKING:
    from maskwise.models.audit.report import Audit

__all__ = ["fragment", "page"]

#: A batch with more rows or positions is drawn in part, or coarser.
ROWS, COLUMNS = 48, 256
COLORS = {"padding": "--pad", "attention": "--att", "labels": "--lab", "weights": "--wei", "activations": "--act"}

_STYLE = """
.mw { --fg: #1c2430; --soft: #5b6675; --bg: #ffffff; --card: #f4f6f9; --line: #d9dee6; --use: #2f8f5b; --pad: #d9822b;
  --att: #b5489a; --lab: #8b5cf6; --wei: #c0392b; --act: #94a3b8; --bad: #b42318; --warn: #9a6700; --good: #1a7f4b;
  color: var(--fg); background: var(--bg); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
@media (prefers-color-scheme: dark) { .mw { --fg: #e6ebf2; --soft: #9aa7b8; --bg: #12161c; --card: #1b222b;
  --line: #303a47; --use: #3fb27a; --pad: #e6a04f; --att: #d46dbb; --lab: #a78bfa; --wei: #e5695c; --act: #64748b;
  --bad: #ff8f84; --warn: #e3b341; --good: #56d08e; } }
.mw * { box-sizing: border-box; }
.mw main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
.mw h1 { font-size: 24px; margin: 0 0 4px; } .mw h2 { font-size: 17px; margin: 34px 0 10px; }
.mw .soft, .mw .note { color: var(--soft); } .mw code { font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; }
.mw .cards { display: flex; flex-wrap: wrap; gap: 12px; margin-top: 18px; }
.mw .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 10px 16px;
  flex: 1 1 150px; } .mw .card b { display: block; font-size: 20px; }
.mw details { background: var(--card); border: 1px solid var(--line); border-left: 4px solid var(--warn);
  border-radius: 8px; margin: 8px 0; padding: 8px 14px; } .mw details.bad { border-left-color: var(--bad); }
.mw summary { cursor: pointer; font-weight: 600; } .mw dl { display: grid; grid-template-columns: max-content 1fr;
  gap: 4px 12px;
  margin: 10px 0 4px; } .mw dt { color: var(--soft); } .mw dd { margin: 0; overflow-wrap: anywhere; }
.mw .tag { font-size: 12px; text-transform: uppercase; letter-spacing: .04em; margin-right: 8px; color: var(--warn); }
.mw .bad .tag { color: var(--bad); } .mw .ok { color: var(--good); font-weight: 600; }
.mw .scroll { overflow-x: auto; } .mw table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
.mw th { text-align: left; border-bottom: 2px solid var(--line); padding: 5px 8px; cursor: pointer;
  white-space: nowrap; }
.mw th[aria-sort]::after { content: " ↓"; } .mw th[aria-sort=ascending]::after { content: " ↑"; }
.mw td { border-bottom: 1px solid var(--line); padding: 3px 8px; white-space: nowrap; }
  .mw td.n, .mw th.n { text-align: right; }
.mw .bar { display: inline-flex; height: 12px; border-radius: 3px; overflow: hidden; vertical-align: middle;
  min-width: 1px; }
.mw .bar i { display: block; height: 100%; } .mw .path { max-width: 420px; overflow: hidden;
  text-overflow: ellipsis; }
.mw .legend span { margin-right: 16px; white-space: nowrap; } .mw .legend i { display: inline-block;
  width: 11px; height: 11px;
  border-radius: 3px; margin-right: 6px; } .mw svg { display: block; width: 100%; border-radius: 6px; }
.mw .route { display: flex; flex-wrap: wrap; gap: 6px; } .mw .route code { background: var(--bg);
  border: 1px solid var(--line);
  border-radius: 6px; padding: 1px 7px; } .mw .route code:first-child { border-color: var(--bad); color: var(--bad); }
@media (max-width: 560px) { .mw dl { grid-template-columns: 1fr; gap: 0; } .mw dd { margin-bottom: 6px; } }
"""
_SCRIPT = """
for (const table of document.querySelectorAll('.mw table.sort')) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach(head => head.addEventListener('keydown', event => event.key === 'Enter' && head.click()));
  heads.forEach((head, index) => head.addEventListener('click', () => {
    const down = head.getAttribute('aria-sort') !== 'descending';
    heads.forEach(each => each.removeAttribute('aria-sort'));
    head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    const value = row => row.cells[index].dataset.v ?? row.cells[index].textContent;
    const rows = [...body.rows].sort((a, b) => {
      const x = value(a), y = value(b), n = Number(y) - Number(x);
      return (Number.isNaN(n) ? String(y).localeCompare(String(x)) : n) * (down ? 1 : -1);
    });
    body.append(...rows);
  }));
}
"""


def page(audit: Audit) -> str:
    """The whole page, with its style and script."""
    title = f"audit of {escape(audit.model)}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{title}</title>'
        f"<style>body {{ margin: 0; }}</style></head><body>{fragment(audit)}<script>{_SCRIPT}</script></body></html>"
    )


def fragment(audit: Audit) -> str:
    """What a notebook shows: the page without its script."""
    parts = [_head(audit), _findings(audit), _batch(audit), _modules(audit)]
    if audit.notes:
        parts.append("".join(f'<p class="note">Note: {escape(note)}.</p>' for note in audit.notes))
    return f'<style>{_STYLE}</style><div class="mw"><main>{"".join(parts)}</main></div>'


def _head(audit: Audit) -> str:
    leaks = sum(not leak.only_nan for leak in audit.leaks)
    cards = [
        ("leaks", str(leaks) if audit.masks else "not tested"),
        ("time wasted", f"{audit.wasted:.0%}"),
        ("forward pass", in_words(audit.profile.seconds)),
    ]
    if audit.masks:
        cards.append(("tokens per second", f"{audit.tokens_per_second:,.0f}"))
        cards.append(("of them useful", f"{audit.useful_tokens_per_second:,.0f}"))
    if audit.denominator is not None:
        loss = "the same" if audit.denominator.invariant else f"off by {audit.denominator.error:.1%}"
        cards.append(("loss of splits", loss))
    body = "".join(f'<div class="card"><b>{escape(value)}</b>{escape(name)}</div>' for name, value in cards)
    verdict = '<span class="ok">No finding.</span>' if audit.ok else "Findings are listed worst first."
    return f'<h1>{escape(audit.model)}</h1><p class="soft">{verdict}</p><div class="cards">{body}</div>'


def _findings(audit: Audit) -> str:
    found = list(audit.findings())
    if not found:
        return ""
    parts = ["<h2>Findings</h2>"]
    for style, line, details in found:
        tag, _, text = line.strip().partition(" ")
        rows = []
        for detail in details:
            name, _, value = detail.partition(": ")
            if name == "path":
                steps = "".join(f"<code>{escape(each)}</code>" for each in value.split(" > "))
                rows.append(f'<dt>path</dt><dd class="route">{steps}</dd>')
                continue
            code = name in ("repair", "rewrite", "fix")
            shown = f"<code>{escape(value)}</code>" if code else escape(value)
            rows.append(f"<dt>{escape(name)}</dt><dd>{shown}</dd>")
        css = "bad" if style == "bad" else "warn"
        parts.append(
            f'<details class="{css}" open><summary><span class="tag">{tag}</span>{escape(text.strip())}</summary>'
            f"<dl>{''.join(rows)}</dl></details>"
        )
    return "".join(parts)


# -- the batch ---------------------------------------------------------------------------------------------------------
def _batch(audit: Audit) -> str:
    parts = []
    for source, keep in audit.masks:
        kept = float(keep.float().mean())
        parts.append(f"<h2>The batch: {kept:.0%} kept by <code>{escape(source)}</code></h2>{_drawing(keep)}")
        more = keep.shape[0] - ROWS
        if more > 0:
            parts.append(f'<p class="note">{more} more rows are not drawn.</p>')
    return "".join(parts)


def _drawing(keep: Tensor) -> str:
    """One line for each row, with a rectangle for each run of kept positions."""
    rows = keep[:ROWS].tolist()
    length = keep.shape[1]
    height, unit = 10, COLUMNS / max(length, 1)
    shapes = []
    for index, row in enumerate(rows):
        start = None
        for place, kept in enumerate([*row, False]):
            if kept and start is None:
                start = place
            elif not kept and start is not None:
                x, width = start * unit, (place - start) * unit
                place_of = f'x="{x:.2f}" y="{index * height}" width="{width:.2f}" height="{height - 2}"'
                shapes.append(f'<rect {place_of} fill="var(--use)"/>')
                start = None
    size = f"0 0 {COLUMNS} {len(rows) * height}"
    return (
        f'<svg viewBox="{size}" preserveAspectRatio="none" height="{min(len(rows) * 12, 360)}" role="img" '
        f'aria-label="kept positions of the batch">'
        f'<rect width="100%" height="100%" fill="var(--pad)" opacity="0.35"/>{"".join(shapes)}</svg>'
    )


# -- the modules -------------------------------------------------------------------------------------------------------
def _modules(audit: Audit) -> str:
    costs = audit.profile.modules
    if not costs:
        return ""
    longest = max(each.seconds for each in costs) or 1.0
    inside = _inside(costs)
    body = "".join(_row(each, inside[each.path], longest) for each in costs)
    heads = (
        ("module", ""), ("class", ""), ("time, useful and wasted", ""), ("time", "n"), ("own time", "n"),
        ("useful", "n"), ("FLOPs", "n"), ("bytes", "n"), ("calls", "n"),
    )  # fmt: skip
    row = "".join(f'<th class="{css}" scope="col" tabindex="0">{name}</th>' for name, css in heads)
    causes = {cause for each in costs for cause in each.wasted}
    colors = [("--use", "useful"), *((COLORS[cause], CAUSES[cause]) for cause in CAUSES if cause in causes)]
    legend = "".join(f'<span><i style="background: var({color})"></i>{text}</span>' for color, text in colors)
    return (
        f'<h2>Modules</h2><p class="legend soft">{legend}</p><div class="scroll"><table class="sort">'
        f"<thead><tr>{row}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _inside(costs: tuple[Cost, ...]) -> dict[str, dict[str, float]]:
    """Of each module the seconds by cause, the modules in it included."""
    found: dict[str, dict[str, float]] = {each.path: {} for each in costs}
    for each in costs:
        own = {"useful": each.own_seconds * each.useful}
        own |= {cause: each.own_seconds * share for cause, share in each.wasted.items() if cause != "activations"}
        names = each.path.split(".") if each.path else []
        for depth in range(len(names) + 1):
            above = found.get(".".join(names[:depth]))
            if above is not None:
                for cause, seconds in own.items():
                    above[cause] = above.get(cause, 0.0) + seconds
    return found


def _row(cost: Cost, seconds: dict[str, float], longest: float) -> str:
    total = sum(seconds.values()) or 1.0
    width = 220 * cost.seconds / longest
    pieces = "".join(
        f'<i style="width: {100 * part / total:.2f}%; background: var({COLORS.get(cause, "--use")})" '
        f'title="{escape(cause)} {part / total:.0%}"></i>'
        for cause, part in sorted(seconds.items(), key=lambda item: item[0] != "useful")
    )
    useful = seconds.get("useful", 0.0) / total
    name = escape(cost.path or "the model")
    *above, last = cost.path.split(".")
    # The number of a block says nothing without the name of its list.
    short = escape(f"{above[-1]}.{last}" if last.isdigit() and above else last or "the model")
    indent = 14 * min(cost.depth, 12)
    cells = (
        (in_words(cost.seconds), cost.seconds), (in_words(cost.own_seconds), cost.own_seconds),
        (f"{useful:.0%}", useful), (_short(cost.flops), cost.flops), (_short(cost.bytes), cost.bytes),
        (str(cost.calls), cost.calls),
    )  # fmt: skip
    numbers = "".join(f'<td class="n" data-v="{value}">{escape(text)}</td>' for text, value in cells)
    return (
        f'<tr><td class="path" data-v="{name}" title="{name}" style="padding-left: {8 + indent}px">{short}</td>'
        f"<td>{escape(cost.kind)}</td>"
        f'<td data-v="{cost.seconds}"><span class="bar" style="width: {width:.1f}px">{pieces}</span></td>{numbers}</tr>'
    )


def _short(number: float) -> str:
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number:.0f}"
