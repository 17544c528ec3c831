"""A graph that leaves this process holds torch's own operators only, and gives what the eager call gives."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import maskwise as mw
from maskwise.ops import torch_private as tracing
from maskwise.plan import dispatch
from tests.laws.samples import UNDER_LAW, outputs
from tests.laws.test_plain_tensors import caller, example


class Call(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, *args):
        return self.call(*args)


def sparse(mask=None, block=(1, 1)):
    torch.manual_seed(0)
    mask = torch.rand(24, 6) < 0.2 if mask is None else mask
    return mw.nn.SparseLinear.from_linear(nn.Linear(6, 24), mask, block=block)


def masked():
    torch.manual_seed(0)
    return mw.nn.MaskedLinear(6, 24, gate=torch.rand(24, 6) < 0.2)


x, keep = example()
WEIGHT, KEPT = torch.randn(5, 6), torch.rand(5, 6) < 0.5
TOKENS, SEEN = torch.randn(2, 2, 5, 4), torch.ones(5, 5, dtype=torch.bool).tril()
IMAGE, IMAGE_WEIGHT, REGION = torch.randn(1, 3, 6, 5), torch.randn(4, 3, 3, 3), torch.rand(1, 6, 5) < 0.5
CASES = {
    **{function.name: (Call(caller(function)), (x, keep)) for function in UNDER_LAW},
    "count": (Call(lambda mask: mw.count(mask, dim=-1)), (keep,)),
    "cross_entropy": (
        Call(lambda x, keep: mw.loss(F.cross_entropy, x, torch.tensor([1, 0, 3, 2]), keep)),
        (x, keep[:, 2]),
    ),
    "linear_cross_entropy": (
        Call(lambda x, keep: mw.linear_cross_entropy(x, WEIGHT, torch.tensor([1, 0, 3, 2]), keep)),
        (x, keep[:, 2]),
    ),
    "linear": (Call(lambda x, mask: mw.linear(x, WEIGHT, mask)), (x, KEPT)),
    "apply": (Call(lambda x, keep: mw.apply(torch.tanh, x, mask=keep)), (x, keep)),
    "pack": (Call(lambda x, keep: mw.pack(x, keep, capacity=24).values), (x, keep)),
    "attention": (Call(lambda q, mask: mw.attention(q, q, q, mask)), (TOKENS, SEEN)),
    "conv2d": (Call(lambda x, mask: mw.conv2d(x, IMAGE_WEIGHT, padding=1, mask=mask)), (IMAGE, REGION)),
    "MaskedLinear": (masked(), (x,)),
    "SparseLinear": (sparse(), (x,)),
    "MaskedMeanPool": (Call(lambda x, keep: mw.nn.MaskedMeanPool()(x[..., None], keep)), (x, keep)),
}


# Strict export goes through torch.compile's front end, and so one of each kind is enough.
STRICT = ["sum", "softmax", "attention", "linear", "pack", "SparseLinear"]


def skip_where_torch_recurses(strict, is_sparse):
    if strict and is_sparse and torch.__version__ < (2, 13):
        pytest.skip("torch 2.10 recurses without end where it exports a SparseLinear strictly")


@pytest.mark.parametrize(("name", "strict"), [*((name, False) for name in CASES), *((name, True) for name in STRICT)])
def test_an_exported_graph_holds_no_operator_of_ours(name, strict):
    skip_where_torch_recurses(strict, name == "SparseLinear")
    module, args = CASES[name]
    exported = torch.export.export(module, args, strict=strict)
    with warnings.catch_warnings():
        # Torch's own, of its own names.
        warnings.simplefilter("ignore", FutureWarning)
        exported = exported.run_decompositions()
    assert [str(node.target) for node in exported.graph.nodes if "maskwise" in str(node.target)] == []
    torch.testing.assert_close(outputs(exported.module()(*args)), outputs(module(*args)), equal_nan=True)


@pytest.mark.parametrize("name", sorted({*CASES} - {"attention"}))
def test_a_traced_graph_holds_no_operator_of_ours_and_follows_the_mask(name):
    module, args = CASES[name]
    with warnings.catch_warnings():
        # Sizes are compared while arguments are checked, and are constants of a traced graph.
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        graph = torch.jit.trace(module, args)
    operators = str(graph.inlined_graph)
    assert "maskwise::" not in operators
    # What a Python function in a graph prints as.
    assert "= ^" not in operators
    other = tuple(arg.roll(1, -1) for arg in args)
    for given in (args, other):
        torch.testing.assert_close(outputs(graph(*given)), outputs(module(*given)), equal_nan=True)


@pytest.mark.parametrize("name", ["sum", "softmax", "SparseLinear", "linear"])
def test_what_was_exported_changes_nothing_for_eager_calls(name):
    module, args = CASES[name]
    with mw.explain() as before:
        module(*args)
    dispatch.invalidate()
    torch.export.export(module, args)
    with mw.explain() as after:
        module(*args)
    assert [call.route for call in after] == [call.route for call in before]


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("build", [masked, sparse])
def test_a_layer_is_exported_for_any_size_of_batch(build, strict):
    skip_where_torch_recurses(strict, build is sparse)
    layer = build()
    batch = {0: torch.export.Dim("batch")}
    exported = torch.export.export(layer, (torch.randn(4, 6),), dynamic_shapes=(batch,), strict=strict).module()
    for size in (2, 70_000):
        given = torch.randn(size, 6)
        # The dense product, whose sums of 6 come in another order than the kernel's.
        torch.testing.assert_close(exported(given), layer(given), rtol=1e-5, atol=1e-5)


class Ask(nn.Module):
    def forward(self, x):
        graph = tracing.is_tracing()
        return x + (graph + 2 * tracing.is_exporting() + (0 if graph else 4 * tracing.is_transformed()))


def test_each_tracer_and_transform_is_known_for_what_it_is():
    zero = torch.zeros(1)
    assert Ask()(zero) == 0
    assert torch.compile(Ask(), backend="eager", fullgraph=True)(zero) == 1
    assert torch.export.export(Ask(), (zero,)).module()(zero) == 3
    assert torch.export.export(Ask(), (zero,), strict=True).module()(zero) == 3
    assert torch.jit.trace(Ask(), (zero,), check_trace=False)(zero) == 3
    assert torch.vmap(Ask())(zero) == 4
    assert torch.func.jvp(Ask(), (zero,), (zero,))[0] == 4


# -- ensembles ---------------------------------------------------------------------------------------------------------
def members(blocks):
    """Three layers of as many values, each at places of its own."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(3):
        if blocks:
            # 10 x 20 in blocks of 16 x 16 reaches out at both edges; one block of each row.
            column = torch.randint(2, (), generator=generator).item()
            mask = torch.zeros(10, 20, dtype=torch.bool)
            mask[:, 16 * column : 16 * column + 16] = True
            layer = mw.nn.SparseLinear(20, 10, mask=mask, block=(16, 16))
        else:
            flat = torch.zeros(200, dtype=torch.bool)
            flat[torch.randperm(200, generator=generator)[:30]] = True
            layer = mw.nn.SparseLinear(20, 10, mask=flat.view(10, 20))
        found.append(layer)
    return found


@pytest.mark.parametrize("blocks", [False, True], ids=["single weights", "blocks that reach out"])
@pytest.mark.parametrize("learns", [False, True])
def test_an_ensemble_of_sparse_layers_runs_under_vmap(blocks, learns):
    layers = [layer.requires_grad_(learns) for layer in members(blocks)]
    parameters, buffers = torch.func.stack_module_state(layers)
    given = torch.randn(5, 20)

    def call(parameters, buffers):
        return torch.func.functional_call(layers[0], (parameters, buffers), (given,))

    expected = torch.stack([layer(given) for layer in layers])
    # The dense product against the kernel's, sums of up to 20 in another order.
    torch.testing.assert_close(torch.vmap(call)(parameters, buffers), expected, rtol=1e-5, atol=1e-5)
    gradient = torch.vmap(torch.func.grad(lambda p, b: call(p, b).square().sum()))(parameters, buffers)
    for index, layer in enumerate(layers):
        layer.requires_grad_(True)
        (wanted,) = torch.autograd.grad(layer(given).square().sum(), layer.values)
        torch.testing.assert_close(gradient["values"][index], wanted, rtol=1e-4, atol=1e-4)
