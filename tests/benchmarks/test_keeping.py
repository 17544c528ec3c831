"""The family `kept` judges time over the kept fraction, and is summed up target by target."""

import json
import math

import pytest
from typer.testing import CliRunner

from benchmarks import command, keeping
from benchmarks.cases import kept
from benchmarks.command import app
from benchmarks.registry import named_cases, select
from benchmarks.run import _judge, run_case
from maskwise.plan.measure import Samples
from tools import figures

CASES = {case.name: case for case in named_cases("kept")}
SUM, SOFTMAX = "sum lengths 4096x4096 dim=-1", "softmax lengths 4096x4096 dim=-1"


def judged(name, **seconds):
    """The result of a case whose sides take so long; those that are not named take a second."""
    case = CASES[name]
    times = {side.name: [seconds.get(side.name.replace(" ", "_"), 1.0)] * 3 for side in case.sides}
    times[case.ours.name] = [seconds["ours"]] * 3
    return _judge(case, Samples(times), {side.name: side.kind for side in case.sides}, {}, copied=1)


def holds(name, **seconds):
    return judged(name, **seconds).verdicts[0].holds


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_every_row_runs_in_its_shrunken_form_and_its_sides_agree(case):
    result = run_case(case, quick=True)
    assert {side.name for side in result.sides} == {side.name for side in case.sides}


def test_the_family_runs_only_when_it_is_named():
    assert "kept" not in {case.family for case in select("softmax")}
    assert {case.family for case in select("kept")} == {"kept"}
    assert {case.family for case in select("kept softmax, fill")} == {"kept", "fill"}
    assert not [case for case in select("kept softmax, fill") if case.family == "kept" and "fill" in case.name]


def test_the_rows_cover_the_works_the_masks_and_the_fractions():
    functions = {case.function for case in CASES.values()}
    assert functions >= {"sum", "mean", "var", "norm", "amax", "argmax", "logsumexp", "any", "count"}
    assert functions >= {"softmax", "log_softmax", "softmin", "normalize", "standardize", "fill", "cross_entropy"}
    assert functions >= {"cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "topk", "median", "quantile"}
    assert functions >= {"MaskedBatchNorm1d", "MaskedLayerNorm", "MaskedMeanPool", "MaskedMaxPool", "MaskedLinear"}
    assert functions >= {"Packed.sum", "Packed.softmax", "apply(layer_norm)", "apply(tanh)"}
    of_sum = [name.removeprefix("sum ") for name in CASES if name.startswith("sum ")]
    assert {name.split()[0] for name in of_sum} == {
        "lengths",
        "left",
        "across",
        "causal",
        "window",
        "positions",
        "runs",
        "random",
    }
    for place in ("4096x4096 dim=-1", "4096x4096 dim=0", "64x512x256 dim=1", "64x512x256 dim=1+2"):
        assert {f"lengths {place} keep={percent}%" for percent in (5, 20, 50, 90, 100)} <= {*of_sum}


@pytest.mark.parametrize("mask", ["lengths", "left", "positions", "runs", "random", "causal", "window", "rows"])
def test_a_mask_keeps_the_fraction_that_its_row_names(mask):
    large = [case for case in CASES.values() if case.variant.startswith(f"{mask} ") and math.prod(case.shape) > 2**20]
    assert large
    for case in (case for case in large if case.density < 1):
        density = kept.MASKS[mask](case.shape, case.dim, case.density)
        found = density.density if hasattr(density, "density") else density.float().mean().item()
        # Two elements of a row at least are kept.
        assert found == pytest.approx(case.density, abs=0.005), case.name


# -- targets -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "bound"),
    [
        (f"{SUM} keep=5%", 0.10),
        (f"{SUM} keep=50%", 0.55),
        ("sum causal 4096x4096 dim=-1 keep=50%", 0.55),
        ("sum positions 64x512x256 dim=1 keep=20%", 0.30),
        ("sum runs 4096x4096 dim=-1 keep=90%", 1.00),
        ("cross_entropy rows 8192x30522 forward+backward keep=20%", 0.25),
        ("sort lengths 1024x4096 dim=-1 keep=20%", 0.30),
    ],
)
def test_a_share_of_the_time_with_everything_kept_is_the_bound(name, bound):
    # Whatever the others take: only our own time with everything kept counts.
    assert holds(name, ours=bound * 10 - 0.01, all_kept=10.0, unmasked=0.001)
    assert not holds(name, ours=bound * 10 + 0.01, all_kept=10.0, unmasked=1000.0)


@pytest.mark.parametrize(
    "name", [f"{SOFTMAX} keep=20%", f"{SUM} forward+backward keep=20%", "fill lengths 4096x4096 keep=20%"]
)
def test_what_must_be_written_may_be_written_on_top(name):
    assert holds(name, ours=4.9, all_kept=10.0, write=3.0)
    assert not holds(name, ours=5.1, all_kept=10.0, write=3.0)


def test_an_output_writes_what_is_dropped_and_a_gradient_the_size_of_x():
    def bytes_written(name):
        case = CASES[name].shrunk()
        (side,) = [side for side in case.sides if side.kind == "memory"]
        return 4 * side.prepare(case.setup(case))().numel()

    size = 32 * 32 * 4
    assert bytes_written(f"{SOFTMAX} keep=20%") == pytest.approx(0.8 * size, abs=4)
    assert bytes_written(f"{SUM} forward+backward keep=20%") == size
    # Values and positions.
    assert bytes_written("cummax lengths 4096x4096 dim=-1 keep=50%") == 0.5 * 3 * size


@pytest.mark.parametrize(
    ("name", "side", "factor"),
    [
        (f"{SUM} keep=100%", "unmasked", 1.05),
        ("MaskedLayerNorm sequences 64x512x256 keep=20%", "unmasked", 0.35),
        ("apply(layer_norm) sequences 64x512x256 keep=50%", "unmasked", 0.75),
        ("MaskedLinear 16x768->3072 evaluation keep=30%", "SparseLinear", 1.05),
        ("Packed.sum lengths 64x512x64 dim=1 keep=50%", "padded", 1.05),
        ("apply(tanh) random 8x16 keep=50%", "idiom", 1.05),
        ("count lengths 4096x4096 dim=-1 keep=20%", "idiom", 0.25),
    ],
)
def test_other_bounds_are_shares_of_another_side(name, side, factor):
    assert holds(name, ours=factor * 10 - 0.01, **{side: 10.0})
    assert not holds(name, ours=factor * 10 + 0.01, **{side: 10.0})


def test_every_row_may_never_be_slower_than_the_idiom():
    assert all(case.targets[-1].text == "never slower than idiom" for case in CASES.values())


# -- what is told ------------------------------------------------------------------------------------------------------
@pytest.fixture
def curve():
    """A sum that costs what is kept, up to half; and nothing less from there on."""
    return [
        judged(f"{SUM} keep={percent}%", ours=max(percent / 100, 0.5), unmasked=1.0, idiom=20.0)
        for percent in (5, 20, 50, 90, 100)
    ]


def test_targets_are_tallied_over_their_rows(curve):
    tally = keeping.tally(keeping.verdicts(curve))
    assert tally == {
        "reductions, intervals: t(f) ≤ (f + 0.05) t(1)": (2, 4),
        "never slower than idiom": (5, 5),
        "reductions, all kept: ≤ 1.05 x unmasked": (1, 1),
    }


def test_a_run_prints_every_row_its_bound_and_the_tally(curve, monkeypatch):
    results = {result.case.name: result for result in curve}
    monkeypatch.setattr(command, "run_case", lambda case, **_: results[case.name])
    monkeypatch.setattr(command.registry, "select", lambda pattern: [result.case for result in curve])
    monkeypatch.setenv("COLUMNS", "140")
    shown = CliRunner().invoke(app, ["--filter", "kept"]).stdout
    for told in ("0.50 ≤ 0.25", "0.90 ≤ 0.95", f"missed: {SUM} keep=5%"):
        assert told in shown
    assert "✗1 ✓2" in shown
    rows = [line.split() for line in shown.splitlines() if "t(f) ≤ (f + 0.05) t(1)" in line and "missed" not in line]
    assert [(row[0], row[-3:]) for row in rows] == [("1", ["4", "2", "2"])]
    data = json.loads(CliRunner().invoke(app, ["--filter", "kept", "--json"]).stdout)
    assert data["kept"]["reductions, intervals: t(f) ≤ (f + 0.05) t(1)"] == {"met": 2, "rows": 4}
    assert CliRunner().invoke(app, ["--filter", "kept", "--check"]).exit_code == 1


def test_rows_of_one_work_are_a_curve_from_few_kept_to_all(curve):
    ((name, points),) = keeping.curves(curve[::-1]).items()
    assert name == SUM
    assert [point.case.density for point in points] == [0.05, 0.2, 0.5, 0.9, 1.0]
    assert keeping.curves(curve[:2]) == {}


def test_the_page_of_figures_shows_the_tally_and_the_curve(curve, tmp_path):
    from benchmarks.report import Provenance, write_csv

    machine = {"cpu": "a cpu", "threads": 2, "simd": "avx2", "torch": "2", "maskwise": "0"}
    path = tmp_path / "kept.csv"
    write_csv(path, curve, Provenance("python -m benchmarks --filter kept", "2030-01-01", quick=False, machine=machine))
    page = "\n".join(figures.kept_section(path))
    assert "| reductions, intervals: t(f) ≤ (f + 0.05) t(1) | 4 | 2 | 2 |" in page
    assert f"| {SUM} | **500.00 ms** | **500.00 ms** | 500.00 ms | 900.00 ms | 1.00 s | 1.00 s | 20.00 s |" in page
    picture, _, sentence, more, _ = figures.over_kept(path)
    assert "kept.png" in picture
    assert "takes 500.00 ms / 500.00 ms / 1.00 s with 5 / 50 / 100 % kept" in sentence
    assert more == "`x.sum(-1)` takes 1.00 s and `torch.where(mask, x, 0).sum(-1)` 20.00 s, whatever is kept."
