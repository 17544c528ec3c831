"""Trainers of other libraries with our denominators: a few steps on one rank and on two, as in one process."""

from importlib.util import find_spec

import pytest
import torch

import maskwise as mw
from benchmarks.ranks import Ranks
from tests.distributed import frameworks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")

WORDS = 12
TRAINERS = {
    frameworks.by_trainer: ("transformers", "accelerate"),
    frameworks.by_accelerate: ("accelerate",),
    frameworks.by_lightning: ("lightning",),
}


@pytest.fixture(scope="module")
def world():
    started = {}

    def start(size):
        # Processes of its own for each size: trainers leave a state of their own behind.
        if size not in started:
            started[size] = Ranks(size)
        return started[size]

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


@pytest.mark.parametrize("count", [None, 17])
def test_the_loss_for_the_trainer_is_that_of_a_causal_model_itself(count):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    # As many words as positions, so that classes could be mistaken for them.
    words = torch.randint(WORDS, (3, WORDS))
    labels = words.where(torch.arange(WORDS) < torch.tensor([[WORDS], [4], [1]]), -100)
    theirs = model(words, labels=labels, **({} if count is None else {"num_items_in_batch": count})).loss
    ours = mw.distributed.trainer_loss(shift=True)(model(words), labels, num_items_in_batch=count)
    torch.testing.assert_close(ours, theirs)
    found = [torch.autograd.grad(loss, model.lm_head.weight)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*found)
