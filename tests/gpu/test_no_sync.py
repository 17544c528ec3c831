"""On a GPU nothing waits for data, and a compiled graph is one graph of what Inductor can fuse.

Fake CUDA tensors have no data: whatever would read some raises.
"""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import maskwise as mw
from maskwise.ops import primitives
from maskwise.plan import dispatch
from tests.gpu.guard import cuda_without_cuda
from tests.laws.functions import FUNCTIONS
from tests.laws.samples import UNDER_LAW, outputs, samples
from tests.mask.test_no_sync import BUILDS

FUSED = ("reduce", "softmax", "fill", "scan", "loss")
SHAPE = (3, 4)


@pytest.fixture(autouse=True, scope="module")
def _cuda_without_cuda():
    with cuda_without_cuda():
        yield


def caller(function):
    """The function as ``call(x, mask)`` along the last dim."""
    kwargs = {**next(iter(samples(function))).kwargs}
    if function.kind != "elementwise":
        kwargs["dim"] = -1
    return lambda x, mask: function.call(x, mask, **kwargs)


def like(x, *shape):
    return torch.empty(shape, device=x.device)


def others():
    """The public functions that are not in the registry, by name; each takes (x, mask)."""
    return {
        "where": lambda x, mask: mw.where(mask, x, 0.0),
        "mul": lambda x, mask: mw.mul(x, mask),
        "max": lambda x, mask: mw.max(x, mask, -1),
        "min": lambda x, mask: mw.min(x, mask, -1, keepdim=True),
        "pack": lambda x, mask: mw.pack(x, mask, capacity=12).values,
        "unpack": lambda x, mask: mw.pack(x, mask, capacity=12).unpack(-1.0),
        "apply": lambda x, mask: mw.apply(torch.exp, x, mask=mask),
        "count": lambda x, mask: mw.count(mask, -1),
        "cross_entropy": lambda x, mask: mw.loss(F.cross_entropy, x, like(x, 3).long(), mask[:, 0]),
        "linear_cross_entropy": lambda x, mask: mw.linear_cross_entropy(
            x, like(x, 5, x.shape[-1]), like(x, 3).long(), mask[:, 0]
        ),
        "linear": lambda x, mask: mw.linear(x, like(x, *SHAPE), mask.to(x.device)),
        "attention": lambda x, mask: mw.attention(like(x, 1, 2, 3, 4), like(x, 1, 2, 4, 4), like(x, 1, 2, 4, 4), mask),
        "attention with a bias": lambda x, mask: mw.attention(
            like(x, 1, 2, 3, 4), like(x, 1, 2, 4, 4), like(x, 1, 2, 4, 4), mask, bias=like(x, 3, 4)
        ),
        "conv1d": lambda x, mask: mw.conv1d(like(x, 3, 2, 4), like(x, 2, 2, 3), padding=1, mask=mask),
        "conv2d": lambda x, mask: mw.conv2d(like(x, 1, 2, 3, 4), like(x, 2, 2, 3, 3), padding=1, mask=mask),
        "conv_transpose1d": lambda x, mask: mw.conv_transpose1d(
            like(x, 3, 2, 4), like(x, 2, 2, 3), padding=1, mask=mask
        ),
        "conv_transpose2d": lambda x, mask: mw.conv_transpose2d(
            like(x, 1, 2, 3, 4), like(x, 2, 2, 3, 3), padding=1, mask=mask
        ),
    }


CALLS = {f.name: caller(f) for f in UNDER_LAW} | others()
#: What is neither a function of a mask nor computed on a device, or is made of modules, which are made of functions.
NO_FUNCTIONS = {
    "AlibiBias", "FlopCounter", "Mask", "MaskwiseError", "Packed", "RelativeBias", "TokenBudgetSampler",
    "__version__", "accumulate", "audit", "compress", "distributed", "explain", "force",
    "models", "nn", "optimize", "plan", "testing", "unpad",
}  # fmt: skip
#: The same function under another name: in place.
SAME = {"apply_": "apply"}
#: Further calls of the same functions.
UNNAMED = {"unpack", "cross_entropy", "attention with a bias"}


def test_every_public_function_is_called_here():
    assert {SAME.get(name, name) for name in mw.__all__} - NO_FUNCTIONS == CALLS.keys() - UNNAMED


def fake_x(device="cuda"):
    return torch.empty(SHAPE, device=device)


def fake_mask():
    return torch.empty(SHAPE, dtype=torch.bool, device="cuda")


@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_fake_cuda_tensors_reads_no_data(name):
    with FakeTensorMode():
        for out in outputs(CALLS[name](fake_x(), fake_mask())):
            assert out.device.type == "cuda"


@pytest.mark.parametrize("kind", BUILDS)
def test_every_function_takes_every_kind_of_mask_and_reads_no_data(kind):
    with FakeTensorMode():
        mask = BUILDS[kind]("cuda")
        for call in CALLS.values():
            assert outputs(call(fake_x(), mask))[0].device.type == "cuda"


# torch's autograd runs in no thread of a device that is not there, so these have another one without data.
@pytest.mark.parametrize("name", [f.name for f in UNDER_LAW if f.gradient] + ["pack", "unpack", "linear"])
def test_a_gradient_reads_no_data(name):
    x = fake_x("meta").requires_grad_()
    total = sum(out.sum() for out in outputs(CALLS[name](x, torch.empty(SHAPE, dtype=torch.bool, device="meta"))))
    (of_x,) = torch.autograd.grad(total, x)
    assert of_x.device.type == "meta"
    assert of_x.shape == SHAPE


def traced(call, *operands):
    """The targets of the one graph that a call is compiled into."""
    torch._dynamo.reset()
    graphs = []

    def backend(module, _):
        graphs.append(module)
        return module.forward

    torch.compile(call, fullgraph=True, backend=backend)(*operands)
    (graph,) = graphs
    return {str(node.target) for node in graph.graph.nodes if node.op.startswith("call")}


@pytest.mark.parametrize(
    ("function", "as_mask"),
    # What a Mask around the bits adds does not depend on the function, so every other one has it.
    [pytest.param(f, i % 2 == 1, id=f"{f.name}-{'Mask' if i % 2 else 'bool'}") for i, f in enumerate(UNDER_LAW)],
)
def test_compiled_for_cuda_it_is_one_graph_of_plain_operations_where_those_fuse(function, as_mask):
    call = caller(function)
    with FakeTensorMode(allow_non_fake_inputs=True):
        wrapped = (lambda x, bits: call(x, mw.Mask(bits))) if as_mask else call
        targets = traced(wrapped, fake_x(), fake_mask())
    ours = {target for target in targets if target.startswith("maskwise.")}
    if function.family in FUSED:
        assert not ours
        assert any("where" in target for target in targets)


def test_pack_stays_an_op_in_a_graph_compiled_for_cuda():
    with FakeTensorMode(allow_non_fake_inputs=True):
        targets = traced(others()["unpack"], fake_x(), fake_mask())
    assert {"maskwise.pack_capacity.default", "maskwise.unpack_capacity.default"} <= targets


def planned(function, shape, device, *, grad):
    """The plan of a function's operation, from facts of a device that is not here."""
    home = primitives if function.name == "fill" else sys.modules[function.call.__module__]
    operation = getattr(home, function.name if function.name == "fill" else f"_{function.name}")
    return dispatch.decide(
        dispatch.Facts(function.name, shape, torch.float32, device, grad=grad), operation.routes
    ).plan


@pytest.mark.parametrize("function", [f for f in UNDER_LAW if f.family in FUSED[:4] and f.kernel], ids=lambda f: f.name)
def test_large_inputs_on_cuda_are_planned_for_the_kernel(function):
    plan = planned(function, (4096, 4096), "cuda", grad=True)
    if function.gradient:
        assert plan.route == "fused", plan
    assert planned(function, (4096, 4096), "cuda", grad=False).route == "bare"


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_other_devices_are_served_by_plain_torch_which_says_why(device):
    plan = planned(FUNCTIONS["sum"], (4096, 4096), device, grad=False)
    assert plan.route == "plain"
    assert plan.reason == f"sum has no kernel on {device}"


def test_without_triton_plain_torch_serves_and_explain_says_so(monkeypatch):
    monkeypatch.setattr("maskwise.ops.backends._HAS_TRITON", False)
    with FakeTensorMode(), dispatch.force(None), mw.explain() as log:
        x = torch.empty(512, 512, device="cuda")
        mw.sum(x, torch.empty(512, 512, dtype=torch.bool, device="cuda"), 1)
    (call,) = log
    assert call.route == "plain"
    assert call.reason == "Triton is not installed, so plain torch is used: pip install triton"
