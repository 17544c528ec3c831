import gc
import weakref

import pytest
import torch

from maskwise.ops.register import tape


def test_no_tensor_outlives_the_call_that_it_was_an_argument_of():
    taped = tape(
        "shift",
        "(Tensor x, int[] dim, Tensor q) -> Tensor",
        lambda x, dim, q: x + q,
        None,
        lambda ctx, grad: (grad, None, None),
    )
    x = torch.arange(3.0, requires_grad=True)
    q = torch.tensor([0.5])
    gone = weakref.ref(q)
    out = taped(x, [0], q)
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

    taped = tape("copy", "(Tensor x, Scalar power) -> Tensor", run, None, lambda ctx, grad: (grad, None))
    x = torch.ones(1, requires_grad=True)
    taped(x, 2), taped(x, 1), taped(x, setting)
    assert seen[-1] is setting or (seen[-1] == setting and type(seen[-1]) is type(setting))


def test_only_tensors_get_gradients_wherever_they_stand_among_the_arguments():
    def run(scale, x, dims, y):
        return x * scale + y

    taped = tape(
        "blend",
        "(float scale, Tensor x, int[] dims, Tensor y) -> Tensor",
        run,
        None,
        lambda ctx, grad: (None, grad * 2, None, grad),
    )
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    taped(2.0, x, [0, 1], y).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]
    assert y.grad.tolist() == [1.0, 1.0]
