"""Whether a model gives the same packed as padded: compared on the model itself, before anyone relies on it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from maskwise.errors import caller_level
from maskwise.models.adapter import UnsupportedModelError
from maskwise.models.hugging_face.frames import Frame, call, recording
from maskwise.models.hugging_face.inputs import takes
from maskwise.models.hugging_face.layout import Layout
from maskwise.models.hugging_face.mixing import MixingError, MixingWatch
from maskwise.models.hugging_face.outputs import OTHER, kind_of, leaves, unpacked
from maskwise.models.hugging_face.state import State, layout_for, original, packed_parts, run_packed, state_of
from maskwise.models.report import Padded

__all__ = ["check"]

LENGTH = 13
"""Of the padded batch: a size that hardly anything else has, and so is the number of tokens that it keeps, 43."""
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Relative to the largest value of an output. Packing moves float32 sums by 1e-6; a wrong mask or position by 1e-2."""
HALF_TOLERANCE = 5e-2
SCALED_PARAMETERS = 400_000_000
"""Models of more parameters are compared with the weights that they have: others would take as much memory again."""
PROBE = Padded("a probe")


class _NoReferenceError(Exception):
    """The padded model itself cannot run a small batch of text with these weights."""


def check(module: Any) -> None:
    """Compare a covered model, packed and padded: every output, right-padded, left-padded, with holes and full.

    What is found on the way (how outputs lie, whether first tokens and router logits come out the same) goes into the
    model's state. The weights are random ones, of a size at which mixed tokens show, unless the model is large.

    Raises:
        UnsupportedModelError: it does not give the same.
    """
    state = state_of(module)
    compare = _compare_base if state.base else _compare_around
    for each in packed_parts(module):
        if each is not module and not state_of(each).checked:
            check(each)
    state.checked = True
    try:
        with torch.no_grad(), _unchanged(module), recording(), torch.autocast(module.device.type, enabled=False):
            module.eval()
            if not _scaled(module, compare):
                compare(module)
    except _NoReferenceError as error:
        if compare is _compare_base:
            state.checked = False
            raise UnsupportedModelError(f"a small batch of text, padded, raised {error}") from error.__cause__
        if not type(module).__module__.startswith("transformers."):
            warnings.warn(
                f"unpad: this {type(module).__name__} could not be compared with its padded self, because a small "
                f"batch of text raised {error}. Where a token is dropped, it finds 0. Hint: compare a batch of yours.",
                stacklevel=caller_level(),
            )
    except BaseException:
        state.checked = False
        raise


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Take back what a call leaves on modules: their mode, cached frequencies, hooks that capture outputs."""
    modules = list(model.modules())
    before = [[dict(each) for each in _attributes(module)] for module in modules]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, copy in buffers:
            buffer.copy_(copy)
        for module, snapshots in zip(modules, before, strict=True):
            for attributes, snapshot in zip(_attributes(module), snapshots, strict=True):
                attributes.clear()
                attributes.update(snapshot)


def _attributes(module: nn.Module) -> list[dict[Any, Any]]:
    return [module._buffers, module._forward_hooks, module._forward_pre_hooks, vars(module)]


def _compare_base(base: Any) -> None:
    """A model without its head, and what is to be known of its outputs."""
    state, keep = state_of(base), _masks(base.device)
    named = _inputs(base, keep)
    padded = _reference(base, named)
    layout = layout_for(state, keep)
    narrow = Layout(layout.packing, 5, -(-layout.tokens // 5))
    for each in (layout, narrow):
        # In one row, the size of the tokens' dim is one that nothing else has.
        watch = MixingWatch(layout.width) if each is layout else nullcontext()
        with _refusing(), watch:
            packed = run_packed(base, named, each)
        state.kinds = _kinds(padded, packed, each)
        packed = unpacked(packed, each, state.kinds)
        _equal(padded, packed, keep)
    state.computes_first = not state.causal and _same_first(padded, packed, state)
    if _accepts(base, "output_router_logits") and hasattr(base.config, "output_router_logits"):
        state.routers = _same_routers(base, {**named, "output_router_logits": True}, layout, keep)


def _same_first(padded: Any, packed: Any, state: State) -> bool:
    """Whether dropped first tokens come out the same, as those do that find a key in their window."""
    first = torch.zeros(4, LENGTH, dtype=torch.bool)
    first[:, 0] = True
    return not _differences(padded, packed, first) and not state.empty_windows


def _same_routers(base: Any, named: dict[str, Any], layout: Layout, keep: Tensor) -> bool:
    """Whether router logits come out the same; remembers how they lie."""
    state = state_of(base)
    try:
        padded = _reference(base, named)
        with _refusing():
            packed = run_packed(base, named, layout)
        kinds = _kinds(padded, packed, layout)
        _equal(padded, unpacked(packed, layout, kinds), keep)
    except (_NoReferenceError, UnsupportedModelError):
        return False
    state.kinds = {**kinds, **state.kinds}
    return True


def _compare_around(model: Any) -> None:
    """A model around others that are packed: its head, or a composite of which only the language model is."""
    keep = _masks(model.device)
    if not all(state_of(each).causal or state_of(each).computes_first for each in packed_parts(model)):
        keep[1] = keep[0]
    named = _inputs(model, keep)
    _same_around(model, named, keep)
    if takes(model, "output_router_logits"):
        try:
            _same_around(model, {**named, "output_router_logits": True}, keep)
        except (_NoReferenceError, UnsupportedModelError):
            state_of(model).routers = False


def _same_around(model: Any, named: dict[str, Any], keep: Tensor) -> None:
    padded = _reference(model, named)
    with _refusing(), recording() as frames:
        packed = model.forward(**named)
    if all(frame.layout is None for frame in frames):
        raise UnsupportedModelError("a batch of padded text runs padded: its parts get masks that are made elsewhere")
    _kinds(padded, packed, None)
    _equal(padded, packed, keep)


# -- running ----------------------------------------------------------------------------------------------------------


def _reference(model: Any, named: dict[str, Any]) -> Any:
    try:
        with call(Frame(padded=PROBE)):
            padded = original(model, **named)
    except Exception as error:
        raise _NoReferenceError(f"{type(error).__name__}: {error}") from error
    if not all(
        bool(each.isfinite().all()) for path, each in leaves(padded) if each.is_floating_point() and "hidden" in path
    ):
        raise _NoReferenceError("values that are not finite")
    return padded


@contextmanager
def _refusing() -> Iterator[None]:
    """Any error of a packed call is a reason to refuse the model."""
    try:
        yield
    except UnsupportedModelError:
        raise
    except MixingError as error:
        raise UnsupportedModelError(f"{error}, across the sequences of a batch") from error
    except Exception as error:
        if "PackedMask" in str(error):
            raise UnsupportedModelError("it reads its attention mask itself, beside transformers' interface") from error
        raise UnsupportedModelError(f"a small batch of text, packed, raised {type(error).__name__}: {error}") from error


class _Caller(nn.Module):
    """Runs a function of a module, so that ``functional_call`` can lend the module other weights for that time."""

    def __init__(self, module: nn.Module, function: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self) -> None:
        self.function(self.module)


def _scaled(module: nn.Module, compare: Callable[[Any], None]) -> bool:
    """Compare with random weights, whose products are about as large as what they multiply.

    Returns:
        Whether that was possible.
    """
    parameters = dict(module.named_parameters())
    plain = all(type(each) is nn.Parameter and each.is_floating_point() for each in parameters.values())
    if not plain or sum(each.numel() for each in parameters.values()) > SCALED_PARAMETERS:
        return False
    generator = torch.Generator().manual_seed(0)
    weights = {f"module.{name}": _random(each, generator) for name, each in parameters.items()}
    try:
        functional_call(_Caller(module, compare), weights, ())
    except _NoReferenceError:
        return False
    return True


def _random(parameter: Tensor, generator: torch.Generator) -> Tensor:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    noise = torch.randn(parameter.shape, generator=generator, dtype=dtype).to(parameter.device)
    if parameter.dim() < 2:
        return parameter.detach().to(dtype) + 0.1 * noise
    return noise / math.sqrt(math.sqrt(max(1, parameter.shape[-1] * parameter.shape[-2])))


# -- inputs and outputs ------------------------------------------------------------------------------------------------


def _masks(device: torch.device) -> Tensor:
    keep = torch.ones(4, LENGTH, dtype=torch.bool, device=device)
    keep[0, 9:] = False
    keep[1, :3] = False
    keep[2, 4:6] = False
    return keep


def _inputs(model: Any, keep: Tensor) -> dict[str, Any]:
    """A batch of text: ordinary tokens where they are kept, the padding token elsewhere."""
    config = model.config.get_text_config()
    try:
        tokens = model.get_input_embeddings().num_embeddings
    except (AttributeError, NotImplementedError):
        tokens = getattr(config, "vocab_size", 0)
    special = _token_ids(model.config.to_dict())
    ordinary = torch.tensor([each for each in range(min(tokens, 5000)) if each not in special])
    if not len(ordinary):
        raise UnsupportedModelError("it has no vocabulary, so that no text could be tried")
    generator = torch.Generator().manual_seed(0)
    ids = ordinary[torch.randint(len(ordinary), keep.shape, generator=generator)].to(keep.device)
    if isinstance(mask_token := getattr(config, "mask_token_id", None), int) and 0 <= mask_token < tokens:
        # Some models weigh a whole row by how many of its tokens are masked for training.
        ids[0, 2] = mask_token
    if isinstance(padding := getattr(config, "pad_token_id", None), int) and 0 <= padding < tokens:
        ids[~keep] = padding
    named: dict[str, Any] = {"input_ids": ids, "attention_mask": keep.long()}
    if _accepts(model, "return_dict"):
        named["return_dict"] = True
    if _accepts(model, "use_cache") and hasattr(config, "use_cache"):
        named["use_cache"] = False
    if _accepts(model, "output_hidden_states"):
        named["output_hidden_states"] = True
    if takes(model, "token_type_ids") and getattr(config, "type_vocab_size", 0) > 1:
        named["token_type_ids"] = torch.randint(2, keep.shape, generator=generator).to(keep.device)
    return named


def _token_ids(config: dict[str, Any]) -> set[int]:
    """Every token that a config gives a meaning."""
    found: set[int] = set()
    for name, value in config.items():
        if isinstance(value, dict):
            found |= _token_ids(value)
        elif str(name).endswith(("token_id", "token_index")):
            found |= {each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)}
    return found


def _kinds(padded: Any, packed: Any, layout: Layout | None) -> dict[str, str]:
    """How each output lies, by its path."""
    wanted, found = dict(leaves(padded)), dict(leaves(packed))
    if wanted.keys() != found.keys():
        names = ", ".join(sorted(wanted.keys() ^ found.keys()))
        raise UnsupportedModelError(f"it has other outputs when tokens are packed: {names}")
    kinds = {}
    for path, value in wanted.items():
        same = OTHER if value.shape == found[path].shape else None
        kind = same if layout is None else kind_of(value, found[path], layout)
        if kind is None:
            shapes = f"{tuple(found[path].shape)} packed and {tuple(value.shape)} padded"
            raise UnsupportedModelError(f"its {path} is computed from all tokens of a batch: {shapes}")
        kinds[path] = kind
    return kinds


def _equal(padded: Any, packed: Any, keep: Tensor) -> None:
    if differences := _differences(padded, packed, keep):
        # The first output that differs, not the one that differs most: rounding would choose between two alike.
        path, difference = next(iter(differences.items()))
        raise UnsupportedModelError(
            f"its {path or 'output'} changes when tokens are packed, by {difference:.0e} of the largest: "
            "something other than attention reads more than one token"
        )


def _differences(padded: Any, packed: Any, keep: Tensor) -> dict[str, float]:
    """The outputs that differ, by path, each by how much of its largest value."""
    found = {}
    for (path, wanted), (_, value) in zip(leaves(padded), leaves(packed), strict=True):
        kept = [_kept(each, keep) for each in (wanted, value)]
        if (difference := _difference(*kept)) > TOLERANCES.get(wanted.dtype, HALF_TOLERANCE):
            found[path] = difference
    return found


def _kept(value: Tensor, keep: Tensor) -> Tensor:
    """The part of an output that must be the same."""
    if value.shape[:2] == keep.shape:
        return value[keep]
    return value[keep.flatten()] if value.shape[:1] == (keep.numel(),) else value


def _difference(padded: Tensor, packed: Tensor) -> float:
    """The largest difference, as a part of the largest value; not finite values must be the same."""
    if not padded.numel():
        return 0.0
    padded, packed = padded.double(), packed.double()
    apart = torch.where(padded == packed, 0.0, (padded - packed).abs()).nan_to_num(torch.inf)
    size = padded.abs().nan_to_num(0.0, posinf=0.0).max().clamp_min(1e-12)
    return float(apart.max() / size)


def _accepts(model: nn.Module, name: str) -> bool:
    return takes(model, name) or takes(model, "kwargs")
