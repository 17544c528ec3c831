"""apply accepts row-wise functions, rejects others with the reason, and gives the same on every route."""

import functools
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import maskwise as mw
from maskwise.errors import ArgumentError, MaskwiseError, ShapeError
from maskwise.ops.select import rowwise_check


@pytest.fixture(autouse=True)
def _nothing_is_judged_yet():
    rowwise_check._cache.clear()


X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
MASK = mw.Mask.from_lengths([6, 2, 1, 3])
HALF = (torch.bfloat16, torch.float16)
every_route = pytest.mark.parametrize("route", ["kept", "dense", None])
LSTM, ATTENTION, NORM = nn.LSTM(8, 8), nn.MultiheadAttention(8, 2), nn.BatchNorm1d(8)
MIXING = {
    "mean": lambda t: t - t.mean(0),
    "std": lambda t: t / t.std(),
    "softmax": nn.Softmax(0),
    "cumsum": lambda t: t.cumsum(0),
    "sort": lambda t: t.sort(0).values,
    "flip": lambda t: t.flip(0),
    "first row": lambda t: t - t[:1],
    "last row": lambda t: t - t[-1:],
    "how many": lambda t: t / len(t),
    "which": lambda t: t * torch.arange(len(t))[:, None],
    "larger than most": lambda t: (t > t.median(0).values).float(),
    "ranks": lambda t: t.argsort(0),
    "one of two results": lambda t: (t, t.roll(1, 0)),
    "random": lambda t: F.dropout(t - t.mean(0), 0.5),
    "noise": lambda t: t.mean(0) + torch.randn_like(t),
    "recurrent": lambda t: LSTM(t)[0],
    "attention": lambda t: ATTENTION(t, t, t, need_weights=False)[0],
    "partial": functools.partial(torch.softmax, dim=0),
    "batch norm": nn.BatchNorm1d(8),
    "batch norm inside": nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()),
    "batch norm of a batch": nn.BatchNorm1d(8, track_running_stats=False).eval(),
    "batch norm in a lambda": lambda t: NORM(t),
    "batch norm as a method": NORM.forward,
    "functional batch norm": lambda t: F.batch_norm(t, None, None, training=True),
    "convolution": nn.Conv1d(8, 8, 3, padding=1),
    "convolution of 12 channels": nn.Conv1d(12, 12, 3, padding=1),
    "functional convolution": lambda t: F.conv1d(t, torch.ones(8, 8, 3), padding=1),
    "too few rows": lambda t: t[1:],
    "too many rows": lambda t: t.repeat(2, 1),
    "no rows": lambda t: t.sum(),
}


@every_route
@pytest.mark.parametrize("name", MIXING)
def test_a_function_that_mixes_rows_is_rejected_on_every_route_with_the_reason(name, route):
    before = X.clone()
    with mw.force(route), pytest.raises(MaskwiseError, match=r"^apply: `fn` must .*row.* Hint: "):
        mw.apply(MIXING[name], X, mask=MASK)
    assert torch.equal(X, before)


@every_route
def test_a_rejection_is_repeated_and_names_the_reason(route):
    for _ in range(2):
        with mw.force(route), pytest.raises(ArgumentError, match=r"<lambda>: a row that among others differs by \d"):
            mw.apply(MIXING["mean"], X, mask=MASK)
        with mw.force(route), pytest.raises(ArgumentError, match=r"BatchNorm1d, which in training mode normalizes"):
            mw.apply(NORM, X, mask=MASK)
    assert torch.equal(NORM.running_mean, torch.zeros(8))
    assert NORM.num_batches_tracked == 0


def test_a_convolution_leads_to_its_own_function():
    conv = nn.Conv1d(8, 8, 3, padding=1)
    with pytest.raises(ArgumentError, match=r"got Conv1d: .* Hint: mw.conv1d\(x, fn.weight, fn.bias"):
        mw.apply(conv, X, mask=MASK)


ROWWISE = {
    "linear": nn.Linear(8, 3),
    "network": nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.LayerNorm(8)),
    "in place inside": nn.Sequential(nn.Linear(8, 32), nn.ReLU(inplace=True), nn.Linear(32, 8)),
    "in place": nn.ReLU(inplace=True),
    "in place, by hand": lambda t: t.mul_(2.0).add_(1.0),
    "batch norm in eval mode": nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval(),
    "convolution of each row": lambda t: F.conv1d(t[:, None], torch.ones(2, 1, 3)),
    "softmax": nn.Softmax(-1),
    "largest": lambda t: t.argmax(-1),
    "two results": lambda t: (t.norm(dim=-1), t > 0),
    "constant": lambda t: torch.ones_like(t),
    "not finite": lambda t: t.log(),
    "partial": functools.partial(torch.softmax, dim=-1),
    "method": nn.Linear(8, 3).forward,
}


@pytest.mark.parametrize("name", ROWWISE)
def test_an_accepted_function_gives_the_same_on_every_route_and_x_is_not_modified(name):
    fn, before, found = ROWWISE[name], X.clone(), []
    rows = X.reshape(-1, 8).clone()
    expected = fn(rows)
    for mask in (MASK, mw.Mask.full((4, 6))):
        kept = mask.to_bool().reshape(-1)
        for route in ("kept", "dense", None, "kept"):
            with mw.force(route):
                found = mw.apply(fn, X, mask=mask)
            pairs = zip(*(each if isinstance(each, tuple) else (each,) for each in (found, expected)), strict=True)
            for ours, theirs in pairs:
                # Products of 12 and of 24 rows are added up in another order.
                torch.testing.assert_close(ours.flatten(0, 1)[kept], theirs[kept], equal_nan=True)
            assert torch.equal(X, before)


def test_images_may_be_convolved_one_by_one():
    images, mask = torch.randn(5, 3, 8, 8), torch.tensor([True, False, True, True, False])
    conv = nn.Conv2d(3, 4, 3)
    torch.testing.assert_close(mw.apply(conv, images, mask=mask)[mask], conv(images[mask]))


@every_route
def test_random_functions_are_accepted_and_the_rng_state_is_restored(route):
    def draws(fn):
        torch.manual_seed(3)
        with mw.force(route):
            return mw.apply(fn, X, mask=MASK), torch.rand(3)

    for make in (lambda: nn.Dropout(0.5), lambda: lambda t: t + torch.randn_like(t), lambda: nn.Dropout(0.01)):
        fn = make()
        # Checked at its first use, and not at the second.
        for first, second in zip(draws(fn), draws(fn), strict=True):
            assert torch.equal(first, second)


def test_a_function_with_a_generator_of_its_own_is_accepted():
    generator = torch.Generator().manual_seed(0)
    out = mw.apply(lambda t: t + torch.rand(t.shape, generator=generator), X, mask=MASK)
    assert (out[MASK.to_bool()] >= X[MASK.to_bool()]).all()


@every_route
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("fn", [torch.add, torch.sub, torch.mul, torch.div])
def test_an_elementwise_function_is_given_rows_of_as_many_dims_by_every_route(fn, learns, route):
    y, z = torch.randn(5, 5, 5).requires_grad_(learns), torch.rand(5, 5) + 1
    some = torch.zeros(5, 5, dtype=torch.bool)
    some[0] = True
    for mask in (some, torch.ones_like(some), torch.zeros_like(some)):
        # With 5 rows of 5 features, rows of z would be taken for features.
        for other in (z, z[:1], z[0], torch.rand(5, 5, 5, 5)):
            with mw.force(route), pytest.raises(ShapeError, match="`more` must have as many dims as x, 3"):
                mw.apply(fn, y, other, mask=mask)
        for other in (z[..., None], z[:1, :, None], torch.rand(5, 5, 5) + 1, torch.tensor(2.0), 2.0):
            with mw.force(route):
                out = mw.apply(fn, y, other, mask=mask)
            torch.testing.assert_close(out, torch.where(mask[..., None], fn(y, other), 0.0))
    # A mask of single elements leaves rows without features, along which nothing broadcasts.
    with mw.force(route):
        single = mw.apply(fn, y, z[:, :1, None], mask=y > 0)
    torch.testing.assert_close(single, torch.where(y > 0, fn(y, z[:, :1, None]), 0.0))


@every_route
def test_functions_that_mix_at_random_are_rejected_for_every_draw(route):
    def permuted(rows):
        return rows[torch.randperm(len(rows))]

    def sign_permuted(rows):
        return permuted(rows) > 0

    for seed in range(30):
        torch.manual_seed(seed)
        for fn in (
            permuted,
            sign_permuted,
            lambda t: F.dropout(t, 0.5).cumsum(0),
            lambda t: t.sort(0)[0] * torch.rand(1),
        ):
            with mw.force(route), pytest.raises(ArgumentError, match="treat each by itself"):
                mw.apply(fn, X, mask=MASK)


def test_random_functions_with_data_dependent_draws_are_checked_every_time(monkeypatch):
    checked = []
    check = rowwise_check._check
    monkeypatch.setattr(rowwise_check, "_check", lambda *given: (checked.append(1), check(*given))[1])

    def counts(rows):
        return torch.poisson(rows.exp()) + torch.poisson(rows.abs() * 20)

    for _ in range(3):
        mw.apply(counts, X, mask=MASK)
    assert len(checked) == 3


@every_route
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16])
def test_functions_may_return_coarse_numbers(dtype, route):
    with mw.force(route):
        out = mw.apply(lambda t: t.to(dtype), X, mask=MASK)
    expected = torch.where(MASK.to_bool()[..., None], X.to(dtype).float(), 0.0)
    assert out.dtype == dtype
    assert torch.equal(out.float(), expected)
    with mw.force(route), pytest.raises(ArgumentError, match="treat each by itself"):
        mw.apply(lambda t: (t - t.mean(0)).to(dtype), X, mask=MASK)


@every_route
def test_a_little_mixing_does_not_hide_behind_large_values_or_coarse_rounding(route):
    large = torch.cat([X, torch.full((4, 6, 1), 1e6)], -1)
    networks = [nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)).to(dtype) for dtype in HALF]
    with mw.force(route):
        for factor in (1.0, 0.05):
            with pytest.raises(ArgumentError, match="treat each by itself"):
                mw.apply(lambda t, factor=factor: t + factor * t.roll(1, 0), large, mask=MASK)
        for dtype, network in zip(HALF, networks, strict=True):
            x = X.to(dtype)
            with pytest.raises(ArgumentError, match="treat each by itself"):
                mw.apply(lambda t: t + 0.05 * t.roll(1, 0), x, mask=MASK)
            # Within one rounding of the largest value, by what is added up in another order.
            torch.testing.assert_close(mw.apply(network, x, mask=MASK)[MASK.to_bool()], network(x)[MASK.to_bool()])


def counting():
    calls = []

    def fn(rows):
        calls.append(rows.shape[0])
        return rows * 2

    return fn, calls


@every_route
def test_a_function_is_called_once_more_when_it_is_first_used_and_never_again(route):
    fn, calls = counting()
    with mw.force(route):
        for _ in range(3):
            mw.apply(fn, X, mask=MASK)
    n = 24 if route == "dense" else 12
    assert calls == [n, 3, n, n]


def test_values_logged_in_a_list_do_not_invalidate_the_check():
    log, logs = [], {"shapes": [], "rows": []}

    def fn(rows):
        log.append((rows.shape, [rows], {"count": len(rows)}, "text"))
        logs["shapes"].append(tuple(rows.shape))
        logs["rows"].append(rows)
        return rows * 2

    for _ in range(3):
        mw.apply(fn, X, mask=MASK)
    assert logs["shapes"] == [(12, 8), (3, 8), (12, 8), (12, 8)]


def test_lambdas_of_one_line_are_checked_once_per_closure():
    calls = []

    def wrapped(inner):
        return lambda rows: (calls.append(rows.shape[0]), inner(rows))[1]

    def double(rows):
        return rows * 2

    for _ in range(3):
        mw.apply(wrapped(double), X, mask=MASK)
    assert calls == [12, 3, 12, 12]
    with pytest.raises(ArgumentError, match="treat each by itself"):
        mw.apply(wrapped(MIXING["mean"]), X, mask=MASK)


def test_a_lambda_is_checked_again_when_a_global_is_rebound():
    names = {"helper": lambda t: t * 2}
    exec("fn = lambda t: helper(t)", names)
    mw.apply(names["fn"], X, mask=MASK)
    names["helper"] = MIXING["mean"]
    with pytest.raises(ArgumentError, match="treat each by itself"):
        mw.apply(names["fn"], X, mask=MASK)


class Settings:
    def __init__(self, mix):
        self.mix = mix


class Callable:
    """An object that is not a module and holds one."""

    def __init__(self, module, mix=False):
        self.module, self.mix = module, mix

    def __call__(self, rows):
        return centred_if(self.mix, self.module(rows))

    method = __call__


def centred_if(mix, rows):
    return rows - rows.mean(0) if mix else rows * 2


class MixesInTraining(nn.Module):
    def forward(self, rows):
        return centred_if(self.training, rows)


def changed_by(name):
    """A function that treats each row by itself, and what makes it mix them: itself again, or another of one code."""

    def closure(mix):
        return lambda t: centred_if(mix, t)

    def in_a_tuple(mixes):
        return lambda t: centred_if(mixes[0], t)

    def default(mix):
        return lambda t, mix=mix: centred_if(mix, t)

    def keyword(mix):
        return lambda t, *, mix=mix: centred_if(mix, t)

    def held(module):
        return lambda t: module(t)

    def setting(settings):
        return lambda t: centred_if(settings.mix, t)

    def helper(module):
        def inner(t):
            return module(t)

        return lambda t: inner(t)

    deep = nn.Sequential(nn.Linear(8, 8), nn.Sequential(MixesInTraining()), nn.Linear(8, 8))
    deep[1][0].eval()
    names = {"mix": False, "centred_if": centred_if}
    exec("fn = lambda t: centred_if(mix, t)", names)
    settings, plain, module = Settings(False), Callable(deep), deep[1][0]
    replaced = nn.Sequential(nn.Identity())
    into = {
        "closure": (closure(False), lambda: closure(True)),
        "tuple": (in_a_tuple((False,)), lambda: in_a_tuple((True,))),
        "dict": (in_a_tuple({0: False}), lambda: in_a_tuple({0: True})),
        "number": (closure(0), lambda: closure(1)),
        "string": (closure(""), lambda: closure("mean")),
        "default": (default(False), lambda: default(True)),
        "keyword default": (keyword(False), lambda: keyword(True)),
        "global": (names["fn"], lambda: (names.update(mix=True), names["fn"])[1]),
        # No function of ours computes it, so that it gets the rows.
        "partial": (functools.partial(torch.log_softmax, dim=-1), lambda: functools.partial(torch.log_softmax, dim=0)),
        "partial by place": (functools.partial(centred_if, False), lambda: functools.partial(centred_if, True)),
        "mode of a submodule": (deep, lambda: (module.train(), deep)[1]),
        "mode of a submodule in a lambda": (held(deep), lambda: (module.train(), held(deep))[1]),
        "mode of a submodule in a helper": (helper(deep), lambda: (module.train(), helper(deep))[1]),
        "mode of a module of an object": (plain, lambda: (module.train(), plain)[1]),
        "mode of a module of an object in a lambda": (held(plain), lambda: (module.train(), held(plain))[1]),
        "mode of a module of a method's object": (plain.method, lambda: (module.train(), plain.method)[1]),
        "attribute": (plain, lambda: (setattr(plain, "mix", True), plain)[1]),
        "attribute of a setting": (setting(settings), lambda: (setattr(settings, "mix", True), setting(settings))[1]),
        "submodule": (replaced, lambda: (replaced.__setitem__(0, MixesInTraining()), replaced)[1]),
    }
    return into[name] if name else list(into)


@pytest.mark.parametrize("name", changed_by(None))
def test_a_function_is_checked_again_when_its_state_changes(name, monkeypatch):
    fn, change = changed_by(name)
    checked = []
    check = rowwise_check._check
    monkeypatch.setattr(rowwise_check, "_check", lambda *given: (checked.append(given[0]), check(*given)))
    for _ in range(3):
        mw.apply(fn, X, mask=MASK)
    assert len(checked) == 1
    mixing = change()
    with pytest.raises(ArgumentError, match="treat each by itself"):
        mw.apply(mixing, X, mask=MASK)


def test_the_state_of_a_function_may_be_cyclic_and_empty():
    loop = [X]
    loop.append(loop)
    model = nn.Sequential(nn.Linear(8, 8), None, nn.ReLU())
    model.append(model[0])

    def fn(rows):
        return model[2](model[0](rows)) if loop else later(rows)

    expected = torch.where(MASK.to_bool()[..., None], fn(X), 0.0)
    torch.testing.assert_close(mw.apply(fn, X, mask=MASK), expected)
    later = fn
    torch.testing.assert_close(mw.apply(fn, X, mask=MASK), expected)


def test_a_check_is_cached_per_training_mode_and_rank():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
    mw.apply(model, X, mask=MASK)
    model[1].train()
    with pytest.raises(ArgumentError, match="BatchNorm1d, which in training mode"):
        mw.apply(model, X, mask=MASK)
    conv = nn.Conv1d(6, 6, 3, padding=1)
    sequences = torch.tensor([True, False, True, True])
    torch.testing.assert_close(mw.apply(conv, X, mask=sequences)[sequences], conv(X[sequences]))
    six = mw.Mask.from_lengths([2, 2, 1, 1], max_len=6)
    with pytest.raises(ArgumentError, match="RuntimeError for 3 rows, but not for 6"):
        mw.apply(conv, X, mask=six)


def test_rows_that_are_all_the_same_do_not_count_as_a_proof():
    def centred(rows):
        return rows - rows.mean(0)

    assert torch.equal(mw.apply(centred, torch.ones(4, 6, 8), mask=MASK), torch.zeros(4, 6, 8))
    with pytest.raises(ArgumentError, match="treat each by itself"):
        mw.apply(centred, X, mask=MASK)


@pytest.mark.parametrize("lengths", [[0, 0], [1, 0], [1, 1]])
def test_few_rows_are_checked_as_far_as_possible(lengths):
    x, mask = X[:2], mw.Mask.from_lengths(lengths, max_len=6)
    out = mw.apply(lambda t: t * 3, x, mask=mask)
    assert torch.equal(out, torch.where(mask.to_bool()[..., None], x * 3, 0.0))
    if sum(lengths) == 2:
        with pytest.raises(ArgumentError, match="treat each by itself"):
            mw.apply(lambda t: t - t.mean(0), x, mask=mask)


def test_gradients_and_inference_mode_are_as_before():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), X.clone().requires_grad_()
    mw.apply(model, x, mask=MASK).sum().backward()
    kept = MASK.to_bool()[..., None]
    (expected,) = torch.autograd.grad(torch.where(kept, model(x), 0.0).sum(), x)
    torch.testing.assert_close(x.grad, expected)
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.inference_mode():
        for fn in (nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout()):
            y = torch.rand(4, 6, 8)
            before = y.clone()
            mw.apply(fn, y, mask=MASK)
            mw.apply(fn, y, mask=mw.Mask.full((4, 6)))
            assert torch.equal(y, before)


@every_route
@pytest.mark.parametrize("reentrant", [False, True])
def test_random_functions_may_be_checkpointed_from_their_first_use_on(reentrant, route):
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8))

    def gradient(run):
        torch.manual_seed(5)
        x = X.clone().requires_grad_()
        with mw.force(route):
            run(x).sum().backward()
        return x.grad

    def applied(x):
        return mw.apply(model, x, mask=MASK)

    found = [gradient(lambda x: checkpoint(applied, x, use_reentrant=reentrant)) for _ in range(2)]
    expected = gradient(applied)
    assert expected.abs().sum() > 0
    for each in found:
        assert torch.equal(each, expected)


def test_saved_tensors_hooks_do_not_see_the_check():
    saved, linear = [], nn.Linear(8, 8)
    x = X.clone().requires_grad_()
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
            mw.apply(lambda t: F.dropout(linear(t), 0.5), x, mask=MASK)
    half = len(saved) // 2
    assert half
    assert saved[:half] == saved[half:]
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        mw.apply(lambda t: F.dropout(linear(t), 0.5) * 2, x, mask=MASK)


@every_route
def test_a_row_wise_function_may_differentiate_by_its_rows(route):
    linear, x = nn.Linear(8, 8), X.clone().requires_grad_()

    def slope(rows):
        return torch.autograd.grad(linear(rows).tanh().sum(), rows, create_graph=True)[0]

    def shared_slope(rows):
        return torch.autograd.grad(linear(rows).sum(0).tanh().sum(), rows, create_graph=True)[0]

    for mask in (MASK, mw.Mask.full((4, 6))):
        with mw.force(route):
            out = mw.apply(slope, x, mask=mask)
        expected = slope(x) * mask.to_bool()[..., None]
        # Products of 12 and of 24 rows are added up in another order.
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(*(torch.autograd.grad(each.sum(), x)[0] for each in (out, expected)))
    with mw.force(route), pytest.raises(ArgumentError, match="treat each by itself"):
        mw.apply(shared_slope, x, mask=MASK)


def test_compiled_graphs_and_transforms_take_functions_as_they_are():
    torch._dynamo.reset()
    linear = nn.Linear(8, 8)
    expected = torch.where(MASK.to_bool()[..., None], linear(X), 0.0)
    compiled = torch.compile(lambda x, m: mw.apply(linear, x, mask=m), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(X, MASK.to_bool()), expected)
    mapped = torch.func.vmap(lambda x, m: mw.apply(linear, x, mask=m))(X, MASK.to_bool())
    torch.testing.assert_close(mapped, expected)


def test_cached_checks_live_no_longer_than_their_functions():
    model = nn.Linear(8, 8)
    mw.apply(model, X, mask=MASK)
    assert len(rowwise_check._cache) == 1
    del model
    gc.collect()
    assert len(rowwise_check._cache) == 0


def test_an_error_of_the_functions_own_is_not_hidden():
    def fails(rows):
        raise KeyError("mine")

    def fails_in_torch(rows):
        raise RuntimeError("mine")

    with pytest.raises(KeyError, match="mine"):
        mw.apply(fails, X, mask=MASK)
    with pytest.raises(ArgumentError, match="RuntimeError: mine") as caught:
        mw.apply(fails_in_torch, X, mask=MASK)
    assert caught.value.__cause__ is not None
