"""The figures in README.md and in docs/, made from the committed CSV files in benchmarks/results/.

``python -m tools.figures .`` writes them; the tests fail when one is stale.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks import keeping, means
from benchmarks.cases import linear, models
from benchmarks.cases.kept import FAMILY as KEPT
from benchmarks.cases.kept import IDIOM, UNMASKED
from benchmarks.cases.sweep import FAMILY as SWEEP
from benchmarks.report import HEADLINE, geometric_means
from benchmarks.sweeping import Line, Summary
from maskwise.plan.measure import in_words
from tools import recipe_figures
from tools.recipe_figures import runnable

__all__ = ["Row", "files", "headline", "inserted", "page", "read"]

#: The marks between which `make figures` writes.
BEGIN, END = "<!-- figures: {} -->", "<!-- end of figures -->"
MODEL = "unpad MiniLM 64 paragraphs in 256"

CURVE = "sum lengths 4096x4096 dim=-1"
"""The curve of `kept` of which the README gives the times."""
LEAKY = "compile(x*mask)"
"""The idiom that lets NaN through, at its fastest: no peer, because it does less, and shown all the same."""
_PERCENTS = [round(100 * kept) for kept in models.KEPT]
_OVER = " / ".join(map(str, _PERCENTS))
_SHAPES = ["x".join(map(str, shape)) for shape in linear.SHAPES]
#: What the README shows of a file: a title, and the cases of which it gives the ratio. A line of which a case was not
#: run yet is left out as a whole: a range without one of its ends would be a choice.
SHOWN = {
    "models": [
        ("`mw.unpad` of MiniLM, 64 paragraphs as they come, a fifth of the tokens real", [MODEL]),
        ("the same, a training step", [f"{MODEL}, training step"]),
        *(
            (
                f"`mw.unpad` of MiniLM{step}, {_OVER} % of the tokens real",
                [f"unpad MiniLM 40 texts in 256{step} keep={percent}%" for percent in _PERCENTS],
            )
            for step in ("", ", training step")
        ),
        ("`mw.unpad` of MiniLM, one text: no padding", ["unpad MiniLM one text of 128"]),
        ("`mw.unpad` of SentenceTransformer, 512 paragraphs", ["unpad SentenceTransformer.encode 512 paragraphs"]),
        (
            "`mw.unpad` of `nn.TransformerEncoder`, half of the tokens real",
            ["unpad nn.TransformerEncoder 6 x 512, half real, eval"],
        ),
    ],
    "serving": [
        ("embeddings of 96 paragraphs, sorted by length", ["unpad MiniLM embeddings of 96 paragraphs"]),
        ("a cross-encoder on 96 pairs, sorted by length", ["unpad MiniLM cross-encoder, 96 pairs"]),
        ("the encoder of a T5, 48 paragraphs", ["unpad T5 encoder (6 x 512), 48 paragraphs"]),
    ],
    "conv": [
        (
            f"`mw.conv2d`, 3 x 3, 5 / 10 / 25 / 50 % of the 8 x 8 tiles{step}",
            [f"conv2d 3x3 channels_last tiles={percent}%{step and ' forward+backward'}" for percent in (5, 10, 25, 50)],
        )
        for step in ("", ", forward and backward")
    ]
    + [
        ("`mw.nn.Regions` of a ResNet-18, one image, 5 % of its tiles", ["Regions ResNet-18 tiles=5%"]),
        ("`mw.nn.Regions` of a U-Net, 5 % of its tiles", ["Regions U-Net tiles=5%"]),
    ],
    "functions": [
        (
            f"`mw.{name}`, 4096 x 4096, 10 / 50 / 90 % kept",
            [f"{name} 4096x4096 dim=-1 keep={kept}%" for kept in (10, 50, 90)],
        )
        for name in sorted(HEADLINE)
    ],
    "attention": [
        ("`mw.attention`, lengths 1 to 512", ["attention lengths 1..512"]),
        ("the same with its gradient", ["attention lengths 1..512 forward+backward"]),
    ],
    "linear": [
        (f"`mw.nn.SparseLinear`, 10 % kept{variant}, five shapes", [f"SparseLinear {shape} {end}" for shape in _SHAPES])
        for variant, end in (("", "keep=10%"), (" in 16 x 16 blocks", "16x16 keep=10%"))
    ],
}


@dataclass(frozen=True)
class Row:
    """One case as it was measured."""

    case: str
    function: str
    ours: float
    ratio: float
    spread: str
    peer: str
    bandwidth: str
    judged: tuple[tuple[str, bool], ...]
    """Every target, and whether it holds."""
    large: bool
    where: str
    command: str
    ratios: tuple[tuple[str, float], ...]
    """Of every side."""

    @property
    def missed(self) -> tuple[str, ...]:
        """The targets that do not hold."""
        return tuple(text for text, holds in self.judged if not holds)

    @property
    def percent(self) -> int:
        """How much is kept, by the name of the case."""
        return int(self.case.rpartition(" keep=")[2].rstrip("%"))


def read(path: Path) -> list[Row]:
    """The cases of one CSV file, in its order."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    rows = []
    for case in dict.fromkeys(line["case"] for line in lines):
        sides = [line for line in lines if line["case"] == case]
        ours = next(line for line in sides if line["kind"] == "ours")
        # Where nothing does the same masked work, the op without a mask.
        others = [line for line in sides if line["kind"] == "peer"]
        others = others or [line for line in sides if line["kind"] == "floor"]
        best = min(others, key=lambda line: float(line["median_us"]))
        targets = ours["targets"].split("; ") if ours["targets"] else []
        bandwidth = ours["of_copy_bandwidth"]
        where = (
            f"Maskwise {ours['maskwise']}, {ours['cpu']}, {ours['threads']} threads, {ours['simd']}, "
            f"torch {ours['torch']}, {ours['date'][:10]}"
        )
        rows.append(
            Row(
                case=case,
                function=ours["function"],
                ours=float(ours["median_us"]) * 1e-6,
                ratio=float(best["ratio"]),
                spread=f"{number(best['ratio'])} [{number(best['ratio_q1'])}, {number(best['ratio_q3'])}]",
                peer=best["side"],
                bandwidth=f"{float(bandwidth):.0%}" if bandwidth else "",
                judged=tuple((text.split(": ", 1)[1], text.startswith("pass: ")) for text in targets),
                large=bool(bandwidth) and "backward" not in case,
                where=where,
                command=runnable(ours["command"]),
                ratios=tuple((line["side"], float(line["ratio"])) for line in sides),
            )
        )
    return rows


def number(value: str) -> str:
    """A ratio with two or three digits.

    >>> number("12.345"), number("1.2345")
    ('12.3', '1.23')
    """
    return f"{float(value):.3g}"


def headline(results: Path) -> str:
    """The few lines of figures that the README shows, with the machine and the commands; real models first."""
    lines = ["| work | times faster than the best peer | best peer |", "|---|---|---|"]
    kept = results / f"{KEPT}.csv"
    commands = [shown_command(read(kept)[0])] if kept.exists() else []
    #: Where each file was taken: they are of several days, and may be of several machines.
    places: dict[str, list[str]] = {read(kept)[0].where: [KEPT]} if kept.exists() else {}
    for name, shown in SHOWN.items():
        path = results / f"{name}.csv"
        rows = {row.case: row for row in read(path)} if path.exists() else {}
        for title, cases in shown:
            if not all(case in rows for case in cases):
                continue
            chosen = [rows[case] for case in cases]
            peers = ", ".join(dict.fromkeys(f"`{row.peer}`" for row in chosen))
            lines.append(f"| {title} | {' / '.join(f'{row.ratio:.1f}' for row in chosen)} | {peers} |")
            leaky = [dict(row.ratios)[LEAKY] for row in chosen if LEAKY in dict(row.ratios)]
            if len(leaky) == len(chosen):
                ratios = " / ".join(f"{ratio:.1f}" for ratio in leaky)
                lines.append(f"| the same, beside an idiom that lets NaN through | {ratios} | `{LEAKY}` |")
        if rows:
            one = next(iter(rows.values()))
            commands.append(shown_command(one))
            places.setdefault(one.where, []).append(name)
    notes = [f"- {', '.join(names)}: {where}" for where, names in places.items()]
    return "\n".join([*lines, "", "Medians, float32:", "", *notes, "", "```sh", *commands, "```"])


def first(results: Path) -> str:
    """What the README shows first: a whole model, in time and in memory, and the picture of time over what is kept."""
    rows = {row.case: row for row in read(results / "models.csv")}
    model, step = rows[MODEL], rows[f"{MODEL}, training step"]
    lines = [
        "MiniLM (all-MiniLM-L6-v2) on 64 paragraphs, a fifth of the tokens real: "
        f"{in_words(model.ours)} where the padded model takes",
        f"{in_words(model.ours * model.ratio)}, and a training step {in_words(step.ours)} where it takes "
        f"{in_words(step.ours * step.ratio)}.",
    ]
    if (path := results / "memory.json").exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        padded, unpadded = (round(found[side] / 1e6) for side in ("padded training", "unpadded training"))
        lines.append(f"The peak memory of that step grows by {unpadded} MB where the padded one grows by {padded} MB.")
    return "\n".join([*lines, "", *over_kept(results / f"{KEPT}.csv")]).rstrip()


def shown_command(row: Row) -> str:
    """The command of a run, without where its files go, which is no part of what was measured."""
    return row.command.split(" --csv")[0]


def over_kept(path: Path) -> list[str]:
    """The README's picture, and in one sentence what its first curve says; nothing before the first run."""
    if not path.exists():
        return []
    rows = {row.case: row for row in read(path)}
    few, some, everything = (rows[f"{CURVE} keep={percent}%"] for percent in (5, 50, 100))
    times = " / ".join(in_words(row.ours) for row in (few, some, everything))
    unmasked, idiom = (in_words(some.ours * dict(some.ratios)[side]) for side in (UNMASKED, IDIOM))
    return [
        f"![time over the kept fraction, beside the unmasked op and the idiom](benchmarks/results/{path.stem}.png)",
        "",
        f"`mw.sum(x, mask, dim=-1)` of 4096 x 4096 takes {times} with 5 / 50 / 100 % kept, where the unmasked",
        f"`x.sum(-1)` takes {unmasked} and `torch.where(mask, x, 0).sum(-1)` {idiom}, whatever is kept.",
        "",
    ]


def page(results: Path) -> str:
    """The page docs/figures.md."""
    lines = [
        "# Figures",
        "",
        "*Made from `benchmarks/results/*.csv` by `make figures`; the tests fail when it is stale.*",
        "",
        "Times are medians. A ratio is the best peer's time over ours, round by round, with its quartiles: above 1,",
        "ours is faster. The peers are the plain idioms, `torch.masked` and `torch.compile` of the idiom.",
        "**of copy_** is the bandwidth of ours as a part of what a plain `copy_` of 64 MiB had in the same rounds.",
        "[Benchmarks](benchmarks.md) describes how it is measured.",
    ]
    for path in sorted(results.glob("*.csv")):
        if path.stem in SECTIONS:
            lines += SECTIONS[path.stem](path)
            continue
        rows = read(path)
        lines += ["", f"## {path.stem}", "", *taken(rows[0], path)]
        of_functions = geometric_means((row.function, row.ratio) for row in rows if row.large)
        if of_functions:
            listed = ", ".join(f"{function} {mean:.1f}" for function, mean in of_functions.items())
            lines += [f"Geometric mean of the ratios, over the large cases without gradient: {listed}.", ""]
        judged = means.judged([(row.case, side, ratio) for row in rows for side, ratio in row.ratios])
        lines += [f"- {mean.text}: {value:.2f}, {'met' if holds else 'missed'}" for mean, value, holds in judged]
        lines += [""] if judged else []
        lines += ["| case | time | times faster | best peer | of copy_ | missed |", "|---|---|---|---|---|---|"]
        lines += [
            f"| {row.case} | {in_words(row.ours)} | {row.spread} | `{row.peer}` | {row.bandwidth} | {missed} |"
            for row in rows
            for missed in ("; ".join(row.missed),)
        ]
    return "\n".join(lines) + "\n"


def taken(row: Row, path: Path, tallest: float = 1.5) -> list[str]:
    """How and where a run was taken, and its plot; a link if it is over ``tallest`` times as high as it is wide."""
    plot, link = path.with_suffix(".png"), f"../benchmarks/results/{path.stem}.png"
    picture: list[str] = []
    if plot.exists():
        # The header of a PNG has its width and height.
        width, height = (int.from_bytes(plot.read_bytes()[at : at + 4], "big") for at in (16, 20))
        shown = f"![{path.stem}: ours beside its peers]" if height <= tallest * width else "[Plot of all cases]"
        picture = [f"{shown}({link})", ""]
    return [f"`{shown_command(row)}`  ", row.where, "", *picture]


def sweep_section(path: Path) -> list[str]:
    """The sweep, a line a function: its thousand cases are in the file."""
    with path.open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    found: list[Line] = []
    for case in dict.fromkeys(line["case"] for line in table):
        sides = {line["side"]: line for line in table if line["case"] == case}
        ours = next(line for line in sides.values() if line["kind"] == "ours")
        routes = {name: float(line["median_us"]) for name, line in sides.items() if line["kind"] == "route"}
        off = routes[ours["route"]] / min(routes.values()) if ours["route"] in routes and len(routes) > 1 else None
        ratio = float(sides["idiom"]["ratio"])
        found.append(Line(case, ours["function"], "MISS" in ours["targets"], ratio, off))
    first = table[0]
    lines = [
        "",
        f"## {path.stem}",
        "",
        f"`{runnable(first['command']).split(' --csv')[0]}`  ",
        f"Maskwise {first['maskwise']}, {first['cpu']}, {first['threads']} threads, {first['simd']}, "
        f"torch {first['torch']}, {first['date'][:10]}",
        "",
        "Every public function from 8 x 16 to 16 x 100,000, with 2, 50 and 98 % kept, contiguous and not: "
        f"{Summary.of(found)}.",
        "",
        "| function | cases | slower | times faster, at worst | best route taken | times the best, at worst |",
        "|---|---|---|---|---|---|",
    ]
    for function in dict.fromkeys(line.function for line in found):
        of = Summary.of(line for line in found if line.function == function)
        right = f"{100 * of.right / of.planned:.0f} %" if of.planned else ""
        worst = "" if of.worst_off is None else f"{of.worst_off:.2f}"
        lines.append(f"| {function} | {of.cases} | {of.slower} | {of.worst_ratio:.2f} | {right} | {worst} |")
    slower = [f"- {line.case}: {line.ratio:.2f}" for line in found if line.slower]
    return [*lines, *(["", "Slower than allowed:", "", *slower] if slower else [])]


def kept_section(path: Path) -> list[str]:
    """Time over the kept fraction: how many rows meet each target, the curves, and the rows that miss."""
    rows = read(path)
    judged = [(text, holds) for row in rows for text, holds in row.judged]
    lines = [
        "",
        f"## {path.stem}",
        "",
        *taken(rows[0], path, tallest=math.inf),
        "With f the kept fraction and t(1) our own time with everything kept. The unmasked op and the idiom are those",
        "of the row with most kept. Bold: a target is missed.",
        "",
        "| target | rows | met | missed |",
        "|---|---|---|---|",
    ]
    lines += [f"| {text} | {count} | {met} | {count - met} |" for text, (met, count) in keeping.tally(judged).items()]
    percents = sorted({row.percent for row in rows})
    lines += [
        "",
        f"| work | {' | '.join(f'{percent} %' for percent in percents)} | unmasked | idiom |",
        "|" + "---|" * (len(percents) + 3),
    ]
    for work in dict.fromkeys(keeping.work(row.case) for row in rows):
        of = {row.percent: row for row in rows if keeping.work(row.case) == work}
        times = [_cell(of[percent]) if percent in of else "" for percent in percents]
        last = of[max(of)]
        others = [
            in_words(last.ours * ratio) if ratio else "" for ratio in map(dict(last.ratios).get, (UNMASKED, IDIOM))
        ]
        lines.append(f"| {work} | {' | '.join([*times, *others])} |")
    return lines


def _cell(row: Row) -> str:
    return f"**{in_words(row.ours)}**" if row.missed else in_words(row.ours)


def inserted(readme: str, figures: dict[str, str]) -> str:
    """The README with figures between their marks, by name."""
    for name, text in figures.items():
        begin = BEGIN.format(name)
        before, rest = readme.split(begin)
        readme = f"{before}{begin}\n\n{text}\n\n{END}{rest.split(END, 1)[1]}"
    return readme


SECTIONS = {SWEEP: sweep_section, KEPT: kept_section}
"""The families whose rows are too many for the page to list."""


def files(root: Path) -> dict[Path, str]:
    """Every file with figures, as it should be."""
    results, readme = root / "benchmarks" / "results", root / "README.md"
    return {
        root / "docs" / "figures.md": page(results),
        readme: inserted(readme.read_text(encoding="utf-8"), {"first": first(results), "table": headline(results)}),
        **recipe_figures.files(root),
    }


def main(root: Path) -> None:
    """Write all of them."""
    for path, text in files(root).items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
