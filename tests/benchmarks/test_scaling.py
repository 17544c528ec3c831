"""The page about ranks has the figures of the committed simulation, and the simulation is deterministic."""

from pathlib import Path

import pytest

from benchmarks import scaling

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


def test_the_page_has_the_tables_of_the_committed_run():
    text = PAGE.read_text(encoding="utf-8")
    for table in scaling.tables(scaling.read()):
        assert table in text, "python -m benchmarks.scaling prints the tables"


def test_the_committed_run_has_every_text_budget_and_number_of_ranks():
    found = {(row.text, row.budget, row.ranks, row.method) for row in scaling.read()}
    assert len(found) == 2 * len(scaling.BUDGETS) * len(scaling.RANKS) * len(scaling.METHODS) == len(scaling.read())
    assert max(scaling.RANKS) >= 1024


@pytest.mark.parametrize("method", scaling.METHODS)
def test_a_simulation_gives_the_same_again(method):
    assert scaling.simulate("paragraphs", method, 8, 2048) == scaling.simulate("paragraphs", method, 8, 2048)


def test_budgets_balance_ranks_on_real_text():
    for row in scaling.read():
        if row.method == "first_fit":
            assert row.imbalance <= 1.05


def test_time_grows_with_ranks_and_bytes():
    network = scaling.Network()
    times = [network.all_reduce(1024, ranks) for ranks in scaling.SIZES]
    assert times == sorted(times)
    assert network.all_reduce(1 << 20, 8) > network.all_reduce(1 << 10, 8) > network.broadcast(1 << 10, 8)
