"""Checks that a function is row-wise, without which the routes of `mw.apply` would give different results.

A function is checked at its first use. Batch norm in training mode is rejected by type; any other function gets a few
of the rows a second time, in another batch, and each must give the same output. Random functions, and those whose
dtype is too coarse to distinguish mixing from rounding, are compared on two batches of one size with the same random
numbers. The result is cached, weakly, so that a repeated call costs a look-up.
"""

from __future__ import annotations

import functools
import math
import numbers
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils.weak import WeakIdKeyDictionary

from maskwise.errors import ArgumentError, say
from maskwise.ops.torch_private import are_saved_tensors_hooks_enabled, has_dispatch_modes, is_tracing, is_transformed

__all__ = ["run"]

Rows = Sequence[Any]


class _Checked(NamedTuple):
    """The cached result for a row-wise function."""

    #: The other parts of the function, which must still be the same objects.
    parts: tuple[weakref.ref[Any], ...]
    #: Whether it modifies its input rows in place.
    writes: bool


# By the first part of a function, then by the key of its settings. By identity: `==` of a Mask or a tensor is no bool.
_cache: MutableMapping[Any, dict[tuple[Any, ...], _Checked]] = WeakIdKeyDictionary()
#: Cache entries per function.
_LIMIT = 64


def run(fn: Callable[..., Any], rows: Rows, *, is_view: bool) -> Any:
    """``fn(*rows)``, if fn is row-wise.

    Args:
        fn: the function.
        rows: its arguments; tensors that are not 0-d have one row for each.
        is_view: whether the rows are the caller's memory, which fn must not modify.

    Raises:
        ArgumentError: the output of fn for a row depends on other rows, or on their number; or fn raises a RuntimeError
            at its first use.
    """
    if torch.compiler.is_compiling():
        return fn(*rows)
    found = Parts(fn)
    parts, key = found.objects, (*found.key, *[row.dim() if isinstance(row, Tensor) else None for row in rows])
    checked = _look_up(parts, key)
    if checked is None:
        return _first_use(fn, rows, parts, key, is_view=is_view) if _can_check(rows) else fn(*rows)
    return fn(*_copies(rows) if is_view and checked.writes else rows)


def _can_check(rows: Rows) -> bool:
    """Whether values can be inspected: not in transforms, dispatch modes and captures, nor on the meta device."""
    return (
        not is_transformed()
        and not has_dispatch_modes()
        and not is_tracing()
        and all(type(row) in (Tensor, nn.Parameter) and not row.is_meta for row in rows if isinstance(row, Tensor))
        and not (rows[0].is_cuda and torch.cuda.is_current_stream_capturing())
    )


# -- the cache ---------------------------------------------------------------------------------------------------------
def _look_up(parts: list[Any], key: tuple[Any, ...]) -> _Checked | None:
    try:
        checked = _cache.get(parts[0], {}).get(key)
    except TypeError:
        # Not hashable: it is checked every time.
        return None
    # An id may have been reused by another object.
    if checked is None or not all(map(operator.is_, [ref() for ref in checked.parts], parts[1:])):
        return None
    return checked


def _store(parts: list[Any], key: tuple[Any, ...], *, writes: bool) -> None:
    try:
        entries = _cache.setdefault(parts[0], {})
        if len(entries) >= _LIMIT:
            entries.clear()
        entries[key] = _Checked(tuple(map(weakref.ref, parts[1:])), writes)
    except TypeError:
        pass


# -- the check ---------------------------------------------------------------------------------------------------------
def _first_use(fn: Any, rows: Rows, parts: list[Any], key: tuple[Any, ...], *, is_view: bool) -> Any:
    for part in parts:
        if isinstance(part, _BatchNorm):
            _check_norm(part)
    given = _copies(rows) if is_view else rows
    # Before the call, which may modify them.
    sample = _sample(rows)
    before = _versions(given)
    try:
        out = fn(*given)
    except RuntimeError as error:
        if type(error) is not RuntimeError:
            raise
        raise ArgumentError(_rejection(fn, rows, f"{type(error).__name__}: {error}".splitlines()[0])) from error
    writes = before is None or before != _versions(given)
    if sample is not None and _has_rows(out, rows[0].shape[0]):
        is_final = _check(fn, rows, out, sample)
        if is_final and sample.differ:
            _store(parts, key, writes=writes)
    return out


class _Sample(NamedTuple):
    """A few rows of each argument, and their indices."""

    arguments: list[Any]
    indices: list[int]
    #: Whether they differ: mixing of identical rows is not visible.
    differ: bool


def _sample(rows: Rows) -> _Sample | None:
    count = rows[0].shape[0]
    if count < 2:
        return None
    values = rows[0].detach()
    # A first and a last row that differ from those of all rows, and another number of rows, to expose any dependence.
    of_first, of_last = ((values != end).reshape(count, -1).any(1) for end in (values[:1], values[-1:]))
    front, back = int(of_first.int().argmax()), count - 1 - int(of_last.flip(0).int().argmax())
    indices = [front, back, back] if count != 3 else [front, back, back, back]
    index = torch.tensor(indices, device=values.device)
    with torch.inference_mode(False), torch.no_grad():
        arguments = [
            row.detach().clone().index_select(0, index).requires_grad_(row.requires_grad) if _is_rows(row) else row
            for row in rows
        ]
    return _Sample(arguments, indices, front > 0)


def _check(fn: Any, rows: Rows, out: Any, sample: _Sample) -> bool:
    """Raise unless the rows of the sample give the same output alone as among all rows.

    Returns:
        Whether the result may be cached: it is valid for later calls, not only for the random numbers of this one.
    """
    device = rows[0].device
    with _same_random_numbers(device), _own_saved_tensors():
        state = _random_state(device)
        alone = _called(fn, rows, sample.arguments)
        if not _is_same(state, _random_state(device)):
            return _check_batches(fn, rows, sample, draws=3)
        difference = _difference(out, alone, sample.indices)
        if difference > 0.0:
            # It may use a generator of its own.
            again = range(len(sample.indices))
            if not any(_difference(alone, _called(fn, rows, sample.arguments), again) > 0.0 for _ in range(8)):
                raise ArgumentError(
                    _rejection(fn, rows, f"a row that among others differs by {difference:.3g} from the row alone")
                )
            _check_gradients(fn, rows, sample)
            return False
        return not _is_coarse(alone) or _check_batches(fn, rows, sample, draws=1)


def _check_batches(fn: Any, rows: Rows, sample: _Sample, *, draws: int) -> bool:
    """Raise unless rows give the same output in two batches of one size, with the same random numbers.

    The same products are then computed in the same order, so that only mixing makes a difference. One draw misses a
    permutation with probability 1/70: when it maps every second of the 8 rows to one of those.

    Returns:
        False where the batches consumed different random numbers, as with rejection sampling, so that only the
        gradients of this draw were checked.
    """
    device = rows[0].device
    # Every second row differs, so that mixing with the row before and the row after is both visible.
    mixed, alike = (_chosen(sample.arguments, [0, second] * 4) for second in (1, 0))
    for _ in range(draws):
        start = _random_state(device)
        one = _called(fn, rows, mixed)
        end = _random_state(device)
        _set_random_state(device, start)
        other = tuple(each[::2] for each in _tensors(_called(fn, rows, alike)))
        if not _is_same(end, _random_state(device)):
            _check_gradients(fn, rows, sample)
            return False
        difference = _difference(one, other, range(0, 8, 2), ulps=4)
        if difference > 0.0:
            got = f"a row that differs by {difference:.3g} from the same row among others"
            raise ArgumentError(_rejection(fn, rows, got))
    return True


def _chosen(arguments: list[Any], indices: list[int]) -> list[Any]:
    return [row.detach()[indices].requires_grad_(row.requires_grad) if _is_rows(row) else row for row in arguments]


def _is_coarse(out: Any) -> bool:
    """Whether the precision is so low that a little mixing may pass for rounding."""
    return any(each.is_floating_point() and torch.finfo(each.dtype).eps > 1e-4 for each in _tensors(out))


def _own_saved_tensors() -> AbstractContextManager[Any]:
    """Hides the tensors that the check saves for backward from outer hooks: checkpointing counts saved tensors, and the
    check saves them at the first call only.
    """
    if not are_saved_tensors_hooks_enabled():
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged)


def _unchanged(saved: Tensor) -> Tensor:
    return saved


def _called(fn: Any, rows: Rows, arguments: list[Any]) -> Any:
    # Copies, which fn may modify, and which require grad where the rows do.
    copies = [row.clone() if _is_rows(row) else row for row in arguments]
    try:
        out = fn(*copies)
    except Exception as error:
        got = f"{type(error).__name__} for {copies[0].shape[0]} rows, but not for {rows[0].shape[0]}"
        raise ArgumentError(_rejection(fn, rows, got)) from error
    if not _has_rows(out, copies[0].shape[0]):
        raise ArgumentError(_rejection(fn, rows, f"another number of rows for {copies[0].shape[0]}"))
    return out


def _difference(all_rows: Any, alone: Any, indices: Iterable[int], *, ulps: float | None = None) -> float:
    """The largest difference of the rows at these indices from those computed alone; 0 within rounding.

    Products round differently by the number of rows, and later layers amplify it: up to the square root of the machine
    epsilon, or ``ulps``, relative to the largest value of the same feature.
    """
    indices = list(indices)
    worst = 0.0
    for one, other in zip(_tensors(all_rows), _tensors(alone), strict=True):
        if one.shape[1:] != other.shape[1:] or one.dtype != other.dtype:
            return math.inf
        every, theirs = _comparable(one), _comparable(other)
        mine = every[indices[: theirs.shape[0]]]
        if not (mine.is_floating_point() or mine.is_complex()):
            worst = max(worst, float((mine != theirs).any()))
            continue
        if not mine.numel():
            continue
        both = (mine == theirs) | (mine.isnan() & theirs.isnan())
        differences = torch.where(both, 0.0, (mine - theirs).abs()).nan_to_num(nan=math.inf)
        eps = torch.finfo(one.dtype).eps
        close = (math.sqrt(eps) if ulps is None else ulps * eps) * every.abs().nan_to_num(0.0, 0.0, 0.0).amax(0)
        worst = max(worst, float(torch.where(differences > close, differences, 0.0).amax()))
    return worst


def _comparable(values: Tensor) -> Tensor:
    """The values in a dtype with arithmetic, which 8-bit floats lack."""
    values = values.detach()
    return values.float() if values.is_floating_point() and values.element_size() == 1 else values


def _check_gradients(fn: Any, rows: Rows, sample: _Sample) -> None:
    """Raise if the output of one row of a random function has a gradient by another row."""
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [
            row.detach().clone().requires_grad_() if _is_rows(row) and row.is_floating_point() else row
            for row in sample.arguments
        ]
        wanted = [row for row in leaves if _is_rows(row) and row.requires_grad]
        # Copies, which fn may modify.
        out = fn(*(row.clone() if _is_rows(row) else row for row in leaves))
        firsts = [each[0].sum() for each in _tensors(out) if each.requires_grad]
        if not wanted or not firsts:
            return
        total = torch.stack([first.real.double() for first in firsts]).sum()
        found = torch.autograd.grad(total, wanted, allow_unused=True)
    if any(gradient is not None and bool((gradient[1:] != 0).any()) for gradient in found):
        raise ArgumentError(_rejection(fn, rows, "a row with a gradient of another row's output"))


def _check_norm(norm: _BatchNorm) -> None:
    if not (norm.training or norm.running_mean is None):
        return
    got = f"{type(norm).__name__}, which in training mode normalizes each row by all of them"
    hint = "mw.nn.MaskedBatchNorm1d(C)(x.mT, mask).mT, or fn.eval()"
    raise ArgumentError(say("apply", "fn", must="treat each row by itself", got=got, hint=hint))


def convolution_hint(fn: Any) -> str:
    """The hint for a convolution, which reads neighbours: the function that takes a mask of positions.

    >>> convolution_hint(nn.Conv2d(1, 1, 3))
    'mw.conv2d(x, fn.weight, fn.bias, fn.stride, fn.padding, mask=mask), with channels in dim 1'
    """
    if len(fn.kernel_size) > 2:
        return "fn(mw.mul(x, mask[:, None])), with channels in dim 1"
    name = f"conv{'_transpose' if fn.transposed else ''}{len(fn.kernel_size)}d"
    return f"mw.{name}(x, fn.weight, fn.bias, fn.stride, fn.padding, mask=mask), with channels in dim 1"


def _rejection(fn: Any, rows: Rows, got: str) -> str:
    shape = f"(n, {', '.join(map(str, rows[0].shape[1:]))})" if rows[0].dim() > 1 else "(n,)"
    name = getattr(fn, "__name__", type(fn).__name__)
    must = f"take any number of rows, {shape}, and treat each by itself"
    hint = "mw.pack(x, mask).map(fn) for a function of all kept rows, mw.mean(x, mask, dim) for their statistics"
    if isinstance(fn, _ConvNd):
        hint = convolution_hint(fn)
    return say("apply", "fn", must=must, got=f"{name}: {got}", hint=hint)


# -- rows --------------------------------------------------------------------------------------------------------------
def _is_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _copies(rows: Rows) -> list[Any]:
    return [row.clone() if _is_rows(row) else row for row in rows]


def _versions(rows: Rows) -> list[int] | None:
    """The version counters of the rows; None for inference tensors, which have none."""
    try:
        return [row._version for row in rows if _is_rows(row)]
    except RuntimeError:
        return None


def _tensors(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def _has_rows(out: Any, count: int) -> bool:
    """Whether these are tensors of ``count`` rows; `mw.apply` raises where they are not."""
    return bool(_tensors(out)) and all(_is_rows(each) and each.shape[0] == count for each in _tensors(out))


class _same_random_numbers:  # noqa: N801
    """Restores the RNG state."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.state = _random_state(self.device)

    def __exit__(self, *_: object) -> None:
        _set_random_state(self.device, self.state)


def _set_random_state(device: torch.device, state: list[Tensor]) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)


def _is_same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def _random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


# -- the cache key of a function ---------------------------------------------------------------------------------------
#: Types of values that are a part of the key.
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), range, torch.dtype, torch.device})
#: The recursion depth: the function itself, and the functions and objects that it refers to.
_DEEPEST = 1


class Parts:
    """The objects that a function refers to, and a key of their identities and settings.

    A lambda is a new object at every evaluation, but its code object is not: the first part of a function is its code.
    Then follow its closure, its defaults and the globals that it names: functions, modules with all submodules and
    their training modes, objects with their attributes; numbers, bools and strings, in tuples and dicts too. Values in
    lists and sets are left out: they are logs more often than settings. Tensors count by identity only.
    """

    __slots__ = ("key", "objects", "seen")

    def __init__(self, fn: Any) -> None:
        self.objects: list[Any] = []
        self.key: list[Any] = []
        self.seen: set[int] = set()
        self._add_callable(fn)

    def _add_callable(self, fn: Any) -> None:
        if isinstance(fn, functools.partial):
            self._add_callable(fn.func)
            self._add_all(fn.args, 1)
            self._add_named(fn.keywords, 1)
        elif isinstance(fn, types.MethodType):
            self._add_callable(fn.__func__)
            self._add(fn.__self__, 0)
        elif isinstance(fn, types.FunctionType):
            self._add_object(fn.__code__)
            self._add_function(fn, 1)
        else:
            self._add(fn, 0)
            call = type(fn).__call__
            if isinstance(call, types.FunctionType):
                self._add_function(call, 1)

    def _add_function(self, fn: types.FunctionType, depth: int) -> None:
        """The closure, the defaults and the globals of a function."""
        names = fn.__globals__
        if names.get("__name__", "").startswith("torch."):
            return
        for cell in fn.__closure__ or ():
            self._add(_contents(cell), depth)
        if fn.__defaults__:
            self._add_all(fn.__defaults__, depth)
        if fn.__kwdefaults__:
            self._add_named(fn.__kwdefaults__, depth)
        for name in fn.__code__.co_names:
            if name in names:
                self.key.append(name)
                self._add(names[name], depth)

    def _add_all(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            self._add(value, depth)

    def _add_named(self, values: Mapping[Any, Any], depth: int) -> None:
        for name, value in values.items():
            if type(name) in _PLAIN:
                self.key.append(name)
            self._add(value, depth)

    def _add(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self.key += (kind, value)
        elif isinstance(value, Tensor | types.ModuleType):
            self.key.append(kind)
        elif id(value) in self.seen:
            self.key.append(id(value))
        elif isinstance(value, nn.Module):
            self._add_modules(value)
        elif isinstance(value, dict):
            self.seen.add(id(value))
            self._add_named(value, depth)
        elif isinstance(value, tuple):
            self._add_all(value, depth)
        elif isinstance(value, list | set | frozenset):
            self._add_objects_in(value, depth)
        elif kind.__weakrefoffset__ or not self.objects:
            self._add_object(value)
            if depth > _DEEPEST or isinstance(value, type):
                return
            if kind is types.FunctionType:
                self._add_function(value, depth + 1)
            elif kind.__dictoffset__:
                self._add_named(value.__dict__, depth + 1)
        elif isinstance(value, numbers.Number):
            # numpy scalars.
            self.key += (kind, value)

    def _add_objects_in(self, values: Any, depth: int) -> None:
        """The objects in a list or a set, without values, shapes and tensors, which are mostly logs."""
        self.seen.add(id(values))
        for value in values.values() if isinstance(values, dict) else values:
            if isinstance(value, list | tuple | set | frozenset | dict):
                if id(value) not in self.seen:
                    self._add_objects_in(value, depth)
            elif type(value).__weakrefoffset__ and not isinstance(value, Tensor):
                self._add(value, depth)

    def _add_object(self, value: Any) -> None:
        self.seen.add(id(value))
        self.objects.append(value)
        self.key.append(id(value))

    def _add_modules(self, root: nn.Module) -> None:
        """All submodules with their training modes. `nn.Module.modules` also builds names, and takes far longer."""
        walked: list[Any] = [root]
        # It grows during the iteration.
        for module in walked:
            if module is not None and module._modules:
                walked += module._modules.values()
        found = [module for module in walked if module is not None]
        self.seen.add(id(root))
        self.objects += found
        self.key += map(id, found)
        self.key += [module.training for module in found]


def _contents(cell: types.CellType) -> Any:
    """The value of a closure variable; the cell type where it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return types.CellType
