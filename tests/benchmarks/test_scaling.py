"""The page about ranks has the figures of the committed simulation, and the simulation is deterministic."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import distributed

import maskwise as mw
from benchmarks import scaling
from tests.ranks import ranks  # noqa: F401, a fixture

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


def sent():
    """The bytes of every collective of a window, and of a layer's training step."""
    found, collectives = [], {"all_reduce": distributed.all_reduce, "broadcast": distributed.broadcast}

    def counted(collective):
        def call(x, *args, **kwargs):
            found[-1].append(x.numel() * x.element_size())
            return collective(x, *args, **kwargs)

        return call

    norm, x = mw.nn.SyncMaskedBatchNorm1d(256), torch.randn(2, 256, 3, requires_grad=True)
    with patch.multiple(distributed, **{name: counted(each) for name, each in collectives.items()}):
        found.append([])
        with mw.accumulate([2, 1]) as window:
            window.scale(torch.ones(()))
        window.value()
        found.append([])
        norm(x, mw.Mask.from_lengths([3, 1])).sum().backward()
    return found


def test_ranks_send_what_the_model_of_communication_says(ranks):  # noqa: F811
    names = ("`mw.accumulate`, one window", "SyncMaskedBatchNorm, 256 channels")
    expected = [[message.size for message in scaling.communication()[name]] for name in names]
    assert ranks.run(sent) == [expected] * 3


def test_time_grows_with_ranks_and_bytes():
    network = scaling.Network()
    times = [network.all_reduce(1024, size) for size in scaling.SIZES]
    assert times == sorted(times)
    assert network.all_reduce(1 << 20, 8) > network.all_reduce(1 << 10, 8) > network.broadcast(1 << 10, 8)
