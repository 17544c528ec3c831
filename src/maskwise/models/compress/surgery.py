"""Module surgery: copy a model, replace modules, materialize masked weights, disable the fast path of encoders."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from maskwise.nn import MaskedConv2d, MaskedLinear, SparseLinear
from maskwise.nn.attaching import chains_of, leave_effective
from maskwise.nn.gates import Gate

__all__ = [
    "Origin",
    "assign",
    "clone_model",
    "conv_arguments",
    "dense_like",
    "has_hooks",
    "hooks",
    "materialize_masks",
    "must_stay_dense",
    "parents",
    "replace_module",
    "update_fast_paths",
    "without_nested_tensors",
]

Model = TypeVar("Model", bound=nn.Module)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NESTED = (
    "torch's encoder reads its weight directly when it skips padding, and outputs 0 there; "
    "nn.TransformerEncoder(..., enable_nested_tensor=False) calls it"
)


# -- copies and replacements -------------------------------------------------------------------------------------------
def clone_model(model: Model) -> Model:
    """A deep copy, also of a model with masks of `torch.nn.utils.prune`.

    >>> from torch.nn.utils import prune
    >>> layer = prune.random_unstructured(nn.Linear(2, 2), "weight", amount=2)
    >>> torch.equal(clone_model(layer).weight, layer.weight)
    True
    """
    # Deepcopy refuses non-leaf tensors, such as prune stores as attributes; they are recomputed in forward.
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(model, memo)


def hooks(module: nn.Module) -> list[Any]:
    """The forward and backward hooks of a module."""
    return [hook for name in _HOOKS for hook in getattr(module, name, {}).values()]


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks, which observe its inputs, outputs or weights."""
    return bool(hooks(module))


def parents(model: nn.Module, module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Every parent of a module, with the child's name in it; a shared module has several, the root none."""
    return [(parent, name) for parent in model.modules() for name, child in parent._modules.items() if child is module]


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Replace a module in all its parents. Returns the model, which is the new module if it was the old one.

    >>> model = nn.Sequential(nn.ReLU(), nn.ReLU())
    >>> replace_module(model, model[0], nn.Tanh())[0]
    Tanh()
    """
    if model is old:
        return new
    for parent, name in parents(model, old):
        parent._modules[name] = new
    return model


def conv_arguments(conv: nn.Conv2d) -> dict[str, Any]:
    """The constructor arguments of a convolution."""
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    return {**{name: getattr(conv, name) for name in names}, "bias": conv.bias is not None}


@torch.no_grad()
def assign(parameter: Tensor, values: Tensor, like: Tensor) -> None:
    """Copy values into a parameter, which requires grad if ``like`` does."""
    parameter.copy_(values)
    parameter.requires_grad_(like.requires_grad)


def dense_like(layer: nn.Linear | nn.Conv2d, weight: Tensor, bias: Tensor | None) -> nn.Linear | nn.Conv2d:
    """A torch layer of this weight and bias; everything but the sizes, hooks included, is copied from another one."""
    factory: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    dense: nn.Linear | nn.Conv2d
    if isinstance(layer, nn.Linear):
        dense = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, **factory)
    else:
        channels = {"in_channels": weight.shape[1] * layer.groups, "out_channels": weight.shape[0]}
        dense = nn.Conv2d(**{**conv_arguments(layer), **channels, "bias": bias is not None}, **factory)
    assign(dense.weight, weight, layer.weight)
    if bias is not None:
        assert dense.bias is not None
        assign(dense.bias, bias, layer.weight if layer.bias is None else layer.bias)
    for name in _HOOKS:
        getattr(dense, name).update(getattr(layer, name))
    return dense.train(layer.training)


# -- masked weights ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Origin:
    """What a layer was before its mask was materialized."""

    kind: str
    #: The mask of its weight, of the weight's shape, if it had one: a kept weight may be 0 by chance.
    mask: Tensor | None = None


@torch.no_grad()
def materialize_masks(model: nn.Module) -> tuple[nn.Module, dict[str, Origin]]:
    """Replace gates, pruning masks and sparse layers by dense torch layers with exact zeros, in place.

    >>> import maskwise as mw
    >>> model = nn.Sequential(mw.nn.MaskedLinear(8, 4, gate=mw.nn.gates.NM(2, 4)))
    >>> model, origins = materialize_masks(model.eval())
    >>> model[0], origins["0"].kind, int((model[0].weight != 0).sum())
    (Linear(in_features=8, out_features=4, bias=True), 'MaskedLinear', 16)

    Returns:
        The model, and what each changed layer was, by name.
    """
    origins: dict[str, Origin] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, MaskedLinear | MaskedConv2d):
            kind = "MaskedLinear" if isinstance(module, MaskedLinear) else "MaskedConv2d"
            origins[name] = Origin(kind, module.mask.to_bool().clone())
            model = replace_module(model, module, dense_like(module, module.gate(module.weight), module.bias))
        elif type(module) is SparseLinear:
            origins[name] = Origin("SparseLinear", module.mask.to_bool())
            dense = module.to_linear()
            dense.weight.requires_grad_(module.values.requires_grad)
            if module.bias is not None:
                dense.bias.requires_grad_(module.bias.requires_grad)
            model = replace_module(model, module, dense)
        elif any(isinstance(step, Gate) for chain in chains_of(module).values() for step in chain):
            origins[name] = _remove_gates(module)
        elif pruned := _pruned_names(module):
            origins[name] = _remove_pruning(module, pruned)
    return model, origins


def _remove_gates(module: nn.Module) -> Origin:
    """Leave the effective weights. Other parametrizations on the same weights go too: they are computed once."""
    kind = parametrize.type_before_parametrizations(module).__name__
    mask: Tensor | None = None
    for name, chain in list(chains_of(module).items()):
        gates = [step for step in chain if isinstance(step, Gate)]
        if not gates:
            continue
        if name == "weight" and len(chain) == 1:
            original = chain.original
            assert isinstance(original, Tensor)
            mask = gates[0].bits(original).clone()
        # A module that shares the weight, such as a tied embedding, keeps it without the gate.
        leave_effective(module, name, is_shared=True)
    return Origin(f"gated {kind}", mask)


def _pruned_names(module: nn.Module) -> list[str]:
    """The tensors of a module that have a mask of `torch.nn.utils.prune`."""
    if not has_hooks(module):
        return []
    # torch does not import it, so only models that may have been pruned pay for it.
    from torch.nn.utils import prune

    return [hook._tensor_name for hook in hooks(module) if isinstance(hook, prune.BasePruningMethod)]


def _remove_pruning(module: nn.Module, names: list[str]) -> Origin:
    from torch.nn.utils import prune

    mask = module._buffers["weight_mask"] if "weight" in names else None
    origin = Origin("pruned " + type(module).__name__, None if mask is None else mask != 0)
    for name in names:
        original = module._parameters[f"{name}_orig"]
        assert original is not None
        # prune.remove writes in place; a module that shares the weight keeps it without the mask.
        module._parameters[f"{name}_orig"] = nn.Parameter(original.clone(), original.requires_grad)
        prune.remove(module, name)  # type: ignore[no-untyped-call]
    return origin


# -- torch's encoder layers, which in evaluation read the weights of their linear layers directly ----------------------
def update_fast_paths(model: nn.Module, original: nn.Module | None = None) -> None:
    """Disable the fast path of encoder layers whose linear layers are no torch.nn.Linear; others are as in `original`.

    >>> layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    >>> layer.linear1 = nn.Sequential(layer.linear1)
    >>> update_fast_paths(layer)
    >>> bool(layer.activation_relu_or_gelu)
    False
    """
    before = {} if original is None else dict(original.named_modules())
    for name, module in model.named_modules():
        if not isinstance(module, nn.TransformerEncoderLayer):
            continue
        # activation_relu_or_gelu is the one condition of the fast path that nothing else depends on.
        if not all(isinstance(linear, nn.Linear) for linear in (module.linear1, module.linear2)):
            module.activation_relu_or_gelu = 0
        elif isinstance(was := before.get(name), nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = was.activation_relu_or_gelu


def must_stay_dense(model: nn.Module) -> dict[nn.Module, str]:
    """The linear layers that must stay torch.nn.Linear, and why: encoders with nested tensors only have a fast path.

    >>> layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    >>> len(must_stay_dense(nn.TransformerEncoder(layer, 1)))
    2
    """
    layers = [layer for encoder in _nested_encoders(model) for layer in encoder.layers]
    return {linear: _NESTED for layer in layers for linear in (layer.linear1, layer.linear2)}


@contextmanager
def without_nested_tensors(model: nn.Module) -> Iterator[None]:
    """Let encoders call their layers with plain tensors: layers with hooks take no nested ones."""
    encoders = _nested_encoders(model)
    for encoder in encoders:
        encoder.use_nested_tensor = False
    try:
        yield
    finally:
        for encoder in encoders:
            encoder.use_nested_tensor = True


def _nested_encoders(model: nn.Module) -> list[nn.TransformerEncoder]:
    encoders = [module for module in model.modules() if isinstance(module, nn.TransformerEncoder)]
    return [encoder for encoder in encoders if getattr(encoder, "use_nested_tensor", False)]
