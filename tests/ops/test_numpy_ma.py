"""numpy.ma as a second opinion: it has masks too (True means drop there), and was written by others.

Where nothing of a slice is kept, numpy.ma masks the result: those places are compared with our empty value instead.
"""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import maskwise as mw
from maskwise.plan.dispatch import force
from tests.laws.functions import FUNCTIONS

ROUTES = ("plain", "kernel")


def present(*names):
    reason = "not a function of maskwise"
    return [pytest.param(n, marks=() if hasattr(mw, n) else pytest.mark.skip(reason=reason)) for n in names]


@st.composite
def arrays(draw, dtype=np.float64, max_dims=3):
    """(array, keep, axis): any shape of at least one element, kept values that may repeat."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=max_dims)))
    generator = np.random.default_rng(draw(st.integers(0, 2**16)))
    # Halves: sums, products and ties of them are exact in float64, so order of addition cannot show.
    x = generator.integers(-6, 7, shape) / 2
    keep = generator.random(shape) < draw(st.sampled_from([0.0, 0.3, 0.6, 1.0]))
    axis = draw(st.none() | st.integers(-len(shape), len(shape) - 1))
    return x.astype(dtype), keep, axis


def masked(x, keep):
    return np.ma.masked_array(x, mask=~keep)


def tensors(x, keep):
    """Our arguments, with NaN where numpy.ma is told to look away."""
    dirty = np.where(keep, x, np.nan) if x.dtype.kind == "f" else x
    return torch.from_numpy(dirty.copy()), torch.from_numpy(keep)


def assert_same(mine, theirs, empty):
    """Equal where numpy.ma has a result, and the empty value where it has none."""
    expected = np.ma.filled(np.ma.asarray(theirs, dtype=np.float64), empty)
    torch.testing.assert_close(mine.double(), torch.from_numpy(np.asarray(expected)), equal_nan=True)


REDUCTIONS = {
    "sum": lambda a, axis: a.sum(axis),
    "prod": lambda a, axis: a.prod(axis),
    "mean": lambda a, axis: a.mean(axis),
    "amax": lambda a, axis: a.max(axis),
    "amin": lambda a, axis: a.min(axis),
}


@pytest.mark.kernel
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", present(*REDUCTIONS))
@given(case=arrays())
def test_reductions_are_those_of_numpy_ma(name, route, case):
    x, keep, axis = case
    with force(route):
        out = getattr(mw, name)(*tensors(x, keep), axis)
    assert_same(out, REDUCTIONS[name](masked(x, keep), axis), FUNCTIONS[name].empty)


@pytest.mark.kernel
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize("name", present("var", "std"))
@given(case=arrays())
def test_var_and_std_are_those_of_numpy_ma(name, correction, route, case):
    x, keep, axis = case
    with force(route):
        out = getattr(mw, name)(*tensors(x, keep), axis, correction=correction)
    # numpy.ma masks a variance without degrees of freedom, where torch has NaN: ours is torch's.
    with np.errstate(all="ignore"):
        theirs = getattr(masked(x, keep), name)(axis, ddof=correction)
    assert_same(out, theirs, np.nan)


@pytest.mark.kernel
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", present("argmax", "argmin"))
@given(case=arrays())
def test_positions_hold_the_extreme_that_numpy_ma_finds(name, route, case):
    x, keep, axis = case
    with force(route):
        out = getattr(mw, name)(*tensors(x, keep), axis)
    array = masked(x, keep)
    extreme = np.ma.asarray(array.max(axis) if name == "argmax" else array.min(axis))
    empty = np.ma.getmaskarray(extreme)
    assert (out.numpy()[empty] == -1).all()
    theirs = np.asarray(getattr(array, name)(axis))
    # Several places may hold the extreme: both of us must point at a kept one, numpy.ma at the first.
    flat, kept = (x.reshape(-1), keep.reshape(-1)) if axis is None else (x, keep)
    at = 0 if axis is None else axis
    shape = np.shape(out)
    pointed = np.where(empty, 0, out.numpy())

    def value(of, index):
        return np.take_along_axis(of, np.expand_dims(np.asarray(index), at), at).reshape(shape)

    assert (value(flat, pointed) == value(flat, theirs))[~empty].all()
    assert value(kept, pointed)[~empty].all()


@pytest.mark.kernel
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.skipif(not hasattr(mw, "median"), reason="not a function of maskwise")
@given(case=arrays())
def test_quantile_one_half_is_the_median_of_numpy_ma_and_median_its_lower_neighbour(route, case):
    x, keep, axis = case
    array, (t, bits) = masked(x, keep), tensors(x, keep)
    with force(route):
        middle, lower = mw.quantile(t, bits, 0.5, axis), mw.median(t, bits, axis)
    # numpy.ma averages the two in the middle, as a quantile of 0.5 does; torch's median, and ours, is the lower one.
    theirs = np.ma.median(array, axis)
    assert_same(middle, theirs, np.nan)
    # The kept values of each slice come first, in order.
    filled = np.where(keep, x, np.inf)
    at, filled = (0, filled.reshape(-1)) if axis is None else (axis, filled)
    ordered = np.sort(filled, at)
    counts = np.asarray(keep.sum(axis))
    index = np.expand_dims(np.maximum(counts - 1, 0) // 2, at)
    expected = np.where(counts == 0, np.nan, np.take_along_axis(ordered, index, at).reshape(counts.shape))
    torch.testing.assert_close(lower, torch.from_numpy(np.asarray(expected)), equal_nan=True)


@pytest.mark.kernel
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", present("cumsum", "cumprod"))
@given(case=arrays())
def test_scans_are_those_of_numpy_ma_where_it_has_them(name, route, case):
    x, keep, axis = case
    axis = -1 if axis is None else axis
    with force(route):
        out = getattr(mw, name)(*tensors(x, keep), axis)
    theirs = getattr(masked(x, keep), name)(axis)
    # numpy.ma masks the dropped places; ours repeat the running value there, which its data does too.
    torch.testing.assert_close(out, torch.from_numpy(np.asarray(theirs.data)))


@pytest.mark.kernel
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.skipif(not hasattr(mw, "sort"), reason="not a function of maskwise")
@given(case=arrays())
def test_sort_is_that_of_numpy_ma_with_zeros_behind(route, case):
    x, keep, axis = case
    axis = -1 if axis is None else axis
    with force(route):
        values, indices = mw.sort(*tensors(x, keep), axis)
    theirs = np.ma.sort(masked(x, keep), axis)
    assert_same(values, theirs, 0.0)
    tail = np.ma.getmaskarray(theirs)
    assert (indices.numpy()[tail] == -1).all()
    chosen = np.take_along_axis(x, np.where(tail, 0, indices.numpy()), axis)
    assert (chosen == values.numpy())[~tail].all()
    assert np.take_along_axis(keep, np.where(tail, 0, indices.numpy()), axis)[~tail].all()


@pytest.mark.kernel
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", present("sum", "prod", "amax", "amin"))
@given(case=arrays(dtype=np.int32))
def test_reductions_of_integers_are_those_of_numpy_ma(name, route, case):
    x, keep, axis = case
    if name in ("amax", "amin"):
        keep = np.ones_like(keep) | keep
    with force(route):
        out = getattr(mw, name)(*tensors(x, keep), axis)
    assert_same(out, REDUCTIONS[name](masked(x, keep), axis), {"sum": 0, "prod": 1}.get(name, 0))
