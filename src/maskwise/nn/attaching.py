"""Put a gate on a weight of any module, find the gates of a model, and take them off again."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from maskwise.distributed.group import is_sharded, whole
from maskwise.errors import ArgumentError, DtypeError, say
from maskwise.mask import Mask
from maskwise.nn.arguments import check_initialized, check_module
from maskwise.nn.gates import Binary, Gate
from maskwise.nn.gates.gate import check_unbound
from maskwise.ops.arguments import MaskLike

__all__ = ["Gated", "attach", "chains_of", "check_attach", "detach", "gated", "leave_effective", "own_gate"]

M = TypeVar("M", bound=nn.Module)


def attach(module: M, gate: Gate | MaskLike, name: str = "weight") -> M:
    """Gate a weight of a module: from now on ``module.weight`` is the effective weight.

    >>> import torch, maskwise as mw
    >>> layer = torch.nn.Linear(3, 2)
    >>> _ = mw.nn.attach(layer, mw.Mask.from_lengths([1, 2], max_len=3))
    >>> (layer.weight != 0).tolist()
    [[True, False, False], [True, True, False]]
    >>> list(layer.state_dict())
    ['bias', 'parametrizations.weight.original', 'parametrizations.weight.0.kept']

    The dense parameter goes on under ``module.parametrizations.weight.original``; it is the same object, so that an
    optimizer which has it goes on as before. Whatever an optimizer does to dropped weights, momentum and weight decay
    included, the module computes with the effective weight, in which they are 0. Parameters of the gate itself are new:
    make the optimizer afterwards, or add them. The module can be copied and pickled, compiled and run under autocast,
    DistributedDataParallel and ``fully_shard`` as before; attach first, shard afterwards.

    Args:
        module: any module that has a parameter or a buffer of this name: Linear, Conv, Embedding, an RNN, ...
        gate: a gate of `mw.nn.gates`, one for each weight; or a Mask or a bool tensor, True meaning keep, which becomes
            ``Binary(mask)``.
        name: the name of the tensor, such as ``"weight_hh_l0"`` of an LSTM.

    Returns:
        The module, changed in place.

    Raises:
        DtypeError: ``module`` is not a module, ``gate`` is neither a gate nor a mask, or the weight is not of floats.
        ArgumentError: there is no such tensor, it is not initialized (a lazy module) or sharded already, it has a gate
            already, or the gate belongs to another weight.
        ShapeError: the gate does not fit the weight; the hint says what would.
        DeviceError: the gate's mask is on another device.
    """
    gate = Binary(gate) if isinstance(gate, (Mask, Tensor)) else gate
    weight = check_attach(module, gate, name)
    gate.bind(weight)
    try:
        parametrize.register_parametrization(module, name, gate)
    except BaseException:
        gate.bound = False
        raise
    make_copyable(module)
    return module


def check_attach(module: nn.Module, gate: Gate, name: str) -> Tensor:
    """The weight that the gate is for, if it can have one."""
    check_module("attach", module, "module")
    if not isinstance(gate, Gate):
        hint = "Binary(mask)" if not isinstance(gate, type) else f"{gate.__name__}(...)"
        if isinstance(gate, (int, float)):
            hint = f"mw.nn.prune(module, {gate}) to drop that share, mw.nn.attach(module, TopK({gate})) to keep it"
        must = "be a gate of mw.nn.gates, or a mask"
        raise DtypeError(say("attach", "gate", must=must, got=type(gate).__name__, hint=hint))
    if own_gate(module) is not None and name == "weight":
        kind = type(module).__name__
        hint = f"{kind}(..., gate=gate)"
        raise ArgumentError(say("attach", "module", must="have no gate yet", got=f"a {kind} with its own", hint=hint))
    if any(found.module is module and found.tensor_name == name for found in gated(module)):
        hint = "mw.nn.detach(module) first, or one Binary(a & b)"
        raise ArgumentError(
            say("attach", "module", must=f"have no gate on {name!r} yet", got="one with a gate", hint=hint)
        )
    check_unbound("attach", gate)
    if not parametrize.is_parametrized(module, name):
        tensors = {**module._parameters, **module._buffers}
        if not isinstance(tensors.get(name), Tensor):
            names = [each for each, tensor in tensors.items() if isinstance(tensor, Tensor)]
            hint = f"name={names[0]!r}" if names else "gate one of its children, or mw.nn.prune(model, ...)"
            must = f"be a tensor of {type(module).__name__}, one of {names}"
            raise ArgumentError(say("attach", "name", must=must, got=repr(name), hint=hint))
        check_initialized("attach", "module", tensors[name])
        _check_whole("attach", tensors[name])
    with torch.no_grad():
        weight: Tensor = getattr(module, name)
    return weight


def _check_whole(op: str, weight: Tensor | None) -> None:
    """Raise for a weight that ``fully_shard`` holds by the name of its module's parameter."""
    if weight is not None and is_sharded(weight):
        must, hint = "have a weight that is not sharded", f"mw.nn.{op} before fully_shard"
        raise ArgumentError(say(op, "module", must=must, got="a DTensor", hint=hint))


def detach(module: M, keep: Literal["masked", "original"] = "masked", name: str | None = None) -> M:
    """Take the gates of a module off, and leave a plain parameter.

    >>> import torch, maskwise as mw
    >>> layer = mw.nn.attach(torch.nn.Linear(4, 4), mw.nn.gates.TopK(0.25))
    >>> int((mw.nn.detach(layer).weight != 0).sum()), type(layer).__name__
    (4, 'Linear')

    A weight that another module holds as well, such as that of an embedding which a language model's head is tied to,
    stays what it is there: with ``keep="masked"`` the module gets a parameter of its own, and a warning says so.
    Tying them again (``tie_weights()``, loading a file that stores them once) undoes the masking.

    Args:
        module: a module that `attach` has changed. Its children are left alone.
        keep: ``"masked"`` leaves the effective weight, as evaluation has it, so that outputs stay; ``"original"`` the
            dense one, with what dropped weights held.
        name: the tensor's name; by default, every gated one of the module.

    Returns:
        The module, changed in place; its parameter is still the same object, unless another module holds that too.

    Raises:
        DtypeError: ``module`` is not a module.
        ArgumentError: there is no such gate, ``keep`` is neither of both, another parametrization is on the weight, it
            is sharded, or ``gc.freeze`` hides who else holds it.
    """
    check_module("detach", module, "module")
    if keep not in ("masked", "original"):
        raise ArgumentError(
            say("detach", "keep", must='be "masked" or "original"', got=repr(keep), hint='keep="masked"')
        )
    found = [each for each in gated(module) if each.module is module and own_gate(module) is not each.gate]
    chosen = [each for each in found if name is None or each.tensor_name == name]
    if not chosen:
        what = "a gate" if name is None else f"a gate on {name!r}"
        inside = [each.module_name for each in gated(module) if each.module_name]
        hint = f"detach the child {inside[0]!r}" if inside else "mw.nn.attach(module, gate)"
        raise ArgumentError(say("detach", "module", must=f"have {what}", got=type(module).__name__, hint=hint))
    for each in chosen:
        chain = list(chains_of(module)[each.tensor_name])
        if len(chain) > 1:
            others = ", ".join(type(step).__name__ for step in chain if step is not each.gate)
            must = f"have nothing but a gate on {each.tensor_name!r}"
            hint = "torch.nn.utils.parametrize.remove_parametrizations removes all of them"
            raise ArgumentError(say("detach", "module", must=must, got=f"also {others}", hint=hint))
    for each in chosen:
        for original in chains_of(module)[each.tensor_name].parameters(recurse=False):
            _check_whole("detach", original)
    holders = {each.tensor_name: _other_holders(module, each.tensor_name) for each in chosen if keep == "masked"}
    for each in chosen:
        training = each.gate.training
        # A gate that draws has no weight to leave behind; in evaluation it has.
        each.gate.eval()
        if keep == "masked":
            sharing = holders[each.tensor_name]
            leave_effective(module, each.tensor_name, is_shared=bool(sharing))
            if sharing:
                warnings.warn(
                    f"detach: {each.tensor_name!r} was shared with {', '.join(sharing)}, which keeps it unmasked; "
                    f"{type(module).__name__} has a parameter of its own now. Hint: add it to the optimizer, and do "
                    "not tie them again.",
                    stacklevel=2,
                )
        else:
            parametrize.remove_parametrizations(module, each.tensor_name, leave_parametrized=False)
        each.gate.train(training)
        each.gate.bound = False
    return module


def leave_effective(module: nn.Module, name: str, *, is_shared: bool) -> None:
    """Leave the effective weight as a plain parameter: the same object, or one of its own where others hold that."""
    chain = chains_of(module)[name]
    if is_shared and chain.is_tensor:
        # What is left behind is written into the original, in place.
        original = chain.original
        assert isinstance(original, Tensor)
        copied = original.detach().clone()
        is_parameter = isinstance(original, nn.Parameter)
        chain.original = nn.Parameter(copied, original.requires_grad) if is_parameter else copied
    parametrize.remove_parametrizations(module, name, leave_parametrized=True)


def _other_holders(module: nn.Module, name: str) -> list[str]:
    """The classes of other modules that hold the original of a weight; a parameter does not know them itself."""
    if gc.get_freeze_count():
        must = "be visible to the garbage collector, which finds who else holds its weight"
        hint = "gc.unfreeze() first"
        raise ArgumentError(say("detach", "module", must=must, got="objects that gc.freeze() hides", hint=hint))
    chain = chains_of(module)[name]
    if not chain.is_tensor:
        return []
    found = set()
    for holder in gc.get_referrers(chain.original):
        if not isinstance(holder, dict) or holder is chain._parameters or holder is chain._buffers:
            continue
        for owner in gc.get_referrers(holder):
            # A module holds its attributes itself, or in a dict.
            for each in (
                [owner] if isinstance(owner, nn.Module) else gc.get_referrers(owner) if type(owner) is dict else []
            ):
                if isinstance(each, nn.Module) and (each._parameters is holder or each._buffers is holder):
                    found.add(type(each).__name__)
    return sorted(found)


# -- the gates of a model ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Gated:
    """One weight that has a gate: the module's name in the model, the module, the tensor's name in it, the gate."""

    module_name: str
    module: nn.Module
    tensor_name: str
    gate: Gate

    @property
    def name(self) -> str:
        """The weight's name in the model.

        >>> Gated("encoder.0", nn.Linear(2, 2), "weight", Gate()).name
        'encoder.0.weight'
        """
        return f"{self.module_name}.{self.tensor_name}" if self.module_name else self.tensor_name

    def weight(self) -> Tensor:
        """The weight as the gate gets it, without a graph: the whole of it, where it is sharded over ranks."""
        if own_gate(self.module) is self.gate:
            weight: Tensor = getattr(self.module, self.tensor_name)
            return whole(weight.detach())
        chain = chains_of(self.module)[self.tensor_name]
        with torch.no_grad():
            names = ["original"] if chain.is_tensor else [f"original{i}" for i in range(chain.ntensors)]
            originals = [whole(getattr(chain, name)) for name in names]
            found = originals[0]
            for position, step in enumerate(chain):
                if step is self.gate:
                    break
                found = step(*originals) if position == 0 else step(found)
        assert isinstance(found, Tensor)
        return found.detach()

    def mask(self) -> Mask:
        """What the gate keeps at the moment."""
        return self.gate.mask(self.weight())


def chains_of(module: nn.Module) -> dict[str, parametrize.ParametrizationList]:
    """The parametrizations of each tensor of a module, by the tensor's name."""
    if not parametrize.is_parametrized(module):
        return {}
    found = module.parametrizations
    assert isinstance(found, nn.ModuleDict)
    return {name: chain for name, chain in found.items() if isinstance(chain, parametrize.ParametrizationList)}


def own_gate(module: nn.Module) -> Gate | None:
    """The gate of a layer that was made with one, such as MaskedLinear."""
    gate = module._modules.get("gate")
    return gate if isinstance(gate, Gate) and "weight" in module._parameters else None


def gated(model: nn.Module) -> Iterator[Gated]:
    """Every gated weight of a model, in the order of its modules.

    >>> import maskwise as mw
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> _ = mw.nn.attach(model[2], mw.nn.gates.TopK(0.5))
    >>> [found.name for found in gated(model)]
    ['2.weight']
    """
    for module_name, module in model.named_modules():
        own = own_gate(module)
        if own is not None:
            yield Gated(module_name, module, "weight", own)
        for tensor_name, chain in chains_of(module).items():
            for step in chain:
                if isinstance(step, Gate):
                    yield Gated(module_name, module, tensor_name, step)


# -- copies and pickles ------------------------------------------------------------------------------------------------
# `torch.nn.utils.parametrize` gives each module a class of its own, with a property in place of the tensor. Pickle does
# not find that class, so torch raises. A deepcopy shares the class, so that removing the parametrization from one of
# both breaks the other. Here, a module is rebuilt from its own class, the names of its parametrized tensors and its
# state.
def make_copyable(module: nn.Module) -> None:
    """Let a parametrized module be pickled, and be copied into one that stands on its own.

    >>> import pickle
    >>> layer = nn.Linear(2, 2)
    >>> _ = parametrize.register_parametrization(layer, "weight", nn.Identity())
    >>> make_copyable(layer)
    >>> torch.equal(pickle.loads(pickle.dumps(layer)).weight, layer.weight)
    True
    """
    # Torch made this class for this module alone.
    own: Any = type(module)
    own.__reduce_ex__ = _reduce
    own.__setstate__ = _set_state
    if "__deepcopy__" in vars(own):
        # Torch's stand-in for the class's own; without it, copy goes by __reduce_ex__.
        del own.__deepcopy__


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    base = parametrize.type_before_parametrizations(self)
    # object has it since Python 3.11.
    get = getattr(base, "__getstate__", None)
    state = get(self) if get is not None else self.__dict__
    if isinstance(self, nn.RNNBase):
        # Weights as they were computed for the last call. They are no leaves of a graph, and are computed again.
        state = {**state, "_flat_weights": [None] * len(state["_flat_weights"])}
    return _shell, (base, tuple(self.parametrizations)), state


def _set_state(self: Any, state: dict[str, Any]) -> None:
    super(type(self), self).__setstate__(state)
    if isinstance(self, nn.RNNBase):
        self._init_flat_weights()


def _shell(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """A module of this class whose tensors of these names are parametrized, and that has no state yet."""
    shell = base.__new__(base)
    nn.Module.__init__(shell)
    for name in names:
        shell.register_buffer(name, torch.empty(0))
        parametrize.register_parametrization(shell, name, nn.Identity(), unsafe=True)
    shell.__dict__.clear()
    make_copyable(shell)
    return shell
