"""Law 5: a loss and its gradients are the same however a batch is split over micro-batches and ranks."""

from itertools import product

import pytest
import torch

from tests.distributed import splits

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")

MICRO = (1, 2, 3, 4, 5)
HOW = ("even", "ragged", "one rank", "dropped")
ALL = [*product(("token", "sequence", "auxiliary", "head"), HOW, MICRO)]
#: Every split for these; of the others, of which FSDP takes ten times as long, each kind, each way to split and each
#: number of micro-batches in turn.
EVERY = tuple((engine, torch.float64) for engine in ("plain", "DDP", "DDP no_sync"))


@pytest.mark.parametrize(
    ("engine", "world"), [(engine, n) for engine in splits.ENGINES for n in (1, 2, 3, 4) if engine != "HSDP" or n == 4]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_loss_gradients_and_clipping_are_those_of_one_process(engine, dtype, world, ranks):
    cases = ALL if (engine, dtype) in EVERY else ALL[world % 4 :: 7 if dtype is torch.float64 else 13]
    counted = ranks.run(splits.check_splits, engine, world, dtype, cases)
    assert counted == [len(cases)] * world + [0] * (4 - world)


@pytest.mark.parametrize("by_hand", [True, False], ids=["F.cross_entropy", "mw.loss"])
@pytest.mark.parametrize("grid", [(1, 4), (2, 2)], ids=str)
def test_a_loss_that_is_sharded_over_classes_counts_replicas_once(grid, by_hand, ranks):
    cases = [("token", how, micro) for how, micro in product(("even", "ragged"), (1, 3))]
    assert ranks.run(splits.check_tensor_parallel, *grid, cases, by_hand) == [4] * 4


@pytest.mark.parametrize("world", [2, 3, 4])
def test_sequences_that_are_cut_over_ranks_give_the_same(world, ranks):
    assert ranks.run(splits.check_columns, world) == [1] * world + [0] * (4 - world)
