import copy
import pickle

import pytest
import torch
from torch import nn

import maskwise as mw
from maskwise.models import PaddedRunWarning, UnsupportedModelError

from .contract import TOLERANCE, assert_packed_equals_padded, masks, routes

D, HEADS = 16, 4


def layer(**more):
    return nn.TransformerEncoderLayer(D, HEADS, 24, dropout=0.0, **{"batch_first": True, **more})


def encoder(**more):
    return nn.TransformerEncoder(layer(**more), 2, norm=nn.LayerNorm(D), enable_nested_tensor=False)


def attention(**more):
    return nn.MultiheadAttention(D, HEADS, **{"batch_first": True, **more})


def tokens(keep):
    return torch.randn(*keep.shape, D, generator=torch.Generator().manual_seed(0))


VARIANTS = [
    {},
    {"norm_first": True},
    {"activation": "gelu"},
    {"bias": False},
    {"batch_first": False},
    {"norm_first": True, "activation": torch.tanh, "batch_first": False},
]


@pytest.mark.parametrize("more", VARIANTS, ids=lambda more: "-".join(more) or "default")
@pytest.mark.parametrize("build", [encoder, layer])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_an_encoder_gives_the_same_packed(build, more, training):
    keep = masks()
    x = tokens(keep)
    turn = more.get("batch_first", True)

    def call(model):
        out = model(x if turn else x.transpose(0, 1), src_key_padding_mask=~keep)
        return out if turn else out.transpose(0, 1), []

    assert_packed_equals_padded(build(**more), call, keep, training=training, first=False)


MASKS = {
    "causal": nn.Transformer.generate_square_subsequent_mask(11),
    "causal-bool": torch.ones(11, 11, dtype=torch.bool).triu(1),
    "additive": torch.randn(11, 11, generator=torch.Generator().manual_seed(1)),
    "band": (torch.arange(11)[:, None] - torch.arange(11)).abs() > 3,
}


@pytest.mark.parametrize("kind", MASKS)
def test_an_attention_mask_goes_with_the_padding(kind):
    keep = torch.arange(11) < torch.tensor([11, 6, 4, 1])[:, None]
    x, mask = tokens(keep), MASKS[kind]
    padding = ~keep if mask.dtype is torch.bool else torch.where(keep, 0.0, -torch.inf)
    assert_packed_equals_padded(
        encoder(), lambda model: (model(x, mask=mask, src_key_padding_mask=padding), []), keep, first=False
    )


@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention_gives_the_same_packed(batch_first):
    keep = masks()
    x = tokens(keep) if batch_first else tokens(keep).transpose(0, 1).contiguous()

    def call(model):
        out, weights = model(x, x, x, key_padding_mask=~keep, need_weights=False)
        assert weights is None
        return out if batch_first else out.transpose(0, 1), []

    assert_packed_equals_padded(attention(batch_first=batch_first), call, keep, first=False)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_an_attention_mask_may_differ_between_rows_and_heads(kind):
    keep = masks()
    drop = torch.rand(5 * HEADS, 11, 11, generator=torch.Generator().manual_seed(2)) < 0.3
    drop[:, range(11), range(11)] = False
    # Each query keeps a key that is no padding, so that no row is NaN in the padded model.
    drop &= keep.repeat_interleave(HEADS, 0)[:, None]
    drop[:, :, 0] &= ~keep[:, 0].repeat_interleave(HEADS)[:, None]
    mask = drop if kind is torch.bool else torch.where(drop, -torch.inf, torch.randn(drop.shape))
    padding = ~keep if kind is torch.bool else torch.where(keep, 0.0, -torch.inf)
    x = tokens(keep)
    given = {"key_padding_mask": padding, "attn_mask": mask, "need_weights": False}
    assert_packed_equals_padded(attention(), lambda model: (model(x, x, x, **given)[0], []), keep, first=False)


def test_attention_whose_weights_are_requested_runs_padded_and_says_so_once():
    keep = masks()
    x, model = tokens(keep), attention().eval()
    expected = model(x, x, x, key_padding_mask=~keep)
    mw.unpad(model)
    with mw.explain() as log, pytest.warns(PaddedRunWarning, match=r"weights are requested.*Hint: need_weights=False"):
        found = model(x, x, x, key_padding_mask=~keep)
    assert routes(log) == ["padded"]
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    model(x, x, x, key_padding_mask=~keep)


def test_cross_attention_runs_padded():
    model, keep = attention().eval(), masks()
    q, x = torch.randn(5, 3, D), tokens(keep)
    expected, _ = model(q, x, x, key_padding_mask=~keep)
    found, _ = mw.unpad(model)(q, x, x, key_padding_mask=~keep)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("padding", [None, torch.zeros(5, 11, dtype=torch.bool)], ids=["no mask", "all kept"])
def test_nothing_to_drop_runs_as_before(padding):
    model, x = encoder().train(), tokens(masks())
    expected = model(x, src_key_padding_mask=padding)
    assert torch.equal(mw.unpad(model)(x, src_key_padding_mask=padding), expected)


def test_an_empty_row_gives_zeros_and_no_nan_in_any_gradient():
    keep = masks()
    keep[4] = False
    model, x = mw.unpad(encoder().train()), tokens(keep).requires_grad_()
    out = model(x, src_key_padding_mask=~keep)
    out.square().sum().backward()
    assert out[4].abs().max() == 0
    assert x.grad[4].abs().max() == 0
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_padding_may_be_nan():
    keep = masks()
    model, x = mw.unpad(encoder().train()), tokens(keep)
    out = model(torch.where(keep[..., None], x, torch.nan), src_key_padding_mask=~keep)
    assert torch.equal(out, model(torch.where(keep[..., None], x, 0.0), src_key_padding_mask=~keep))


def test_dropout_is_drawn_in_training_only():
    keep = masks()
    model, x = mw.unpad(nn.TransformerEncoderLayer(D, HEADS, 24, dropout=0.5, batch_first=True)), tokens(keep)
    first, second = (model.train()(x, src_key_padding_mask=~keep) for _ in range(2))
    assert not torch.equal(first, second)
    first, second = (model.eval()(x, src_key_padding_mask=~keep) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("build", [encoder, layer])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_unpadded_too_and_stands_on_its_own(build, copied):
    keep = masks()
    model, x = mw.unpad(build().eval()), tokens(keep)
    twin = copied(model)
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=~keep)
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(twin(x, src_key_padding_mask=~keep), expected)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = encoder()
        self.head = nn.Linear(D, 2)

    def forward(self, x, keep):
        return self.head(self.encoder(x, src_key_padding_mask=~keep)[:, 0])


def test_a_model_around_an_encoder_is_served_by_its_encoder():
    model, keep = Classifier().train(), torch.arange(11) < torch.tensor([11, 6, 4, 1])[:, None]
    x = tokens(keep)
    expected = model(x, keep)
    assert mw.unpad(model) is model
    with mw.explain() as log:
        torch.testing.assert_close(model(x, keep), expected, rtol=1e-4, atol=TOLERANCE)
    assert routes(log) == ["packed"]


def test_unpad_twice_is_unpad_once():
    model = mw.unpad(mw.unpad(encoder()))
    mw.models.repad(model)
    assert "forward" not in vars(model)
    with pytest.raises(ValueError, match="repad: `model` must be unpadded"):
        mw.models.repad(model)


class Own(nn.TransformerEncoderLayer):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


REFUSED = {
    "no adapter knows a part of it": lambda: nn.Linear(2, 2),
    "appends a key": lambda: nn.MultiheadAttention(D, HEADS, add_bias_kv=True),
    "a size of their own": lambda: nn.MultiheadAttention(D, HEADS, kdim=8, vdim=8),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_module_that_cannot_be_served_is_refused_with_the_reason(reason):
    with pytest.raises(UnsupportedModelError, match=reason) as refusal:
        mw.unpad(REFUSED[reason]())
    assert "Hint: write an adapter" in str(refusal.value)


def test_a_layer_with_a_forward_of_its_own_is_served_by_its_attention():
    model = mw.unpad(Own(D, HEADS, 24, dropout=0.0, batch_first=True).train())
    keep = masks()
    with mw.explain() as log:
        model(tokens(keep), src_key_padding_mask=~keep)
    assert [call.op for call in log] == ["unpad MultiheadAttention"]


def test_only_a_module_can_be_unpadded():
    with pytest.raises(TypeError, match=r"unpad: `model` must be a torch\.nn\.Module, got function"):
        mw.unpad(lambda x: x)


class DoubledAttention(nn.TransformerEncoderLayer):
    def _sa_block(self, *args, **kwargs):
        return 2 * super()._sa_block(*args, **kwargs)


class MeanNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) + x.mean(-2, keepdim=True)


class MeanLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(-2, keepdim=True))


def changed(**parts):
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    for name, part in parts.items():
        setattr(layer, name, part)
    return layer


MIXING = {
    "may mix tokens": lambda: changed(norm1=MeanNorm(16)),
    "normalizes more than a token": lambda: changed(norm2=nn.LayerNorm([11, 16])),
    "feed-forward block reads more": lambda: changed(linear1=MeanLinear(16, 32)),
    "block reads more than one": lambda: changed(activation=lambda x: x - x.mean(-2, keepdim=True)),
    "dropout1 reads more": lambda: changed(dropout1=MeanNorm(16)),
}


@pytest.mark.parametrize("reason", MIXING)
def test_a_layer_with_parts_that_mix_tokens_is_refused(reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        mw.unpad(MIXING[reason]())


def test_a_layer_with_an_attention_block_of_its_own_keeps_it_around_packed_attention():
    layer = DoubledAttention(16, 4, 32, dropout=0.0, batch_first=True).train()
    x, padding = torch.randn(2, 5, 16), mw.Mask.from_lengths([5, 2]).to_key_padding()
    expected = layer(x, src_key_padding_mask=padding)
    mw.unpad(layer)
    with mw.explain() as log:
        found = layer(x, src_key_padding_mask=padding)
    assert [(call.op, call.route) for call in log] == [("unpad MultiheadAttention", "packed")]
    torch.testing.assert_close(found[~padding], expected[~padding], rtol=1e-4, atol=1e-5)


def test_a_layer_with_an_activation_of_its_own_is_served():
    activation = nn.functional.silu
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, activation=activation).eval()
    x, padding = torch.randn(2, 5, 16), mw.Mask.from_lengths([5, 2]).to_key_padding()
    with torch.no_grad():
        expected = layer(x, src_key_padding_mask=padding)
        found = mw.unpad(layer)(x, src_key_padding_mask=padding)
    torch.testing.assert_close(found[~padding], expected[~padding], rtol=1e-4, atol=1e-5)
