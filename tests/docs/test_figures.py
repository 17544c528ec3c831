"""The figures in the README and in docs/figures.md are those of the committed runs."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.cases import recipes as recipe_cases
from benchmarks.command import app
from tools.figures import SWEEP, files, first, headline, inserted, page, read
from tools.recipe_figures import FIGURE, read_recipes, with_figures

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def test_the_page_is_what_the_runs_say():
    assert (ROOT / "docs" / "figures.md").read_text(encoding="utf-8") == page(RESULTS), "run `make figures`"


def test_the_readme_is_what_the_runs_say():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    made = {"first": first(RESULTS), "table": headline(RESULTS)}
    assert readme == inserted(readme, made), "run `make figures`"


@pytest.mark.parametrize("path", files(ROOT), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_page_and_every_plot_is_what_the_runs_say(path):
    assert path.read_text(encoding="utf-8") == files(ROOT)[path], "run `make figures`"


def test_every_recipe_has_its_case_its_section_and_its_plot():
    measured = read_recipes(RESULTS / "recipes.csv")
    assert [case.variant for case in recipe_cases.cases()] == list(measured)
    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "recipes").glob("*.md"))]
    shown = [name for text in pages for name in FIGURE.findall(text)]
    assert sorted(shown) == sorted(measured)
    assert len(measured) == 12
    for recipe in measured.values():
        plot = (ROOT / "docs" / "recipes" / recipe.plot).read_text(encoding="utf-8")
        assert plot.count("<rect") == 1 + len(recipe.seconds)


def test_figures_go_between_their_marks_and_nowhere_else():
    name = next(iter(read_recipes(RESULTS / "recipes.csv")))
    text = f"before\n<!-- figure: {name} -->\nold\n<!-- end of figure -->\nafter\n"
    made = with_figures(text, read_recipes(RESULTS / "recipes.csv"))
    assert made.startswith("before\n")
    assert made.endswith("\nafter\n")
    assert "old" not in made
    assert re.search(r"\*\*[\d.]+ x\*\*", made)
    assert with_figures(made, read_recipes(RESULTS / "recipes.csv")) == made


def test_no_committed_run_is_a_quick_one_and_each_can_be_repeated():
    for path in RESULTS.glob("*.csv"):
        assert "True" not in {line.split(",")[-3] for line in path.read_text(encoding="utf-8").splitlines()[1:]}
        assert all(row.command.startswith("python -m benchmarks ") for row in read(path))
        # The sweep has too many cases for a picture.
        assert path.stem == SWEEP or path.with_suffix(".png").exists()


def test_missed_targets_are_told(tmp_path):
    text = (
        "case,function,side,kind,median_us,ratio,ratio_q1,ratio_q3,of_copy_bandwidth,targets,cpu,threads,simd,torch,date,"
        "command\n"
        "sum,sum,mw.sum,ours,2000,1,1,1,0.5,pass: a; MISS: b,cpu,2,avx2,2,2030-01-01,maskwise bench\n"
        "sum,sum,slow,peer,9000,4.5,4,5,,,cpu,2,avx2,2,2030-01-01,maskwise bench\n"
        "sum,sum,fast,peer,4000,2,1.5,2.5,,,cpu,2,avx2,2,2030-01-01,maskwise bench\n"
    )
    path = tmp_path / "run.csv"
    path.write_text(text, encoding="utf-8")
    (row,) = read(path)
    assert (row.peer, row.spread, row.bandwidth, row.missed) == ("fast", "2 [1.5, 2.5]", "50%", ("b",))


def test_every_command_shown_is_one_of_the_benchmarks_that_there_are():
    for path in RESULTS.glob("*.csv"):
        _, _, _, *arguments = shlex.split(read(path)[0].command)
        listed = CliRunner().invoke(app, [*arguments, "--list", "--json"])
        assert listed.exit_code == 0, listed.output
        named = {case["case"] for case in json.loads(listed.stdout)}
        assert named >= {row.case for row in read(path)}
