"""Every leak with a known answer is found at its module, with the line that repairs it; repaired models are clean."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import maskwise as mw
from maskwise.models.audit.batch import Batch, find_tokens
from maskwise.models.audit.leaks import find_leaks
from maskwise.models.audit.subject import preserved
from tests.models.audit.cases import LEAKS, B, D, L, Pooled, floats, keep_mask, tokens


def leaks_of(model, batch, mask=None, loss=None):
    bound = Batch.of(model, batch)
    with preserved(model, loss) as subject:
        return find_leaks(subject, bound, find_tokens(bound, mask))


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_found_at_its_module_with_its_repair(name):
    build, batch, module, cause, repair, modes = LEAKS[name]
    first = leaks_of(build(False), batch())[0]
    assert (first.module, first.cause) == (module, cause)
    assert repair in first.repair
    assert set(first.modes) == modes
    assert first.output > 1e-3
    assert not first.only_nan


@pytest.mark.parametrize("name", LEAKS)
def test_the_repaired_form_gives_no_alarm(name):
    build, batch, *_ = LEAKS[name]
    assert [leak for leak in leaks_of(build(True), batch()) if not leak.only_nan] == []


def test_the_operation_and_its_line_are_named():
    leak = leaks_of(Pooled(False), tokens())[0]
    assert leak.operation == "mean"
    assert leak.line is not None
    assert leak.line.startswith("cases.py:")
    assert leak.path == ("head", "")


@pytest.mark.parametrize(
    ("pool", "side", "cause"),
    [
        (lambda h: h.amax(1), "right", "maximum without mask"),
        (lambda h: h[:, -1], "right", "fixed position"),
        (lambda h: h.min(1).values, "right", "minimum without mask"),
        (lambda h: h.sum(1), "right", "sum without mask"),
        (lambda h: h.logsumexp(1), "right", "logsumexp without mask"),
        (lambda h: h.topk(3, dim=1).values, "right", "topk without mask"),
        (lambda h: F.normalize(h, dim=1), "right", "normalize without mask"),
        (lambda h: h.cumsum(1), "left", "scan over padding"),
        (lambda h: h.flip(1).roll(1, 1), "right", "mixes positions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_causes_are_named(pool, side, cause):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, D)

        def forward(self, input_ids, attention_mask):
            return pool(self.embed(input_ids))

    assert leaks_of(Model(), tokens(side))[0].cause == cause


@pytest.mark.parametrize(
    ("pool", "repair"),
    [
        (lambda h: h.mean(1), "mw.mean(x, mask[..., None], dim=1)"),
        (lambda h: h - h.mean(), "mw.mean(x, mask[..., None], dim=None)"),
        (lambda h: h.transpose(1, 2).sum(-1), "mw.sum(x, mask[..., None], dim=-1)"),
        (lambda h: h.topk(3, dim=1).values, "mw.topk(x, mask[..., None], k, dim=1)"),
    ],
)
def test_the_repair_calls_the_same_function_over_the_same_dims(pool, repair):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, D)

        def forward(self, input_ids, attention_mask):
            return pool(self.embed(input_ids))

    assert leaks_of(Model(), tokens())[0].repair == repair


class Attending(nn.Module):
    """nn.MultiheadAttention with a mask of the user's making."""

    def __init__(self, make_mask):
        super().__init__()
        self.attend, self.make_mask = nn.MultiheadAttention(D, 2, batch_first=True), make_mask

    def forward(self, x, mask):
        return self.attend(x, x, x, key_padding_mask=self.make_mask(mask))[0]


@pytest.mark.parametrize(
    ("make_mask", "cause"),
    [(lambda keep: keep, "inverted mask"), (lambda keep: None, "attention without mask"), (lambda keep: ~keep, None)],
)
def test_a_mask_of_the_wrong_convention_is_told_from_none(make_mask, cause):
    found = [leak for leak in leaks_of(Attending(make_mask), (floats(), keep_mask())) if not leak.only_nan]
    assert [leak.cause for leak in found] == ([] if cause is None else [cause])
    assert all(leak.repair == "model.attend(..., key_padding_mask=~mask)" for leak in found)


def test_an_inverted_mask_of_scaled_dot_product_attention_is_named():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(D, D)

        def forward(self, x, mask):
            return F.scaled_dot_product_attention(self.q(x), x, x, ~mask[:, None, :])

    leak = leaks_of(Model(), (floats(), keep_mask()))[0]
    assert (leak.cause, leak.operation) == ("inverted mask", "scaled_dot_product_attention")


def test_the_last_state_of_a_recurrence_leaks_in_the_recurrence():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(D, D, num_layers=2, batch_first=True)

        def forward(self, x, mask):
            return self.rnn(x)[1][-1]

    leak = leaks_of(Model(), (floats(), keep_mask()))[0]
    assert (leak.module, leak.cause) == ("rnn", "recurrence over padding")


def test_a_batch_norm_over_positions_first_is_found():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(D)

        def forward(self, x, mask):
            h = x.transpose(0, 1)
            return self.norm(h.reshape(-1, D)).view(h.shape).transpose(0, 1)

    leak = leaks_of(Model(), (floats(), keep_mask()))[0]
    assert (leak.module, leak.cause, leak.modes) == ("norm", "BatchNorm over padding", ("train",))


def test_the_first_label_of_a_left_padded_row_is_predicted_from_padding():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(50, D), nn.Linear(D, 50)

        def forward(self, input_ids, attention_mask, labels):
            logits = self.head(self.embed(input_ids))
            return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}

    batch = tokens("left")
    keep = batch["attention_mask"].bool()
    batch["labels"] = batch["input_ids"].masked_fill(~keep, -100)
    leak = leaks_of(Model(), batch)[0]
    assert (leak.module, leak.cause) == ("loss", "label predicted from padding")
    assert leak.repair == "labels[mask.cumsum(1) <= 1] = -100, the first label of every row"
    batch["labels"][keep.cumsum(1) <= 1] = -100
    assert [leak for leak in leaks_of(Model(), batch) if not leak.only_nan] == []


def test_dropout_noise_is_no_leak():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.dropout = nn.Embedding(50, D), nn.Dropout(0.5)

        def forward(self, input_ids, attention_mask):
            return self.dropout(self.embed(input_ids))

    assert leaks_of(Noisy().train(), tokens()) == []


def test_a_loss_over_padding_is_reported_at_the_loss():
    model = nn.Sequential(nn.Embedding(50, D), nn.Linear(D, 50))
    ids, keep = torch.randint(1, 50, (B, L)), keep_mask()

    def loss(output, batch):
        return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())

    found = leaks_of(model, (ids, ids.clone()), mask=keep, loss=loss)
    assert [(leak.module, leak.cause) for leak in found] == [("loss", "loss over dropped positions")]
    assert found[0].loss > 0
    repaired = leaks_of(model, (ids, ids.masked_fill(~keep, -100)), mask=keep, loss=loss)
    assert repaired == []


def test_nan_in_padding_is_reported_apart():
    encoder = nn.TransformerEncoderLayer(D, 2, 16, batch_first=True)
    found = leaks_of(encoder, {"src": floats(), "src_key_padding_mask": ~keep_mask()})
    assert [(leak.only_nan, leak.cause) for leak in found] == [(True, "0 times NaN")]


def test_masked_weights_are_tested_too():
    layer = prune.random_unstructured(nn.Linear(D, D), "weight", amount=0.5)
    assert leaks_of(layer, torch.randn(3, D)) == []
    assert leaks_of(mw.nn.attach(nn.Linear(D, D), torch.rand(D, D) < 0.5), torch.randn(3, D)) == []

    class Forgets(nn.Linear):
        """Has a mask, and multiplies by all weights."""

        def __init__(self):
            super().__init__(D, D)
            self.weight_orig = nn.Parameter(torch.randn(D, D))
            self.register_buffer("weight_mask", torch.rand(D, D) < 0.5)

        def forward(self, x):
            return x @ self.weight_orig.T

    found = leaks_of(nn.Sequential(Forgets()), torch.randn(3, D))
    assert [(leak.module, leak.cause) for leak in found] == [("0", "masked weights are read")]


# -- the mask ----------------------------------------------------------------------------------------------------------
def mask_of(batch, forward=lambda input_ids=None, **kwargs: None):
    model = nn.Module()
    model.forward = forward
    return find_tokens(Batch.of(model, batch), None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_mask", keep_mask().long()),
        ("src_key_padding_mask", ~keep_mask()),
        ("lengths", keep_mask().sum(1)),
        ("mask", keep_mask()),
        ("attention_mask", torch.where(keep_mask(), 0.0, -1e9)[:, None, None].expand(B, 1, L, L)),
    ],
)
def test_the_mask_is_found_by_name(name, value):
    (found,) = mask_of({"input_ids": torch.randint(9, (B, L)), name: value})
    assert torch.equal(found.keep, keep_mask())
    assert found.source == name
    assert list(found.inputs) == ["input_ids"]


def test_ignored_labels_are_padding_where_they_end_rows_of_one_value():
    ids, labels = torch.randint(1, 9, (B, L)).masked_fill(~keep_mask(), 0), torch.randint(9, (B, L))
    labels = labels.masked_fill(~keep_mask(), -100)
    (found,) = mask_of({"input_ids": ids, "labels": labels})
    assert torch.equal(found.keep, keep_mask())
    assert mask_of({"input_ids": torch.randint(1, 9, (B, L)), "labels": labels}) == []


def test_positions_that_restart_are_packed_rows():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
    (found,) = mask_of({"input_ids": torch.randint(9, (1, 6)), "position_ids": positions})
    assert found.segments.tolist() == [[0, 0, 0, 1, 1, 2]]


def test_of_an_iterable_the_batch_that_drops_most_is_taken():
    full = {**tokens(), "attention_mask": torch.ones(B, L, dtype=torch.long)}
    found = Batch.of(Pooled(False), iter([full, tokens(), full]))
    assert int(found.values["attention_mask"].sum()) == int(keep_mask().sum())


# -- no trace ----------------------------------------------------------------------------------------------------------
class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.embed, self.dropout = nn.BatchNorm1d(D), nn.Embedding(50, D), nn.Dropout(0.1)
        self.fails = False

    def forward(self, input_ids, attention_mask):
        if self.fails:
            raise RuntimeError("as it happens")
        random.random()
        np.random.rand()
        return self.dropout(self.norm(self.embed(input_ids).transpose(1, 2))).transpose(1, 2)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("copies", [True, False], ids=["copied", "not copied"])
def test_an_audit_leaves_no_trace(fails, copies, monkeypatch):
    model, batch = Stateful(), tokens()
    model.norm.eval()
    model.embed.weight.grad = torch.ones_like(model.embed.weight)
    model.fails = fails
    if not copies:
        monkeypatch.setattr("maskwise.models.audit.subject.clone_model", lambda model: 1 / 0)
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(batch)
    modes = [module.training for module in model.modules()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    if fails:
        with pytest.raises(RuntimeError, match="as it happens"):
            mw.audit(model, batch)
    else:
        assert mw.audit(model, batch).leaks[0].cause == "BatchNorm over padding"
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, before[1][name]) for name, value in batch.items())
    assert [module.training for module in model.modules()] == modes
    assert bool((model.embed.weight.grad == 1).all())
    assert model.norm.weight.grad is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
