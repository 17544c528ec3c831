"""Which tensors of a module are weights: what an input is multiplied by."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.rnn import RNNCellBase
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from maskwise.nn.gated import chains_of, gated
from maskwise.nn.gates import Gate

__all__ = ["ungated", "weights_of"]

_TABLES = (nn.Embedding, nn.EmbeddingBag)


def weights_of(module: nn.Module) -> list[str]:
    """The names of a module's own weights; none for norms, tables of embeddings, and kinds that are not known.

    Known are linear layers and convolutions of torch, ``Bilinear``, recurrent layers and cells, the projections of
    ``MultiheadAttention``, the ``Conv1D`` of transformers, and weights of three dims, one matrix for each expert.

    >>> weights_of(nn.MultiheadAttention(4, 2)), weights_of(nn.GRUCell(2, 3)), weights_of(nn.LayerNorm(4))
    (['in_proj_weight'], ['weight_ih', 'weight_hh'], [])
    """
    tensors = _tensors(module)
    if isinstance(module, nn.Linear | nn.Bilinear | _ConvNd) or _is_transformers_conv1d(module):
        return ["weight"] if "weight" in tensors else []
    if isinstance(module, nn.RNNBase | RNNCellBase):
        return [name for name in tensors if name.startswith("weight_")]
    if isinstance(module, nn.MultiheadAttention):
        return [name for name in tensors if name.endswith("proj_weight")]
    if _has_experts(module):
        return [name for name, tensor in tensors.items() if not is_lazy(tensor) and tensor.dim() == 3]
    return []


def _is_transformers_conv1d(module: nn.Module) -> bool:
    # By name, since transformers is not imported for this.
    return any(
        (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D") for kind in type(module).mro()
    )


def _has_experts(module: nn.Module) -> bool:
    if any(kind.__name__.endswith("Experts") for kind in type(module).mro()):
        return True
    count = getattr(module, "num_experts", None)
    return count is not None and any(
        not is_lazy(t) and t.dim() == 3 and t.shape[0] == count for t in _tensors(module).values()
    )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """The module's own parameters, and its parametrized tensors as they were before that; only those of floats."""
    found = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
    for name, chain in chains_of(module).items():
        # Where a weight is made of several tensors, it has the number of dims of the largest.
        found[name] = max(chain.parameters(recurse=False), key=lambda tensor: tensor.dim(), default=nn.Parameter())
    return {name: tensor for name, tensor in found.items() if tensor.is_floating_point() or tensor.is_complex()}


def ungated(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, tuple[int, ...], str]]:
    """What could be a weight of a model and has no gate: everything of two dims or more, with the reason.

    >>> [(name, why) for name, _, _, _, why in ungated(nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2)))]
    [('0.weight', 'a table that is looked up, not multiplied'), ('1.weight', 'it has no gate')]
    """
    with_gate = {(found.module, found.tensor_name) for found in gated(model)}
    # What a gate or a parametrization holds for itself is no weight of the model.
    inner = {
        part
        for module in model.modules()
        if isinstance(module, Gate | parametrize.ParametrizationList)
        for part in module.modules()
    }
    for module_name, module in model.named_modules():
        if module in inner:
            continue
        known = weights_of(module)
        for name, tensor in _tensors(module).items():
            if is_lazy(tensor):
                if name in known:
                    yield f"{module_name}.{name}" if module_name else name, module, name, (), "not initialized yet"
                continue
            if tensor.dim() < 2 or (module, name) in with_gate:
                continue
            if name in known:
                reason = "it has no gate"
            elif isinstance(module, _TABLES):
                reason = "a table that is looked up, not multiplied"
            else:
                reason = f"prune does not know it for a weight; mw.nn.attach(module, gate, {name!r}) gates it"
            yield f"{module_name}.{name}" if module_name else name, module, name, tuple(tensor.shape), reason
