import pytest
import torch
from torch import nn
from torch.nn import functional as F

import maskwise as mw
from tests.models.compress.networks import FeedForward

# Sums of a few float32 numbers near 1 in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _dense_wins(prefer):
    # What is folded is then a smaller dense layer, and equal times let it be folded.
    prefer()


def compressed(model, x):
    """The compressed model and its report, after its outputs were compared."""
    model.eval()
    found, report = mw.compress(model, x)
    with torch.no_grad():
        torch.testing.assert_close(found(x), model(x), **CLOSE)
    return found, report


def weight(layer):
    """The weight of a layer in a chain, which is not to be read as an attribute."""
    return layer.state_dict()["weight"]


def kill_rows(layer, *rows):
    with torch.no_grad():
        layer.weight[list(rows)] = 0
    return layer


def kill_columns(layer, *columns):
    with torch.no_grad():
        layer.weight[:, list(columns)] = 0
    return layer


@pytest.mark.parametrize("act", [nn.ReLU(), nn.GELU(), nn.Sigmoid(), nn.Softplus(), nn.ELU(inplace=True)])
def test_the_output_of_a_dead_unit_goes_through_the_activation_into_the_next_bias(act):
    first, second = kill_rows(nn.Linear(6, 5), 1, 3), nn.Linear(5, 2)
    model, report = compressed(nn.Sequential(first, act, nn.Dropout(0.5), second), torch.randn(4, 6))
    assert weight(model[0]).shape == (3, 6)
    assert weight(model[3]).shape == (2, 3)
    with torch.no_grad():
        constants = act(first.bias.clone())[[1, 3]]
        expected = second.bias + second.weight[:, [1, 3]] @ constants
    torch.testing.assert_close(model[3].bias, expected, **CLOSE)
    assert "2 inputs removed, 2 of them folded into its bias" in report["3"].reason


def test_a_next_layer_without_a_bias_gets_one_where_it_needs_one():
    model, _ = compressed(
        nn.Sequential(kill_rows(nn.Linear(4, 4), 0), nn.Sigmoid(), nn.Linear(4, 2, bias=False)), torch.randn(3, 4)
    )
    assert model[2].bias is not None
    silent = nn.Sequential(kill_rows(nn.Linear(4, 4, bias=False), 0), nn.ReLU(), nn.Linear(4, 2, bias=False))
    model, _ = compressed(silent, torch.randn(3, 4))
    assert model[2].bias is None


def test_an_unread_unit_is_removed_and_so_is_what_only_it_read():
    first, second, third = nn.Linear(3, 4), nn.Linear(4, 4), kill_columns(nn.Linear(4, 2), 2)
    with torch.no_grad():
        # Only unit 2 of the second reads unit 1 of the first.
        second.weight[[0, 1, 3], 1] = 0
    model, _ = compressed(nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third), torch.randn(5, 3))
    assert [tuple(weight(model[i]).shape) for i in (0, 2, 4)] == [(3, 3), (3, 3), (2, 3)]


def test_dead_units_that_make_others_dead_are_all_folded():
    first, second, third = kill_rows(nn.Linear(3, 4), 0), nn.Linear(4, 4), nn.Linear(4, 2)
    with torch.no_grad():
        second.weight[1, 1:] = 0  # reads unit 0 only, which is always the same
    model, _ = compressed(nn.Sequential(first, nn.GELU(), second, nn.GELU(), third), torch.randn(5, 3))
    assert [tuple(weight(model[i]).shape) for i in (0, 2, 4)] == [(3, 3), (3, 3), (2, 3)]


def test_a_layer_that_is_dead_altogether_keeps_one_unit():
    model, _ = compressed(
        nn.Sequential(kill_rows(nn.Linear(3, 4), 0, 1, 2, 3), nn.ReLU(), nn.Linear(4, 2)), torch.randn(5, 3)
    )
    assert weight(model[0]).shape == (1, 3)


def test_batch_norm_between_shrinks_along_and_its_shift_is_folded():
    model = nn.Sequential(kill_rows(nn.Linear(3, 4), 0, 2), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[1].running_mean.normal_(), model[1].running_var.uniform_(0.5, 2), model[1].bias.normal_()
    model, _ = compressed(model, torch.randn(5, 3))
    assert model[1].num_features == 2
    assert model[3].in_features == 2


def test_a_norm_over_units_or_a_norm_of_another_dim_breaks_the_chain():
    for norm, x in ((nn.LayerNorm(4), torch.randn(5, 3)), (nn.BatchNorm1d(4), torch.randn(5, 4, 3))):
        model, _ = compressed(nn.Sequential(kill_rows(nn.Linear(3, 4), 0), norm, nn.Linear(4, 2)), x)
        assert model[0].out_features == 4


@pytest.mark.parametrize("padding", [0, 1])
def test_channels_fold_through_norm_activation_and_pool_where_the_border_allows_it(padding):
    first, norm, second = kill_rows(nn.Conv2d(2, 4, 3), 0, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3, padding=padding)
    with torch.no_grad():
        first.bias.copy_(torch.tensor([1.0, -1.0, 0.5, 0.5]))
    model, _ = compressed(nn.Sequential(first, norm, nn.ReLU(), nn.MaxPool2d(2), second), torch.randn(2, 2, 12, 12))
    # Channel 1 is 0 after the activation; channel 0 is not, and with padding the border does not see it.
    assert model[0].out_channels == (2 if padding == 0 else 3)
    assert model[1].num_features == model[4].in_channels == model[0].out_channels


def test_grouped_convolutions_are_no_chain():
    model = nn.Sequential(kill_rows(nn.Conv2d(4, 4, 1), 0), nn.ReLU(), nn.Conv2d(4, 4, 1, groups=2))
    model, _ = compressed(model, torch.randn(1, 4, 3, 3))
    assert model[0].out_channels == 4


def test_nested_sequentials_are_one_chain_unless_one_has_hooks():
    def nested():
        return nn.Sequential(nn.Sequential(kill_rows(nn.Linear(3, 4), 0), nn.ReLU()), nn.Sequential(nn.Linear(4, 2)))

    model, _ = compressed(nested(), torch.randn(5, 3))
    assert model[0][0].out_features == 3
    seen = nested()
    seen[0].register_forward_hook(lambda *_: None)
    model, _ = compressed(seen, torch.randn(5, 3))
    assert model[0][0].out_features == 4


class PeeksInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(kill_rows(nn.Linear(3, 4), 0), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, x):
        return self.body(x).sum() + self.body[0](x).sum()


class Branches(FeedForward):
    def forward(self, x):
        hidden = self.up(x)
        return self.down(F.relu(hidden)) + hidden.sum(-1, keepdim=True)


class Decides(FeedForward):
    def forward(self, x):
        hidden = self.up(x)
        return self.down(hidden if hidden.sum() > 1e9 else F.relu(hidden))


def test_layers_that_are_used_elsewhere_or_under_a_condition_are_not_folded():
    model, _ = compressed(PeeksInside(), torch.randn(5, 3))
    assert model.body[0].out_features == 4
    for kind in (Branches, Decides):
        block = kind()
        kill_rows(block.up, 0)
        model, _ = compressed(block, torch.randn(5, 16))
        assert model.up.out_features == 32


def test_a_forward_that_can_be_traced_and_torchs_encoder_layer_are_folded():
    block = FeedForward()
    kill_rows(block.up, 0, 1)
    model, _ = compressed(block, torch.randn(5, 16))
    assert model.up.out_features == model.down.in_features == 30
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu")
    kill_rows(layer.linear1, 0, 1)
    model, _ = compressed(layer, torch.randn(2, 5, 16))
    assert model.linear1.out_features == model.linear2.in_features == 30
