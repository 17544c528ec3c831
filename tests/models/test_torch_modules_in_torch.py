"""Torch's modules, unpadded, with the rest of torch: hooks, tracers, transforms, other processes and replicas."""

import pickle
import subprocess
import sys
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as torch_hooks

import maskwise as mw
from maskwise.models import PaddedRunWarning

from .contract import TOLERANCE, masks, routes, weighted
from .test_torch_modules import D, attention, encoder, layer, tokens

BUILDS = {"encoder": encoder, "layer": layer, "attention": attention}


def run(model, x, keep):
    if isinstance(model, nn.MultiheadAttention):
        return model(x, x, x, key_padding_mask=~keep, need_weights=False)[0]
    return model(x, src_key_padding_mask=~keep)


def twins(build, **more):
    """Two models of the same weights, of which the second is unpadded."""
    torch.manual_seed(0)
    first = build(**more)
    torch.manual_seed(0)
    return first, mw.unpad(build(**more))


def assert_equal_at_kept(found, expected, keep):
    torch.testing.assert_close(found[keep], expected[keep], rtol=1e-4, atol=TOLERANCE)


# -- hooks -------------------------------------------------------------------------------------------------------------
def fired(model, log):
    """Hooks of every kind on every module."""
    for name, each in model.named_modules():
        each.register_forward_pre_hook(lambda *_, name=name: log.append(("pre", name)))
        each.register_forward_hook(lambda *_, name=name: log.append(("forward", name)))
        each.register_full_backward_pre_hook(lambda *_, name=name: log.append(("backward pre", name)))
        each.register_full_backward_hook(lambda *_, name=name: log.append(("backward", name)))


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
@pytest.mark.parametrize("norm_first", [False, True])
def test_hooks_of_every_part_fire_as_in_the_padded_model_and_the_run_is_packed(build, norm_first):
    keep, logs = masks(), ([], [])
    more = {} if build is attention else {"norm_first": norm_first, "activation": "relu"}
    x, outputs = tokens(keep), []
    for model, log in zip(twins(build, **more), logs, strict=True):
        fired(model, log)
        with mw.explain() as explained:
            outputs.append(run(model.train(), x.clone().requires_grad_(), keep))
        weighted(outputs[-1] * keep[..., None]).backward()
    assert routes(explained) == ["packed"]
    assert logs[0] == logs[1]
    assert {kind for kind, _ in logs[0]} == {"pre", "forward", "backward pre", "backward"}
    assert_equal_at_kept(outputs[1], outputs[0], keep)


GLOBAL = ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"]


@pytest.mark.parametrize("kind", GLOBAL)
def test_global_hooks_fire_as_in_the_padded_model(kind):
    keep, logs = masks(), []
    for model in twins(encoder):
        names, log = {each: name for name, each in model.named_modules()}, []
        handle = getattr(torch_hooks, f"register_module_{kind}")(
            lambda module, *_, names=names, log=log: log.append(names[module])
        )
        with handle:
            out = run(model.train(), tokens(keep).requires_grad_(), keep)
            weighted(out * keep[..., None]).backward()
        logs.append(log)
    assert logs[0] == logs[1]
    assert {"", "layers.1", "layers.0.self_attn", "layers.0.linear1", "norm"} <= {*logs[0]}


def test_a_forward_hook_of_a_layer_gets_packed_tokens_and_may_replace_them():
    keep = masks()
    model, x = mw.unpad(encoder().eval()), tokens(keep)
    seen = []
    model.layers[1].register_forward_hook(lambda module, args, out: seen.append(out.shape) or out * 0)
    out = run(model, x, keep)
    assert seen == [(int(keep.sum()), D)]
    assert torch.equal(out[keep], model.norm(torch.zeros(1, D)).expand_as(out[keep]))


def test_gradients_that_a_backward_hook_of_attention_gets_are_those_of_the_padded_model():
    keep, seen = torch.arange(11) < torch.tensor([11, 6, 4, 1])[:, None], []
    for model in twins(layer):
        model.self_attn.register_full_backward_hook(lambda module, grads, _: seen.append(grads))
        weighted(run(model.train(), tokens(keep).requires_grad_(), keep) * keep[..., None]).backward()
    for padded, packed in zip(*seen, strict=True):
        # Some units in the last place of the largest, which are sums in another order.
        torch.testing.assert_close(packed, padded[keep], rtol=1e-4, atol=TOLERANCE * float(padded.abs().max()))


# -- what has no sizes that depend on data -----------------------------------------------------------------------------
class Call(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, keep):
        return run(self.model, x, keep)


OTHER = torch.arange(11) < torch.tensor([2, 3, 11, 5, 1])[:, None]


def traced(call, x, keep):
    # Torch warns that its own forward compares sizes.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return torch.jit.trace(call, (x, keep))


GRAPHS = {
    "jit.trace": traced,
    "export": lambda call, x, keep: torch.export.export(call, (x, keep), strict=False).module(),
    "strict export": lambda call, x, keep: torch.export.export(call, (x, keep), strict=True).module(),
    "compile": lambda call, x, keep: torch.compile(call, backend="eager", fullgraph=True),
    "vmap": lambda call, x, keep: lambda x, keep: torch.vmap(call)(x[None], keep[None])[0],
    "vmap over tokens": lambda call, x, keep: lambda x, keep: torch.vmap(call, (0, None))(x[None], keep)[0],
    "func.grad": lambda call, x, keep: lambda x, keep: torch.func.vjp(lambda x: call(x, keep), x)[0],
    "jvp": lambda call, x, keep: lambda x, keep: torch.func.jvp(lambda x: call(x, keep), (x,), (x,))[0],
}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
@pytest.mark.parametrize("kind", GRAPHS)
def test_what_makes_a_graph_or_a_transform_runs_padded_and_says_so_once(kind, build):
    padded, unpadded = (model.eval().requires_grad_(False) for model in twins(build))
    keep = masks()
    x = tokens(keep)
    # The backend that has a batching rule and a forward-mode derivative; torch's own fast path of modules has neither.
    with without_fast_paths(), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", PaddedRunWarning)
        graph = GRAPHS[kind](Call(unpadded), x, keep)
        out = graph(x, keep)
        # Nothing of the first mask is a constant of the graph.
        other = graph(x, OTHER)
        expected, expected_other = run(padded, x, keep), run(padded, x, OTHER)
    assert [str(each.message).count("Hint: ") for each in found if each.category is PaddedRunWarning] == [1]
    assert_equal_at_kept(out, expected, keep)
    assert_equal_at_kept(other, expected_other, OTHER)


@contextmanager
def without_fast_paths():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU])
def test_hooks_of_an_activation_that_is_a_module_fire(activation):
    keep, seen = masks(), []
    model = mw.unpad(encoder(activation=activation()).eval())
    model.layers[1].activation.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        run(model, tokens(keep), keep)
    assert seen == [1]


@pytest.mark.parametrize("given", ["nothing dropped", "no mask", "nothing kept"])
def test_a_padded_run_that_nobody_can_change_warns_of_nothing(given):
    model, x = mw.unpad(encoder().train()), tokens(masks())
    padding = {"nothing dropped": torch.zeros(5, 11).bool(), "no mask": None, "nothing kept": torch.ones(5, 11).bool()}
    with mw.explain() as log:
        model(x, src_key_padding_mask=padding[given])
    assert routes(log) == ["padded"]


def test_a_padding_mask_of_other_numbers_says_to_use_bools():
    model, x = mw.unpad(encoder().train()), tokens(masks())
    with pytest.warns(PaddedRunWarning, match="Hint: a bool padding mask"):
        model(x, src_key_padding_mask=torch.randn(5, 11))


def test_one_sequence_says_to_make_a_batch_of_it():
    (padded, model), keep = twins(encoder), masks()[0]
    x = tokens(keep[None])[0]
    with pytest.warns(PaddedRunWarning, match=r"Hint: .*x\[None\]"):
        out = model.train()(x, src_key_padding_mask=~keep)
    assert torch.equal(out, padded.train()(x, src_key_padding_mask=~keep))


def test_a_layer_that_was_added_later_runs_padded_and_says_so():
    keep = masks()
    model, x = mw.unpad(encoder().train()), tokens(keep)
    model.layers.append(layer())
    with pytest.warns(PaddedRunWarning, match="layers have changed since mw.unpad"):
        found = run(model, x, keep)
    mw.unpad(mw.models.repad(model))
    with mw.explain() as log:
        assert_equal_at_kept(run(model, x, keep), found, keep)
    assert routes(log) == ["packed"]


# -- other processes and replicas --------------------------------------------------------------------------------------
SCRIPT = """
import pickle, sys
model, x, keep = pickle.load(open(sys.argv[1], "rb"))
from tests.models.test_torch_modules_in_torch import run
import maskwise as mw
with mw.explain() as log:
    out = run(model, x, keep)
assert [call.route for call in log] == ["packed"]
pickle.dump(out.detach(), open(sys.argv[2], "wb"))
"""


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_a_pickled_module_runs_packed_in_another_process(build, tmp_path):
    keep = masks()
    model, x = mw.unpad(build().eval()), tokens(keep)
    (tmp_path / "in").write_bytes(pickle.dumps((model, x, keep)))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "in"), str(tmp_path / "out")]
    subprocess.run(command, check=True, capture_output=True)
    assert torch.equal(pickle.loads((tmp_path / "out").read_bytes()), run(model, x, keep))


def replica_of(model, change):
    """What ``torch.nn.parallel.replicate`` does for one device, with parameters that ``change`` makes."""
    modules = list(model.modules())
    copies = {each: each._replicate_for_data_parallel() for each in modules}
    for each, copied in copies.items():
        for key, child in each._modules.items():
            if child is not None:
                setattr(copied, key, copies[child])
        for key, parameter in each._parameters.items():
            if parameter is None:
                copied._parameters[key] = None
            else:
                setattr(copied, key, change(parameter))
    return copies[model]


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_a_replica_runs_packed_on_its_own_parameters(build):
    keep = masks()
    padded, model = twins(build)
    x = tokens(keep)
    expected = run(replica_of(padded.train(), lambda p: p * 0.5), x, keep)
    replica = replica_of(model.train(), lambda p: p * 0.5)
    with mw.explain() as log:
        out = run(replica, x, keep)
    assert routes(log) == ["packed"]
    assert_equal_at_kept(out, expected, keep)
    assert all(value.__self__ is each for each in replica.modules() for value in bound(each))


def bound(module):
    return [value for value in vars(module).values() if hasattr(value, "__self__") and hasattr(value, "__func__")]


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_repad_leaves_nothing_behind(build):
    model = build()
    before = [sorted(vars(each)) for each in model.modules()]
    mw.models.repad(mw.unpad(model))
    assert [sorted(vars(each)) for each in model.modules()] == before
