"""mw.max and mw.min: what torch's own return for what is kept, a value or a named pair."""

import pytest
import torch

import maskwise as mw
from maskwise import Mask

NAMES = ["max", "min"]
X = torch.tensor([[3.0, 1.0, 3.0, 9.0], [2.0, torch.nan, 5.0, 0.0], [4.0, 4.0, 4.0, 4.0]])
KEEP = torch.tensor([[True, True, True, False], [True, False, True, True], [False] * 4])


def kept(name, x, keep, dim):
    """Torch's own, of rows with the kept values alone; nothing where there is none."""
    rows = [
        (row[k], torch.arange(len(row))[k]) for row, k in zip(x.movedim(dim, -1), keep.movedim(dim, -1), strict=True)
    ]
    found = [(getattr(torch, name)(values, 0), places) for values, places in rows if len(places)]
    return torch.stack([pair.values for pair, _ in found]), torch.stack(
        [places[pair.indices] for pair, places in found]
    )


@pytest.mark.parametrize("route", ["kernel", "plain"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8])
def test_along_a_dim_it_is_the_pair_that_torch_gives_for_what_is_kept(name, dtype, route):
    x = X.nan_to_num().to(dtype)
    values, indices = kept(name, x, KEEP, 1)
    with mw.force(route):
        for mask in (KEEP, Mask(KEEP)):
            found = getattr(mw, name)(x, mask, 1)
            assert type(found) is getattr(torch.return_types, name)
            assert found.values.dtype == dtype
            assert torch.equal(found.values[:2], values)
            assert found.indices.tolist() == [*indices.tolist(), -1]


@pytest.mark.parametrize("name", NAMES)
def test_without_a_dim_it_is_one_value(name):
    expected = getattr(torch, name)(X[KEEP])
    assert torch.equal(getattr(mw, name)(X, KEEP), expected)
    assert getattr(mw, name)(X, KEEP, keepdim=True).shape == (1, 1)
    assert torch.equal(getattr(mw, name)(X > 2, KEEP), getattr(torch, name)((X > 2)[KEEP]))


@pytest.mark.parametrize(("name", "worst"), [("max", -torch.inf), ("min", torch.inf)])
def test_a_slice_with_nothing_kept_has_its_value_and_no_index(name, worst):
    call = getattr(mw, name)
    assert call(X, KEEP, 1).values[2] == worst
    assert call(X, KEEP, 1, empty=-7).values[2] == -7
    assert call(X, KEEP, 1, empty=-7).indices[2] == -1
    values, indices = call(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool), -1, keepdim=True)
    assert values.tolist() == [[worst], [worst]]
    assert indices.tolist() == [[-1], [-1]]
    assert call(torch.tensor(3.0), torch.tensor(True), 0).values == 3.0


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_goes_to_the_element_at_the_index_as_in_torch(name):
    ties = torch.tensor([[1.0, 1.0, 1.0], [2.0, 0.0, 2.0]])
    keep = torch.tensor([[False, True, True], [True, True, True]])
    x = ties.clone().requires_grad_()
    values, indices = getattr(mw, name)(x, keep, 1)
    values.sum().backward()
    expected = torch.zeros(2, 3).scatter_(1, indices[:, None], 1.0)
    assert torch.equal(x.grad, expected)
    assert x.grad[0].tolist() == [0.0, 1.0, 0.0]


def test_a_kept_nan_is_the_maximum():
    values, indices = mw.max(X, ~torch.zeros(3, 4, dtype=torch.bool), 1)
    assert values[1].isnan()
    assert indices[1] == 1


@pytest.mark.parametrize("name", NAMES)
def test_it_compiles_without_a_break(name):
    torch._dynamo.reset()

    def call(x, mask):
        return getattr(mw, name)(x, mask), *getattr(mw, name)(x, mask, 1, True)

    found = torch.compile(call, fullgraph=True, backend="eager")(X, KEEP)
    for mine, eager in zip(found, call(X, KEEP), strict=True):
        assert torch.equal(mine, eager)


def test_it_is_reported_by_its_own_name():
    with mw.explain() as log:
        mw.max(X, KEEP)
        mw.min(X, KEEP, 1)
    assert [call.op for call in log] == ["max", "min"]
