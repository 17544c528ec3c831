"""A kept head under DDP and FSDP2: the gradients of the model itself in one process, a rank without labels included."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import maskwise as mw
from tests.nn.test_kept_head import batch, build, step
from tests.ranks import ranks  # noqa: F401, a fixture

pytest.importorskip("transformers")

RANKS = 3


def inputs():
    """A row for each rank, of which the second has no label."""
    found = batch()
    found["labels"][1] = -100
    return found


def labels_of(labels, name):
    """The labels that count: the first of a causal model predicts nothing."""
    return labels if "bert" in name else labels[:, 1:]


def sharded(model, own_head):
    for layer in next(each for each in model.modules() if isinstance(each, nn.ModuleList)):
        fully_shard(layer)
    if own_head:
        fully_shard(model.get_output_embeddings())
    return fully_shard(model)


def trained(name, wrap, when):
    """The loss of this rank's row as its part of the mean over all labels, and the gradients of all ranks."""
    rank, whole = distributed.get_rank(), inputs()
    model = build(name)
    if when == "before":
        mw.nn.kept_head(model)
    outer = nn.parallel.DistributedDataParallel(model) if wrap == "ddp" else sharded(model, wrap == "sharded head")
    if when == "after":
        mw.nn.kept_head(model)
    mine = {key: value[rank : rank + 1] for key, value in whole.items()}
    count, here = ((labels_of(each["labels"], name) != -100).sum() for each in (whole, mine))
    output = outer(**mine)
    assert output.logits is None
    # The mean of the rank's own labels, as a part of the mean of all.
    part = output.loss * here / count
    (RANKS * part).backward()
    gradients = {key: each.grad for key, each in model.named_parameters() if each.grad is not None}
    if wrap != "ddp":
        gradients = {key: each.full_tensor() for key, each in gradients.items()}
    return part.item(), gradients


@pytest.mark.parametrize(
    ("name", "wrap", "when"),
    [
        ("bert", "ddp", "before"),
        ("bert", "fsdp", "before"),
        ("modernbert", "fsdp", "before"),
        ("gpt2", "ddp", "before"),
        ("gpt2", "fsdp", "before"),
        ("llama", "ddp", "before"),
        ("llama", "sharded head", "before"),
        ("llama", "sharded head", "after"),
        ("llama-tied", "fsdp", "before"),
        ("gemma2", "fsdp", "before"),
        ("gemma2", "fsdp", "after"),
    ],
)
def test_loss_and_gradients_are_those_of_the_model_itself_in_one_process(name, wrap, when, ranks):  # noqa: F811
    output, expected = step(build(name), **inputs())
    found = ranks.run(trained, name, wrap, when)
    assert sum(part for part, _ in found) == pytest.approx(output.loss.item(), rel=1e-5)
    assert found[1][0] == 0.0
    for _, gradients in found:
        assert gradients.keys() == expected.keys()
        for key, each in gradients.items():
            # Sums of another order, through two layers.
            torch.testing.assert_close(each, expected[key], rtol=1e-4, atol=1e-6, msg=key)
