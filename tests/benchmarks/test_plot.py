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
