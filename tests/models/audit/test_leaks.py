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


class ByIds(nn.Module):
    """Makes its mask of token ids, of which 0 is padding."""

    def __init__(self, pool):
        super().__init__()
        self.embed, self.head, self.pool = nn.Embedding(50, D), nn.Linear(D, 3), pool

    def forward(self, input_ids):
        return self.head(self.pool(self.embed(input_ids), input_ids != 0))


@pytest.mark.parametrize(
    ("pool", "causes"),
    [
        (lambda h, keep: mw.mean(h, keep[..., None], dim=1), []),
        (lambda h, keep: h.mean(1) * keep.any(1, keepdim=True), ["mean without mask"]),
    ],
    ids=["masked", "not masked"],
)
def test_a_mask_that_the_model_makes_of_token_ids_is_no_leak(pool, causes):
    keep = keep_mask()
    ids = torch.randint(1, 50, (B, L)).masked_fill(~keep, 0)
    assert [leak.cause for leak in leaks_of(ByIds(pool), ids, mask=keep) if not leak.only_nan] == causes


def test_ids_that_the_model_looks_up_by_itself_are_replaced():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(50, D))

        def forward(self, input_ids):
            return F.embedding(input_ids, self.weight).mean(1)

    ids = torch.randint(1, 50, (B, L)).masked_fill(~keep_mask(), 0)
    assert [leak.cause for leak in leaks_of(Functional(), ids, mask=keep_mask())] == ["mean without mask"]


def test_more_padding_is_added_for_every_stride():
    class Strided(nn.Module):
        """Zeroes padding, and counts it in a norm."""

        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv1d(1, D, 8, stride=8), nn.BatchNorm1d(D)

        def forward(self, x, mask):
            h = self.conv(x.masked_fill(~mask, 0.0)[:, None])
            keep = mask[:, ::8]
            return self.norm(h * keep[:, None]).transpose(1, 2)

    keep = mw.Mask.from_lengths([80, 24, 40, 16]).to_bool()
    (leak,) = [leak for leak in leaks_of(Strided(), (torch.randn(4, 80), keep)) if not leak.only_nan]
    assert (leak.module, leak.cause, leak.probe) == ("norm", "BatchNorm over padding", "amount")


def test_a_model_that_refuses_more_padding_is_audited():
    class Fixed(nn.Module):
        def forward(self, x, mask):
            if x.shape[1] != L:
                raise ValueError("as many positions as ever")
            return mw.mean(x, mask[..., None], dim=1)

    assert leaks_of(Fixed(), (floats(), keep_mask())) == []


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        (nn.Conv1d(D, D, 3, padding=1), "mw.conv1d(x, model.layer.weight, model.layer.bias, padding=1, mask=mask)"),
        (
            nn.Conv1d(D, D, 5, padding="same", groups=2),
            "mw.conv1d(x, model.layer.weight, model.layer.bias, padding='same', groups=2, mask=mask)",
        ),
        (
            nn.ConvTranspose1d(D, D, 3, padding=1),
            "mw.conv_transpose1d(x, model.layer.weight, model.layer.bias, padding=1, mask=mask)",
        ),
    ],
    ids=["padding", "same and groups", "transposed"],
)
def test_the_repair_of_a_convolution_runs_as_it_is_written(layer, line):
    class Model(nn.Module):
        def __init__(self, repaired):
            super().__init__()
            self.layer, self.repaired = layer, repaired

        def forward(self, x, mask):
            x, names = x.transpose(1, 2), {"mw": mw, "model": self, "mask": mask}
            h = eval(line, names, {"x": x}) if self.repaired else self.layer(x)
            return h.transpose(1, 2)

    batch = (floats(), keep_mask())
    assert leaks_of(Model(False), batch)[0].repair == line
    assert [leak for leak in leaks_of(Model(True), batch) if not leak.only_nan] == []


@pytest.mark.parametrize(
    ("index", "side", "line"),
    [
        (-1, "right", "x[torch.arange(len(x)), mask.sum(1) - 1]"),
        (0, "left", "x[torch.arange(len(x)), mask.long().argmax(1)]"),
    ],
)
def test_the_repair_of_a_fixed_position_follows_the_side_of_the_padding(index, side, line):
    class Model(nn.Module):
        def __init__(self, repaired):
            super().__init__()
            self.embed, self.repaired = nn.Embedding(50, D), repaired

        def forward(self, input_ids, attention_mask):
            x, mask = self.embed(input_ids), attention_mask
            return eval(line, {"torch": torch}, {"x": x, "mask": mask}) if self.repaired else x[:, index]

    first = leaks_of(Model(False), tokens(side))[0]
    assert first.cause == "fixed position"
    assert first.repair.startswith(line)
    assert leaks_of(Model(True), tokens(side)) == []


def test_the_repair_of_a_packed_batch_runs_as_it_is_written():
    line = "mw.attention(q, k, v, mw.Mask.from_segments((position_ids == 0).cumsum(1))[:, None], is_causal=True)"

    class Model(nn.Module):
        def __init__(self, repaired):
            super().__init__()
            self.embed, self.repaired = nn.Embedding(50, D), repaired

        def forward(self, input_ids, position_ids):
            q = k = v = self.embed(input_ids)[:, None]
            if self.repaired:
                return eval(line, {"mw": mw}, {"q": q, "k": k, "v": v, "position_ids": position_ids})[:, 0]
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]

    batch = {"input_ids": torch.randint(50, (1, 6)), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0]])}
    assert leaks_of(Model(False), batch)[0].repair == line
    assert leaks_of(Model(True), batch) == []


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
        self.fails, self.calls = False, 0
        self.register_buffer("average", torch.zeros(3))

    def forward(self, input_ids, attention_mask):
        if self.fails:
            raise RuntimeError("as it happens")
        random.random()
        np.random.rand()
        self.calls += 1
        self.last = input_ids
        if self.training:
            self.average = self.average + 1
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
    attributes, average = set(vars(model)), model.average
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    if fails:
        with pytest.raises(RuntimeError, match="as it happens"):
            mw.audit(model, batch)
    else:
        assert mw.audit(model, batch).leaks[0].cause == "BatchNorm over padding"
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, before[1][name]) for name, value in batch.items())
    assert [module.training for module in model.modules()] == modes
    assert (set(vars(model)), model.calls) == (attributes, 0)
    assert model.average is average
    assert bool((model.embed.weight.grad == 1).all())
    assert model.norm.weight.grad is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()


def test_a_shuffled_data_loader_draws_no_random_number():
    ids = tokens()
    rows = torch.utils.data.TensorDataset(ids["input_ids"], ids["attention_mask"])
    model, loader = Pooled(True), torch.utils.data.DataLoader(rows, batch_size=B, shuffle=True)
    state = torch.get_rng_state()
    mw.audit(model, loader)
    assert torch.equal(torch.get_rng_state(), state)


# -- models of any form ------------------------------------------------------------------------------------------------
class Form(nn.Module):
    """A layer, a convolution, and a forward of the test's own."""

    def __init__(self, forward):
        super().__init__()
        self.layer, self.conv = nn.Linear(D, D), nn.Conv1d(D, D, 3, stride=2, padding=1)
        self.token, self.compute = nn.Parameter(torch.randn(1, 1, D)), forward

    def forward(self, x, mask):
        return self.compute(self, x, mask)


def finite_causes(model, batch=None):
    found = leaks_of(model, (floats(), keep_mask()) if batch is None else batch)
    return [(leak.module, leak.cause) for leak in found if not leak.only_nan]


@pytest.mark.parametrize(
    "cut",
    [
        lambda m, h: h[:, ::2],
        lambda m, h: h[:, 1:],
        lambda m, h: h[:, :-1],
        lambda m, h: torch.cat([m.token.expand(B, 1, D), h], 1),
        lambda m, h: torch.cat([h, m.token.expand(B, 1, D)], 1),
        lambda m, h: h.reshape(B, L // 2, 2 * D),
        lambda m, h: F.avg_pool1d(h.transpose(1, 2), 2),
    ],
    ids=["every second", "without the first", "without the last", "prepended", "appended", "pairs", "pooled"],
)
def test_positions_that_are_cut_or_joined_are_followed(cut):
    assert finite_causes(Form(lambda m, x, mask: cut(m, m.layer(x)))) == []
    mixed = Form(lambda m, x, mask: cut(m, m.layer(x) + x.mean(1, keepdim=True)))
    assert finite_causes(mixed) == [("", "mean without mask")]


def test_the_windows_of_a_strided_layer_are_those_of_each_sequence_alone():
    leaky = Form(lambda m, x, mask: m.conv(x.transpose(1, 2)).transpose(1, 2))
    assert finite_causes(leaky) == [("conv", "convolution over padding")]
    filled = Form(lambda m, x, mask: m.conv(mw.fill(x, mask[..., None], 0).transpose(1, 2)).transpose(1, 2))
    assert finite_causes(filled) == []


@pytest.mark.parametrize(("rows", "length"), [(6, 6), (D, D), (2, D)])
def test_sizes_that_agree_by_chance_give_the_same_cause(rows, length):
    keep = mw.Mask.from_lengths([max(1, 5 * row % length) for row in range(rows)], max_len=length).to_bool()
    batch = {"input_ids": torch.randint(1, 50, (rows, length)), "attention_mask": keep.long()}
    assert finite_causes(Pooled(False), batch) == [("", "mean without mask")]


@pytest.mark.parametrize("repaired", [True, False])
def test_half_precision_shows_positions_that_count_padding(repaired):
    build, batch, module, cause, *_ = LEAKS["left-padded positions"]
    assert finite_causes(build(repaired).to(torch.bfloat16), batch()) == ([] if repaired else [(module, cause)])


@pytest.mark.parametrize(
    ("forward", "causes"),
    [
        (lambda m, x, mask: m.layer(x).mean(1).square().mean(), [("", "mean without mask")]),
        (
            lambda m, x, mask: F.cross_entropy(m.layer(x).flatten(0, 1), torch.zeros(B * L, dtype=torch.long)),
            [("", "loss over dropped positions")],
        ),
        (lambda m, x, mask: mw.mean(m.layer(x), mask[..., None], dim=(1, 2)).mean(), []),
        (lambda m, x, mask: ((h := m.layer(x)).square().mean(), h), [("loss", "loss over dropped positions")]),
    ],
    ids=["mean", "cross entropy", "masked", "first of a tuple"],
)
def test_a_loss_that_the_model_returns_is_compared(forward, causes):
    assert finite_causes(Form(forward)) == causes


def test_compiled_modules_are_audited_as_they_run_eagerly():
    model = torch.compile(Pooled(False), backend="eager")
    (leak,) = leaks_of(model, tokens())
    assert leak.cause == "mean without mask"
    assert leak.module == "_orig_mod"


def test_a_model_that_returns_nothing_to_compare_is_reported():
    class Silent(nn.Linear):
        def forward(self, x, mask):
            super().forward(x)
            return "done"

    report = mw.audit(Silent(D, D), (floats(), keep_mask()))
    assert report.notes == ("the model returns no tensor with rows of the batch, and no loss: a leak could not show",)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: (Pooled(False).to("meta"), tokens()), "model.to_empty"),
        (lambda: (Pooled(False), {name: each.to("meta") for name, each in tokens().items()}), "'input_ids' on meta"),
        (lambda: (Pooled(False), {name: each[:0] for name, each in tokens().items()}), r"shape \(0, 12\)"),
        (lambda: (torch.jit.trace(Pooled(False), tuple(tokens().values())), tokens()), "before torch.jit"),
    ],
    ids=["model on meta", "batch on meta", "no rows", "a script module"],
)
def test_what_cannot_be_audited_is_refused_with_a_hint(make, message):
    with pytest.raises(mw.errors.ArgumentError, match=message):
        mw.audit(*make())
