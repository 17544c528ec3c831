"""Unpadded models under DDP and FSDP2, with other lengths on every rank: the gradients of one padded process."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import maskwise as mw
from tests.ranks import ranks  # noqa: F401, a fixture

RANKS = 3
# The lengths of the rows of each rank, in each step: a single token, a row without any, a rank without any.
LENGTHS = [[[3, 7, 1, 5], [1], [9, 0, 2]], [[2, 3], [0, 0], [4, 1]]]


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2).double()


def bert():
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertModel(config, add_pooling_layer=False).double()


def batch(lengths, kind, seed):
    """Rows padded to the longest, and which positions are tokens."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(*lengths, 2)) < torch.tensor(lengths)[:, None]
    if kind == "bert":
        return torch.randint(50, mask.shape, generator=generator), mask
    return torch.randn(*mask.shape, 8, generator=generator, dtype=torch.float64), mask


def loss_of(model, kind, x, mask):
    """The sum of something over tokens, which is the same however they are batched."""
    if kind == "bert":
        out = model(x, attention_mask=mask.long()).last_hidden_state
    else:
        out = model(x, src_key_padding_mask=~mask)
    return (torch.where(mask[..., None], out, 0.0) * torch.linspace(-1, 2, 8, dtype=out.dtype)).pow(3).sum()


MODELS = {"encoder": encoder, "bert": bert}


def trained(kind, wrap):
    """Two steps on this rank's rows: the parameters afterwards."""
    rank = distributed.get_rank()
    model = mw.unpad(MODELS[kind]())
    outer = model
    if wrap == "ddp":
        outer = nn.parallel.DistributedDataParallel(model)
    else:
        layers = model.layers if kind == "encoder" else model.encoder.layer
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    routes = []
    for step, lengths in enumerate(LENGTHS):
        optimizer.zero_grad()
        with mw.explain() as log:
            loss = loss_of(outer, kind, *batch(lengths[rank], kind, step * RANKS + rank))
        routes += [call.route for call in log]
        (RANKS * loss).backward()
        optimizer.step()
    whole = [p.full_tensor() if wrap == "fsdp" else p for p in model.parameters()]
    return [p.detach().clone() for p in whole], routes


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", MODELS)
def test_unpadded_models_train_as_one_padded_process(ranks, kind, wrap):  # noqa: F811
    found = ranks.run(trained, kind, wrap)
    model = MODELS[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, lengths in enumerate(LENGTHS):
        optimizer.zero_grad()
        for rank in range(RANKS):
            x, mask = batch(lengths[rank], kind, step * RANKS + rank)
            # Without rows of no tokens, of which a padded model makes NaN.
            rows = mask.any(1)
            if rows.any():
                loss_of(model, kind, x[rows], mask[rows]).backward()
        optimizer.step()
    for rank, (parameters, routes) in enumerate(found):
        # Without a token there is nothing to pack.
        assert routes == ["packed" if any(lengths[rank]) else "padded" for lengths in LENGTHS]
        for here, there in zip(parameters, model.parameters(), strict=True):
            # Sums over tokens in another order.
            torch.testing.assert_close(here, there.detach(), rtol=1e-9, atol=1e-11)
