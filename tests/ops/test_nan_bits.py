"""A kernel's bfloat16 NaN has the bits of torch's own conversion, in whole vectors and at their ends alike."""

import pytest
import torch

import maskwise as mw
from maskwise.plan.dispatch import force
from tests.simd import SIMD_LEVELS, at_level

#: Quiet and signalling, of either sign.
NANS = torch.tensor([0x7FC1, 0x7FFF, -0x003F, -1, 0x7F81], dtype=torch.int16).view(torch.bfloat16)
TORCH = torch.tensor([float("nan")], dtype=torch.bfloat16).view(torch.int16)
FUNCTIONS = {
    "softmax": lambda x, mask: mw.softmax(x, mask, -1),
    "log_softmax": lambda x, mask: mw.log_softmax(x, mask, -1),
    "normalize": lambda x, mask: mw.normalize(x, mask, -1),
    "standardize": lambda x, mask: mw.standardize(x, mask, -1),
    "cumsum": lambda x, mask: mw.cumsum(x, mask, -1),
    "cumsum of columns": lambda x, mask: mw.cumsum(x, mask, 0),
    "sum": lambda x, mask: mw.sum(x, mask, 0),
    "sum of rows": lambda x, mask: mw.sum(x, mask, -1),
    "logsumexp": lambda x, mask: mw.logsumexp(x, mask, -1),
}


@pytest.mark.kernel
@pytest.mark.parametrize("level", SIMD_LEVELS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_nan_has_the_bits_of_torchs_conversion(name, level):
    for size in (1, 7, 16, 37, 130):
        x = NANS.repeat(size)[: 3 * size].reshape(3, size)
        with at_level(level), force("kernel"):
            out = FUNCTIONS[name](x, torch.ones_like(x, dtype=torch.bool))
        bits = out.view(torch.int16).reshape(-1)
        assert torch.equal(bits, TORCH.expand_as(bits)), f"{size} elements: {bits.unique()}"
