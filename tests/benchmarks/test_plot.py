import pytest

from benchmarks.plot import write_plot
from benchmarks.registry import select
from benchmarks.report import Provenance
from benchmarks.run import run_case

pytest.importorskip("matplotlib")
MACHINE = {"cpu": "a cpu", "threads": 2, "simd": "none", "torch": "2"}


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_the_plot_is_written_in_the_format_of_its_suffix(suffix, magic, tmp_path):
    results = [run_case(case, quick=True) for case in select("4x8")]
    path = tmp_path / f"plot{suffix}"
    write_plot(path, results, Provenance("python -m benchmarks", "2030-01-01", quick=True, machine=MACHINE))
    assert path.read_bytes().startswith(magic)
    assert list(tmp_path.iterdir()) == [path]


def test_rows_of_kept_are_drawn_as_curves_over_the_kept_fraction(tmp_path):
    results = [run_case(case, quick=True) for case in select("kept fill, kept cross_entropy")]
    provenance = Provenance("python -m benchmarks", "2030-01-01", quick=True, machine=MACHINE)
    path = tmp_path / "plot.svg"
    write_plot(path, results, provenance)
    drawn = path.read_text(encoding="utf-8")
    assert "You pay for what you keep" in drawn
    assert "cross entropy, forward + backward" in drawn
    # Of other families, and of rows of several, bars.
    write_plot(path, [*results, *(run_case(case, quick=True) for case in select("sum 4x8 bool"))], provenance)
    assert "You pay for what you keep" not in path.read_text(encoding="utf-8")
