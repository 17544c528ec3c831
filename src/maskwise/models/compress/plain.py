"""Gates, masks and sparse layers taken off a model: what is left are torch's own layers, with exact zeros."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from maskwise.models.compress.copying import put
from maskwise.nn import MaskedConv2d, MaskedLinear, SparseLinear
from maskwise.nn.attaching import leave_effective
from maskwise.nn.gated import chains_of
from maskwise.nn.gates import Gate

__all__ = ["Origin", "make_plain"]


@dataclass(frozen=True)
class Origin:
    """What a layer was before it was made plain."""

    kind: str
    #: What its gate or its mask keeps, of the weight's shape, if it had one: a kept weight may be 0 by chance.
    bits: Tensor | None = None


def make_plain(model: nn.Module) -> tuple[nn.Module, dict[str, Origin]]:
    """Take gates, pruning masks and sparse layers off a model in evaluation, in place.

    >>> import maskwise as mw
    >>> model = nn.Sequential(mw.nn.MaskedLinear(8, 4, gate=mw.nn.gates.NM(2, 4)))
    >>> model, origins = make_plain(model.eval())
    >>> model[0], origins["0"].kind, int((model[0].weight != 0).sum())
    (Linear(in_features=8, out_features=4, bias=True), 'MaskedLinear', 16)

    Returns:
        The model, and what each layer that was changed has been, by name.
    """
    origins: dict[str, Origin] = {}
    with torch.no_grad():
        for name, module in list(model.named_modules()):
            if isinstance(module, MaskedLinear):
                origins[name] = Origin("MaskedLinear", module.mask.to_bool().clone())
                model = put(model, module, _linear(module, module.gate(module.weight)))
            elif isinstance(module, MaskedConv2d):
                origins[name] = Origin("MaskedConv2d", module.mask.to_bool().clone())
                model = put(model, module, _conv(module, module.gate(module.weight)))
            elif type(module) is SparseLinear:
                origins[name] = Origin("SparseLinear", module.mask.to_bool())
                plain = module.to_linear()
                plain.weight.requires_grad_(module.values.requires_grad)
                if module.bias is not None:
                    plain.bias.requires_grad_(module.bias.requires_grad)
                model = put(model, module, plain)
            elif any(isinstance(step, Gate) for chain in chains_of(module).values() for step in chain):
                origins[name] = _without_gates(module)
            elif pruned := _pruned_names(module):
                from torch.nn.utils import prune

                bits = module._buffers["weight_mask"] if "weight" in pruned else None
                origins[name] = Origin("pruned " + type(module).__name__, None if bits is None else bits != 0)
                for each in pruned:
                    original = module._parameters[f"{each}_orig"]
                    assert original is not None
                    # Removed in place: every other holder of the weight has it without the mask.
                    module._parameters[f"{each}_orig"] = nn.Parameter(original.clone(), original.requires_grad)
                    prune.remove(module, each)  # type: ignore[no-untyped-call]
    return model, origins


def _without_gates(module: nn.Module) -> Origin:
    """Leave the effective weights behind. Other parametrizations on them go too: they are computed once."""
    kind = parametrize.type_before_parametrizations(module).__name__
    bits: Tensor | None = None
    for name, chain in list(chains_of(module).items()):
        gates = [step for step in chain if isinstance(step, Gate)]
        if not gates:
            continue
        if name == "weight" and len(chain) == 1:
            original = chain.original
            assert isinstance(original, Tensor)
            bits = gates[0].bits(original).clone()
        # Whoever shares the weight, as an embedding that is tied to it, has it without the gate.
        leave_effective(module, name, is_shared=True)
    return Origin(f"gated {kind}", bits)


def _pruned_names(module: nn.Module) -> list[str]:
    """The tensors of a module that `torch.nn.utils.prune` holds a mask for."""
    hooks = module._forward_pre_hooks.values()
    if not hooks:
        return []
    # Only here, where a module may have been pruned by it: torch does not load it, and so nobody else need.
    from torch.nn.utils import prune

    return [hook._tensor_name for hook in hooks if isinstance(hook, prune.BasePruningMethod)]


def _linear(module: MaskedLinear, effective: Tensor) -> nn.Linear:
    plain = nn.Linear(
        module.in_features, module.out_features, module.bias is not None, effective.device, effective.dtype
    )
    _take(plain, module, effective)
    return plain


def _conv(module: MaskedConv2d, effective: Tensor) -> nn.Conv2d:
    plain = nn.Conv2d(
        module.in_channels,
        module.out_channels,
        module.kernel_size,  # type: ignore[arg-type]
        module.stride,  # type: ignore[arg-type]
        module.padding,  # type: ignore[arg-type]
        module.dilation,  # type: ignore[arg-type]
        module.groups,
        module.bias is not None,
        module.padding_mode,
        effective.device,
        effective.dtype,
    )
    _take(plain, module, effective)
    return plain


def _take(plain: nn.Linear | nn.Conv2d, module: nn.Linear | nn.Conv2d, effective: Tensor) -> None:
    plain.weight.copy_(effective)
    plain.weight.requires_grad_(module.weight.requires_grad)
    if module.bias is not None:
        assert plain.bias is not None
        plain.bias.copy_(module.bias)
        plain.bias.requires_grad_(module.bias.requires_grad)
    plain.train(module.training)
    # Hooks of the layer go with it, and keep it dense.
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        getattr(plain, name).update(getattr(module, name))
