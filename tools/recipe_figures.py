"""The figures and plots of the recipes in docs/recipes/, made from benchmarks/results/recipes.csv.

`tools.figures` writes them along with the others; the tests fail when one is stale.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from maskwise.plan.measure import in_words
from tools.bars import Bar, bars

__all__ = ["Recipe", "files", "read_recipes", "runnable", "with_figures"]

FIGURE = re.compile(r"<!-- figure: (?P<name>[^>]*?) -->\n.*?<!-- end of figure -->", flags=re.S)
TABLE = re.compile(r"<!-- table of recipes -->\n.*?<!-- end of table -->", flags=re.S)
LEAKS = " (leaks NaN)"


@dataclass(frozen=True)
class Recipe:
    """What was measured for one recipe: seconds by side, ours first and the idiom as people write it second."""

    name: str
    seconds: Mapping[str, float]
    ratios: Mapping[str, float]
    leaky: frozenset[str]
    best: str
    inputs: str
    where: str
    command: str

    @property
    def ours(self) -> str:
        """The Maskwise line."""
        return next(iter(self.seconds))

    @property
    def written(self) -> str:
        """The idiom as people write it."""
        return list(self.seconds)[1]

    @property
    def plot(self) -> str:
        """The file of the plot."""
        return f"{self.name.replace(' ', '-')}.svg"


def read_recipes(path: Path) -> dict[str, Recipe]:
    """The recipes of a run, by name."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    found = {}
    for case in dict.fromkeys(line["case"] for line in lines):
        sides = sorted((line for line in lines if line["case"] == case), key=lambda line: line["kind"] != "ours")
        peers = [line for line in sides if line["kind"] == "peer"]
        first, name = sides[0], case.removeprefix("recipe ")
        kept = f", {float(first['density']):.0%} kept" if first["density"] else ""
        found[name] = Recipe(
            name=name,
            seconds={line["side"]: float(line["median_us"]) * 1e-6 for line in sides},
            ratios={line["side"]: float(line["ratio"]) for line in sides},
            leaky=frozenset(line["side"] for line in sides if line["kind"] == "leaky"),
            best=min(peers, key=lambda line: float(line["median_us"]))["side"],
            inputs=f"{first['shape'].replace('x', ' x ')}{kept}",
            where=f"{first['cpu']}, {first['threads']} threads, {first['simd']}, torch {first['torch']}, "
            f"{first['date'][:10]}",
            command=runnable(first["command"]),
        )
    return found


def runnable(command: str) -> str:
    """The command of a row as it runs today: until 0.1.0 the benchmarks were a part of the package.

    >>> runnable("maskwise bench --filter sum")
    'python -m benchmarks --filter sum'
    """
    return command.replace("maskwise bench", "python -m benchmarks", 1)


def plot(recipe: Recipe) -> str:
    """The time of every side, as a chart."""
    title = f"{recipe.name[0].upper()}{recipe.name[1:]}: median time, {recipe.inputs}"
    return bars(
        title,
        [
            Bar(side, seconds, in_words(seconds) + (LEAKS if side in recipe.leaky else ""), ours=side == recipe.ours)
            for side, seconds in recipe.seconds.items()
        ],
    )


def figure(recipe: Recipe) -> str:
    """The plot, and the figure in words."""
    ratios = [f"**{recipe.ratios[recipe.written]:.1f} x** as fast as the usual idiom"]
    if recipe.best != recipe.written:
        ratios.append(f"**{recipe.ratios[recipe.best]:.1f} x** as fast as its best form, `{recipe.best}`")
    return "\n".join(
        [
            f"![{recipe.name}: the time of each implementation]({recipe.plot})",
            "",
            f"`{recipe.ours}` is {', '.join(ratios)}.",
        ]
    )


def table(recipes: Mapping[str, Recipe]) -> str:
    """All of them, a line each."""
    lines = ["| recipe | as people write it | Maskwise | times faster | than its best form |", "|---|---|---|---|---|"]
    for recipe in recipes.values():
        written = recipe.written.replace("|", "\\|")
        lines.append(
            f"| {recipe.name} | `{written}`{LEAKS if recipe.written in recipe.leaky else ''} | `{recipe.ours}` "
            f"| {recipe.ratios[recipe.written]:.1f} | {recipe.ratios[recipe.best]:.1f} |"
        )
    some = next(iter(recipes.values()))
    return "\n".join([*lines, "", f"Medians, float32, {some.where}.", "", "```sh", some.command, "```"])


def with_figures(page: str, recipes: Mapping[str, Recipe]) -> str:
    """The page with what stands between its marks made anew."""
    page = FIGURE.sub(
        lambda found: f"<!-- figure: {found['name']} -->\n\n{figure(recipes[found['name']])}\n\n<!-- end of figure -->",
        page,
    )
    return TABLE.sub(lambda _: f"<!-- table of recipes -->\n\n{table(recipes)}\n\n<!-- end of table -->", page)


def files(root: Path) -> dict[Path, str]:
    """Every file of docs/recipes/ as it should be: the pages with their figures, and the plots."""
    recipes = read_recipes(root / "benchmarks" / "results" / "recipes.csv")
    folder = root / "docs" / "recipes"
    made = {path: with_figures(path.read_text(encoding="utf-8"), recipes) for path in sorted(folder.glob("*.md"))}
    return {**made, **{folder / recipe.plot: plot(recipe) for recipe in recipes.values()}}
