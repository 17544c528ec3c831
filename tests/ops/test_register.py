import gc
import weakref

import pytest
import torch

from maskwise.ops.operation import eager_function


def test_no_tensor_outlives_the_call_that_it_was_an_argument_of():
    taped = eager_function(
        "shift",
        "(Tensor x, Tensor q, int[] dim) -> Tensor",
        lambda x, q, dim: x + q,
        None,
        lambda ctx, grad: (grad, None, None),
    )
    x = torch.arange(3.0, requires_grad=True)
    q = torch.tensor([0.5])
    gone = weakref.ref(q)
    out = taped(x, q, [0])
    assert out.tolist() == [0.5, 1.5, 2.5]
    del out, q
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("setting", [2, 2.0, True])
def test_settings_that_are_equal_but_of_another_type_stay_what_they_are(setting):
    seen = []

    def run(x, power):
        seen.append(power)
        return x.clone()

    taped = eager_function("copy", "(Tensor x, Scalar power) -> Tensor", run, None, lambda ctx, grad: (grad, None))
    x = torch.ones(1, requires_grad=True)
    taped(x, 2), taped(x, 1), taped(x, setting)
    assert seen[-1] is setting or (seen[-1] == setting and type(seen[-1]) is type(setting))


def test_only_tensors_get_gradients():
    taped = eager_function(
        "blend",
        "(Tensor x, Tensor y, float scale, int[] dims) -> Tensor",
        lambda x, y, scale, dims: x * scale + y,
        None,
        lambda ctx, grad: (grad * 2, grad, None, None),
    )
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    taped(x, y, 2.0, [0, 1]).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]
    assert y.grad.tolist() == [1.0, 1.0]


def test_a_schema_with_a_tensor_after_a_setting_is_refused():
    schema = "(Tensor x, int[] dim, Tensor q) -> Tensor"
    with pytest.raises(
        ValueError,
        match=r"shift: the tensors of a schema with an eager autograd function must come before its settings",
    ):
        eager_function("shift", schema, lambda x, dim, q: x + q, None, lambda ctx, grad: (grad, None, None))
