"""The figures in the README and in docs/figures.md are those of the committed runs."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.cases import models
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
        "case,function,side,kind,median_us,ratio,ratio_q1,ratio_q3,of_copy_bandwidth,targets,cpu,threads,simd,torch,maskwise,date,"
        "command\n"
        "sum,sum,mw.sum,ours,2000,1,1,1,0.5,pass: a; MISS: b,cpu,2,avx2,2,0.2.0,2030-01-01,maskwise bench\n"
        "sum,sum,slow,peer,9000,4.5,4,5,,,cpu,2,avx2,2,0.2.0,2030-01-01,maskwise bench\n"
        "sum,sum,fast,peer,4000,2,1.5,2.5,,,cpu,2,avx2,2,0.2.0,2030-01-01,maskwise bench\n"
    )
    path = tmp_path / "run.csv"
    path.write_text(text, encoding="utf-8")
    (row,) = read(path)
    assert (row.peer, row.spread, row.bandwidth, row.missed) == ("fast", "2 [1.5, 2.5]", "50%", ("b",))


@pytest.fixture
def runs(tmp_path):
    """A copy of the committed runs, of which a test may write one."""
    shutil.copytree(RESULTS, tmp_path / "results", ignore=shutil.ignore_patterns("*.png"))

    def write(name, ratios):
        """Write a run: the ratio of each peer, by case."""
        table = ["case,function,side,kind,median_us,ratio,ratio_q1,ratio_q3,of_copy_bandwidth,targets,cpu,threads,simd,"
                 "torch,maskwise,date,command"]  # fmt: skip
        for case, peers in ratios.items():
            for side, (kind, ratio) in {"ours": ("ours", 1), **peers}.items():
                about = "cpu,2,avx2,2,0.2.0,2030-01-01,maskwise bench"
                table.append(f'"{case}",f,{side},{kind},{1000 * ratio},{ratio},{ratio},{ratio},,,{about}')
        (tmp_path / "results" / f"{name}.csv").write_text("\n".join(table), encoding="utf-8")
        return tmp_path / "results"

    return write


def over_densities(ratios):
    cases = [case for case in models.cases() if "40 texts in 256 keep" in case.name]
    return {
        case.name: {"padded": ("peer", ratio), "faster": ("floor", 0.1)}
        for case, ratio in zip(cases, ratios, strict=False)
    }


def test_a_model_is_shown_over_all_densities_and_never_at_the_best_one_alone(runs):
    row = "| `mw.unpad` of MiniLM, 10 / 20 / 50 / 80 % of the tokens real | 8.0 / 4.0 / 1.9 / 1.2 | `padded` |"
    assert row in headline(runs("models", over_densities([8, 4, 1.9, 1.2])))
    assert "of the tokens real" not in headline(runs("models", over_densities([8, 4, 1.9])))


def test_servers_are_shown_by_name_and_version(runs):
    case = "unpad MiniLM embeddings of 96 paragraphs"
    peers = {"padded; by 32": ("peer", 2.5), "OpenVINO 2026.4; by 1": ("peer", 0.8)}
    text = headline(runs("serving", {case: peers}))
    assert "| embeddings of 96 paragraphs, sorted by length | 0.8 | `OpenVINO 2026.4; by 1` |" in text


def test_the_compiled_idiom_that_lets_nan_through_is_shown_and_is_no_peer(runs):
    cases = {
        f"sum 4096x4096 dim=-1 keep={percent}%": {"idiom": ("peer", 9), "compile(x*mask)": ("leaky", ratio)}
        for percent, ratio in ((10, 3), (50, 4), (90, 5))
    }
    text = headline(runs("functions", cases))
    assert "| `mw.sum`, 4096 x 4096, 10 / 50 / 90 % kept | 9.0 / 9.0 / 9.0 | `idiom` |" in text
    assert "| the same, beside an idiom that lets NaN through | 3.0 / 4.0 / 5.0 | `compile(x*mask)` |" in text


def test_every_command_shown_is_one_of_the_benchmarks_that_there_are():
    for path in RESULTS.glob("*.csv"):
        _, _, _, *arguments = shlex.split(read(path)[0].command)
        listed = CliRunner().invoke(app, [*arguments, "--list", "--json"])
        assert listed.exit_code == 0, listed.output
        named = {case["case"] for case in json.loads(listed.stdout)}
        assert named >= {row.case for row in read(path)}
