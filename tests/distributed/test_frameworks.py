"""Trainers of other libraries with our denominators: a few steps on one rank and on two, as in one process."""

from importlib.util import find_spec

import pytest
import torch

from tests.distributed import frameworks
from tests.distributed.ranks import Ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")

TRAINERS = {
    frameworks.by_trainer: ("transformers", "accelerate"),
    frameworks.by_accelerate: ("accelerate",),
    frameworks.by_lightning: ("lightning",),
}


@pytest.fixture(scope="module")
def world():
    started = {}

    def start(size):
        # One process more for each size: trainers leave a state of their own behind.
        return started.setdefault(size, Ranks(size))

    yield start
    for each in started.values():
        each.close()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("train", TRAINERS, ids=lambda train: train.__name__)
def test_a_trainer_ends_where_one_process_on_whole_batches_does(train, size, world):
    for name in TRAINERS[train]:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install {name}")
    parameters, losses = frameworks.in_one_process(size)
    for found, logged in world(size).run(train, size):
        # float32, three steps: sums in another order.
        for mine, theirs in zip(found, parameters, strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-5, atol=1e-5)
        # The Trainer rounds what it logs to four digits.
        assert logged == pytest.approx(losses, rel=2e-4)
