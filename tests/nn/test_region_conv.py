"""Convolutions of regions as layers."""

import pytest
import torch
from torch import nn

import maskwise as mw

LAYERS = [(mw.nn.RegionConv1d, nn.Conv1d, mw.conv1d, (9,)), (mw.nn.RegionConv2d, nn.Conv2d, mw.conv2d, (9, 8))]


@pytest.mark.parametrize(("ours", "torchs", "function", "sizes"), LAYERS)
def test_it_has_torchs_parameters_and_gives_what_the_function_gives(ours, torchs, function, sizes):
    torch.manual_seed(0)
    plain, layer = (cls(3, 4, 3, stride=2, padding=1, dilation=2) for cls in (torchs, ours))
    layer.load_state_dict(plain.state_dict())
    x, mask = torch.randn(2, 3, *sizes), torch.rand(2, *sizes) < 0.5
    torch.testing.assert_close(layer(x), plain(x), rtol=0, atol=0)
    expected = function(x, plain.weight, plain.bias, 2, 1, 2, mask=mask, other=1.5)
    torch.testing.assert_close(layer(x, mask, other=1.5), expected, rtol=0, atol=0)


@pytest.mark.parametrize(("ours", "torchs", "function", "sizes"), LAYERS)
def test_masks_flow_along(ours, torchs, function, sizes):
    first, second = ours(3, 4, 3, stride=2, padding=1), ours(4, 2, 3, padding="same")
    x, mask = torch.randn(2, 3, *sizes), torch.rand(2, *sizes) < 0.5
    hidden, wanted = first(x, mask), first.outputs(mask)
    assert tuple(wanted.shape) == (2, *hidden.shape[2:])
    assert (hidden[~wanted.to_bool().unsqueeze(1).expand(hidden.shape)] == 0).all()
    assert second.outputs(wanted).equal(wanted)
    torch.testing.assert_close(second(hidden, wanted), second(hidden, wanted.to_bool()), rtol=0, atol=0)
