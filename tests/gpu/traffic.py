"""What torch operations would launch and move on a device, told by tracing them on tensors without data."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from maskwise.ops.gpu.launch import bytes_of

#: What makes no kernel run: views are told by their schema, and these besides.
FREE = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::detach", "aten::alias"}


class Traffic(TorchDispatchMode):
    """Counts launches and bytes: each operation reads its operands once and writes its results once."""

    def __init__(self):
        super().__init__()
        self.launches, self.moved = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        # A number that becomes a tensor stays on the host, and is handed over with the next launch.
        number = not given and isinstance(out, torch.Tensor) and out.dim() == 0
        if func._schema.name not in FREE and not func.is_view and not number:
            self.launches += 1
            operands = given + [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            self.moved += sum(bytes_of(t) for t in operands)
        return out


def of(call, x, mask, *, gradient=False):
    """(launches, bytes) of an idiom, or of its gradient alone."""
    x = x.clone().requires_grad_(gradient)
    with Traffic() as forward:
        out = call(x, mask)
    if not gradient:
        return forward.launches, forward.moved
    grad = torch.empty_like(out)
    with Traffic() as backward:
        torch.autograd.grad(out, x, grad)
    return backward.launches, backward.moved
