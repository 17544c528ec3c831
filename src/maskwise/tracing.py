"""Whether a call runs now, or is made into a graph, or goes through a transform: the one place that asks torch.

Public names of torch where there are any. Two are private: ``torch._C._get_tracing_state``, which torch.jit.is_tracing
wraps in checks that cost a tiny call too much, and functorch's stack of interpreters, for which there is no other name.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

__all__ = ["is_exporting", "is_tracing", "is_transformed"]

# Bound here, because to find them anew takes a tiny call longer than to call them.
_is_compiling, _is_exporting = torch.compiler.is_compiling, torch.compiler.is_exporting
_jit_state, _transform = torch._C._get_tracing_state, torch._C._functorch.peek_interpreter_stack


def is_tracing() -> bool:
    """Whether a graph is being made of the call, by torch.compile, torch.export, torch.jit.trace or an ONNX export.

    What is chosen then is a constant of the graph: it must not depend on data, nor on a cache.
    """
    return _is_compiling() or _jit_state() is not None


def is_exporting() -> bool:
    """Whether that graph leaves this process: then it must hold torch's own operators only.

    >>> class Ask(torch.nn.Module):
    ...     def forward(self, x):
    ...         return x + is_exporting()
    >>> torch.export.export(Ask(), (torch.zeros(1),)).module()(torch.zeros(1)), Ask()(torch.zeros(1))
    (tensor([1.]), tensor([0.]))
    """
    return _is_exporting() if _is_compiling() else _jit_state() is not None


def is_transformed() -> bool:
    """Whether torch.func or forward-mode AD look through the call: they know torch's own operators only.

    For calls outside of compiled graphs: inside of one torch answers otherwise, and the graph's maker transforms it.

    >>> torch.vmap(lambda x: x + is_transformed())(torch.zeros(2)), is_transformed()
    (tensor([1., 1.]), False)
    """
    return _transform() is not None or forward_ad._current_level >= 0
