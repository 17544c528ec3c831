"""Law 2: True means keep. Every function equals a float64 loop that sees only what is kept."""

import pytest
import torch

import maskwise as mw
from maskwise.plan.planner import force
from tests.laws.samples import ROUTES, cases, outputs
from tests.laws.slices import expected


@pytest.mark.kernel
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("function", "sample"), cases())
def test_the_result_is_that_of_a_loop_over_what_is_kept(function, sample, route):
    with force(route):
        out = function.call(sample.x, sample.mask, **sample.kwargs)
    loops = expected(function, sample.x, sample.mask, **sample.kwargs)
    for mine, loop in zip(outputs(out), outputs(loops), strict=True):
        torch.testing.assert_close(mine, loop.to(mine.dtype), equal_nan=True)


@pytest.mark.parametrize(("function", "sample"), cases())
def test_a_mask_object_and_its_bool_tensor_give_the_same_bits(function, sample):
    from_bits = function.call(sample.x, sample.mask, **sample.kwargs)
    from_mask = function.call(sample.x, mw.Mask(sample.mask), **sample.kwargs)
    torch.testing.assert_close(outputs(from_mask), outputs(from_bits), rtol=0, atol=0, equal_nan=True)
