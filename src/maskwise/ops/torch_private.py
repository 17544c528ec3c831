"""Every private name of torch that Maskwise uses, each with its purpose and what happens without it.

No other module of the package uses private names of torch. These exist in torch 2.10 to 2.15; a name that a later torch
removes falls back to its public counterpart where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad
from torch.nn.modules import module as _modules

# A mode that sees every operation. There is no public name.
from torch.utils._python_dispatch import TorchDispatchMode

# The registry of containers of tensors that torch.compile, DataLoader and FSDP use; torch.utils.pytree cannot register.
from torch.utils._pytree import SequenceKey, register_pytree_node

# How DataLoader makes a batch of what is no tensor. torch.utils.data has default_collate, but not its map.
from torch.utils.data._utils.collate import default_collate_fn_map

__all__ = [
    "SequenceKey",
    "TorchDispatchMode",
    "are_saved_tensors_hooks_enabled",
    "assert_async",
    "bsr_dense_addmm",
    "default_collate_fn_map",
    "flash_attention_for_cpu",
    "flash_attention_for_cpu_backward",
    "has_dispatch_modes",
    "has_output_hooks",
    "is_bsr_tuned",
    "is_exporting",
    "is_forward_ad",
    "is_tracing",
    "is_transformed",
    "is_vmapped_or_functional",
    "mark_constant_in_graphs",
    "onednn_linear",
    "register_pytree_node",
    "trace_launches",
    "untransformed_apply",
]

Fn = TypeVar("Fn", bound=Callable[..., Any])

# Bound here, because an attribute look-up through two modules takes a tiny call longer than the call itself.
_is_compiling, _compiler = torch.compiler.is_compiling, torch.compiler
#: Whether torch.export is under way. torch.compiler.is_exporting is the public name; before 2.13 it is True in every
#: graph of torch.compile, which would then hold none of our kernels.
_has_exporting_flag = hasattr(torch.compiler, "_is_exporting_flag")
#: The tracing state of torch.jit. torch.jit.is_tracing is the public name; its checks cost a tiny call too much.
_jit_state: Callable[[], Any] = getattr(
    torch._C,
    "_get_tracing_state",
    lambda: torch.jit.is_tracing() or None,  # type: ignore[attr-defined, no-untyped-call]
)
#: The innermost transform of torch.func. There is no public name; without it, transforms would reach our kernels, and
#: raise for lack of a batching rule.
_functorch: Callable[[], Any] = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)


#: The number of active TorchDispatchModes, such as FakeTensorMode. Without it, none are detected.
_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


def is_tracing() -> bool:
    """Whether the call is traced, by torch.compile, torch.export, torch.jit.trace or an ONNX export.

    The choice of a route is then a constant of the graph: it must not depend on data, nor on a cache.
    """
    return _is_compiling() or _jit_state() is not None


def is_exporting() -> bool:
    """Whether the graph is exported: then it must contain torch's own operators only.

    >>> class Probe(torch.nn.Module):
    ...     def forward(self, x):
    ...         return x + is_exporting()
    >>> torch.export.export(Probe(), (torch.zeros(1),)).module()(torch.zeros(1)), Probe()(torch.zeros(1))
    (tensor([1.]), tensor([0.]))
    """
    if not _is_compiling():
        return _jit_state() is not None
    return _compiler._is_exporting_flag if _has_exporting_flag else _compiler.is_exporting()


def is_transformed() -> bool:
    """Whether a torch.func transform or forward-mode AD is active, which support torch's own operators only.

    For calls outside of compiled graphs, where torch's answer differs and the compiler applies the transform.

    >>> torch.vmap(lambda x: x + is_transformed())(torch.zeros(2)), is_transformed()
    (tensor([1., 1.]), False)
    """
    return _functorch() is not None or forward_ad._current_level >= 0


def is_forward_ad() -> bool:
    """Whether forward-mode AD is active."""
    return forward_ad._current_level >= 0


def is_vmapped_or_functional() -> bool:
    """Whether a torch.func transform is active, not counting forward-mode AD: its tensors have no readable data.

    >>> torch.vmap(lambda x: x + is_vmapped_or_functional())(torch.zeros(2)), is_vmapped_or_functional()
    (tensor([1., 1.]), False)
    """
    return _functorch() is not None


def mark_constant_in_graphs(fn: Fn) -> Fn:
    """Make torch.compile call ``fn`` during tracing, and treat the result as a constant of the graph.

    torch.compiler.assume_constant_result does the same, but imports the whole compiler; this sets the same attribute.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def untransformed_apply(function: Any) -> Callable[..., Any]:
    """``Function.apply`` of an autograd Function, for calls outside of torch.func's transforms.

    Function.apply checks for a transform first, which costs a tiny call a microsecond; its base class has the rest.
    Without that base, apply itself.
    """
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)  # type: ignore[no-any-return]


def trace_launches(op: str, rule: Callable[..., Any], library: torch.library.Library) -> None:
    """Trace calls of an op into graphs of torch.compile and AOTInductor by a rule, as torch.library.triton_op does.

    The rule takes (mode, op, types, args, kwargs). triton_op itself defines an op with one implementation for all
    devices. There is no public name of the mode in which AOTAutograd traces; without it, the op is a call in graphs.
    As for triton_op, an exported program keeps the op.
    """
    try:
        from torch._subclasses.functional_tensor import FunctionalTensorMode
    except ImportError:
        return

    def traced(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        is_exported: Callable[[], bool] = is_exporting
        with suppress(ImportError):
            from torch.export._trace import custom_triton_ops_decomposition_disabled as is_exported
        if is_exported():
            return mode.__torch_dispatch__(func, types, args, kwargs)
        return rule(mode, func, types, args, kwargs)

    torch.library.register_torch_dispatch(op, FunctionalTensorMode, traced, lib=library)


def has_dispatch_modes() -> bool:
    """Whether a TorchDispatchMode is active: tensors must then not come from a cache.

    >>> has_dispatch_modes()
    False
    """
    return _dispatch_modes() > 0


def has_output_hooks(module: torch.nn.Module) -> bool:
    """Whether a hook may hold what a module returns, so that nothing may be written into it."""
    return bool(
        module._forward_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _modules._global_forward_hooks
        or _modules._global_backward_hooks
        or _modules._global_backward_pre_hooks
    )


def are_saved_tensors_hooks_enabled() -> bool:
    """Whether torch.autograd.graph.saved_tensors_hooks may be entered: torch.func forbids them.

    There is no public name; without it, they are assumed to be enabled.
    """
    enabled = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", None)
    return enabled is None or bool(enabled())


def assert_async(condition: torch.Tensor, message: str) -> None:
    """Assert a condition on the device, with ``message``, without a host-device sync.

    There is no public name; without it, nothing is asserted.
    """
    check = getattr(torch, "_assert_async", None)
    if check is not None:
        check(condition, message)


def _aten(name: str) -> Callable[..., Any] | None:
    op = getattr(torch.ops.aten, name, None)
    return None if op is None else op.default


#: The CPU kernel of scaled_dot_product_attention and its gradient, for calls on views of some queries and keys. The
#: public function may take another kernel, and autograd would make gradients of the full size for each view. None
#: without it: attention then takes one call for all keys.
flash_attention_for_cpu = _aten("_scaled_dot_product_flash_attention_for_cpu")
flash_attention_for_cpu_backward = _aten("_scaled_dot_product_flash_attention_for_cpu_backward")


def _onednn_linear() -> Callable[..., torch.Tensor] | None:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    op = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if op is None:
        return None
    return lambda x, weight, bias: op(x, weight, bias, "none", [], "")


#: A linear layer by oneDNN, as Inductor's graphs call it, without a gradient. functional.linear takes MKL for float32.
#: None without it: layers then run as they are.
onednn_linear = _onednn_linear()


def bsr_dense_addmm() -> Callable[..., torch.Tensor]:
    """Torch's Triton kernel of block-sparse weights: ``input + bsr @ dense``.

    The public torch.nn.functional.linear reaches it for batches of some sizes only. Imported when it is first used: its
    module imports the compiler.
    """
    from torch.sparse._triton_ops import bsr_dense_addmm

    found: Callable[..., torch.Tensor] = bsr_dense_addmm
    return found


def is_bsr_tuned(outputs: int, inputs: int, batch: int, side: int, dtype: torch.dtype) -> bool:
    """Whether torch has tuned `bsr_dense_addmm` for the current device and such a product.

    There is no public name; without it, torch's kernel is not used unless it is forced.
    """
    return _is_bsr_tuned(_device_name(), outputs, inputs, batch, side, dtype)


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


@lru_cache(256)
def _is_bsr_tuned(device: str, outputs: int, inputs: int, batch: int, side: int, dtype: torch.dtype) -> bool:
    try:
        from torch.sparse import _triton_ops_meta
    except ImportError:
        return False
    get_meta: Callable[..., Any] = _triton_ops_meta.get_meta
    # The sizes, whether the bias is left out, whether it is added as it is, and the product too.
    key = (outputs, inputs, "*", side, side, False, True, True)
    found: Any = get_meta("bsr_dense_addmm", key, device, version=(0, dtype, 0.5))
    # Of another batch, the tile is taken where it divides this one.
    return any(each[2] <= batch and batch % (each[2] // meta["SPLIT_N"]) == 0 for each, meta in (found or {}).items())
