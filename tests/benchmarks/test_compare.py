"""The comparison of two versions: here of this one with itself, on a case of microseconds."""

from pathlib import Path

from benchmarks.compare import Version, compare, main

ROOT = Path(__file__).parents[2]
CASE = "sum 4x8 from a bool tensor"


def test_two_processes_time_the_same_case():
    versions = Version(ROOT, "sum 4x8 bool"), Version(ROOT, "sum 4x8 bool")
    try:
        assert [version.names for version in versions] == [[CASE], [CASE]]
        found = compare(*versions, CASE, budget=0.01)
        assert found.name == CASE
        assert 0.0 < min(found.before, found.after) < 1e-2
        assert compare(*versions, "no such case", budget=0.01).startswith("'no such case'")
    finally:
        for version in versions:
            version.close()


def test_all_times_go_to_a_file(tmp_path, capsys):
    main([str(ROOT), "--filter", "sum 4x8 bool", "--budget", "0.01", "--csv", str(tmp_path / "times.csv")])
    assert capsys.readouterr().out.startswith("1 cases of both versions\n")
    header, row = (tmp_path / "times.csv").read_text().splitlines()
    assert header == "case,before,after,ratio"
    assert row.startswith(f"{CASE},")
