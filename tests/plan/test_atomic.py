import pytest

from maskwise.plan.calibration import atomic_path


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "figures.csv"
    path.write_text("old")

    def interrupted():
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_finished_write_replaces_the_old_file(tmp_path):
    path = tmp_path / "figures.csv"
    path.write_text("old")
    with atomic_path(path) as temporary:
        assert temporary.suffix == ".csv"
        temporary.write_text("new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
