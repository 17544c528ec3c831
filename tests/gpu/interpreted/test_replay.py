"""A repeated call starts the launches that the first one recorded: no geometry, no grid, and the same results."""

import pytest
import torch
import torch.nn.functional as F

import maskwise as mw
from maskwise.ops.gpu import geometry, launch, replay
from maskwise.plan import dispatch

SHAPE = (5, 40)
CLASSES = torch.tensor([3, 0, 39, 7, 1])


def operands(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(SHAPE, generator=generator), torch.rand(SHAPE, generator=generator) < 0.5


FUNCTIONS = {
    "sum": lambda x, m: mw.sum(x, m, -1),
    "mean": lambda x, m: mw.mean(x, m, 0),
    "var": lambda x, m: mw.var(x, m, -1),
    "amax": lambda x, m: mw.amax(x, m, -1),
    "logsumexp": lambda x, m: mw.logsumexp(x, m, -1),
    "any": lambda x, m: mw.any(x, m, -1),
    "softmax": lambda x, m: mw.softmax(x, m, -1),
    "standardize": lambda x, m: mw.standardize(x, m, -1),
    "cumsum": lambda x, m: mw.cumsum(x, m, -1),
    "fill": lambda x, m: mw.fill(x, m, -1.0),
}


@pytest.fixture(autouse=True)
def _forget():
    dispatch.invalidate()
    yield
    dispatch.invalidate()


def recorded():
    return [value for key, value in dispatch.cache.items() if key[0] == "launch"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_second_call_lays_nothing_out_and_gives_what_the_kernel_gives(name, monkeypatch):
    call = FUNCTIONS[name]
    with dispatch.force("kernel"):
        call(*operands(0))
        assert [type(found) for found in recorded()] == [replay.Recording]
        x, mask = operands(1)
        monkeypatch.setattr(geometry, "merge", None)
        again = call(x, mask)
        monkeypatch.undo()
        dispatch.invalidate()
        torch.testing.assert_close(again, call(x, mask), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["sum", "var", "softmax", "cumsum"])
def test_gradients_are_replayed_too(name, monkeypatch):
    call = FUNCTIONS[name]

    def gradient(seed):
        x, mask = operands(seed)
        x.requires_grad_()
        out = call(x, mask)
        return torch.autograd.grad(out, x, torch.ones_like(out))[0]

    with dispatch.force("kernel"):
        gradient(0)
        monkeypatch.setattr(geometry, "merge", None)
        again = gradient(1)
        monkeypatch.undo()
        dispatch.invalidate()
        assert torch.equal(again, gradient(1))


@pytest.mark.parametrize(
    ("call", "values"),
    [
        (lambda x, m, v: mw.standardize(x, m, -1, eps=v), (0.5, 0.25, 1e-5)),
        (lambda x, m, v: mw.normalize(x, m, -1, eps=v), (0.5, 8.0, 1e-12)),
        (lambda x, m, v: mw.loss(F.huber_loss, x, torch.zeros_like(x), m, delta=v), (0.5, 0.25, 1.0)),
        (lambda x, m, v: mw.loss(F.cross_entropy, x, CLASSES, m[:, 0], label_smoothing=v), (0.1, 0.05, 0.01)),
    ],
    ids=["standardize", "normalize", "huber_loss", "cross_entropy"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_number_that_changes_with_every_call_records_nothing_anew(call, values, dtype):
    x, mask = operands(0)
    x = x.to(dtype).requires_grad_()
    many = None
    for value in values:
        with dispatch.force("kernel"):
            out = call(x, mask, value)
            (mine,) = torch.autograd.grad(out.sum(), x)
        many = len(recorded()) if many is None else many
        assert len(recorded()) == many
        with dispatch.force("plain"):
            truth = call(x, mask, value)
            (of_x,) = torch.autograd.grad(truth.sum(), x)
        torch.testing.assert_close(out, truth)
        torch.testing.assert_close(mine, of_x, rtol=1e-5 if dtype is torch.float32 else 1e-10, atol=1e-6)


def test_operands_of_other_strides_alignment_or_scalars_are_launches_of_their_own():
    x, mask = operands(0)
    with dispatch.force("kernel"):
        for given in (x, x.t().contiguous().t(), torch.rand(5 * 40 + 1)[1:].view(SHAPE), x.double()):
            expected = torch.where(mask, given, 0.0).sum(-1)
            torch.testing.assert_close(mw.sum(given, mask, -1), expected)
        mw.sum(x, mask, 0)
    assert len(recorded()) == 5


def test_a_launcher_that_computes_besides_is_not_replayed():
    def launcher(x):
        return x + 1

    run = replay.replayed("test", launcher)
    x = torch.ones(3)
    assert run(x).tolist() == run(x).tolist() == [2.0, 2.0, 2.0]
    assert recorded() == [None]


def test_launches_that_are_recorded_are_not_replayed():
    x, mask = operands(0)
    with dispatch.force("kernel"):
        mw.sum(x, mask, -1)
        with launch.recording() as launches:
            mw.sum(x, mask, -1)
    assert len(launches) == 1
