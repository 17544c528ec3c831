"""Whether a function treats each row by itself, without which the routes of `mw.apply` would give different results.

A function is judged when it is first used. What its modules are says that batch norm in training mode mixes rows; for
all else, a few of the rows go through it a second time, in another company: each must give what it gave before. Random
functions, and those whose results are too coarse to tell mixing from rounding, are compared in two companies of one
size with the same random numbers. The verdict is cached, weakly, so that a repeated call costs a look-up.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from maskwise.errors import ArgumentError, say
from maskwise.ops.select.fingerprint import Parts
from maskwise.ops.torch_private import are_saved_tensors_hooks_enabled, has_dispatch_modes, is_tracing, is_transformed

__all__ = ["run"]

Rows = Sequence[Any]


class _Verdict(NamedTuple):
    """What was found of a function that treats each row by itself."""

    #: The other parts of the function, which must still be those that were judged.
    parts: tuple[weakref.ref[Any], ...]
    #: Whether it writes into the rows that it gets.
    writes: bool


# By the first part of a function, then by what else the verdict depends on.
_verdicts: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], _Verdict]] = weakref.WeakKeyDictionary()
#: Verdicts of one function that are kept.
_KEPT = 64


def run(fn: Callable[..., Any], rows: Rows, *, is_view: bool) -> Any:
    """``fn(*rows)``, if it treats each row by itself.

    Args:
        fn: the function.
        rows: its arguments, of which tensors with dims have a row for each.
        is_view: whether the rows are memory of the caller, which fn must not write into.

    Raises:
        ArgumentError: what fn gives for a row depends on other rows, or on how many there are; or it raises a
            RuntimeError before it was ever seen to take rows.
    """
    if torch.compiler.is_compiling():
        return fn(*rows)
    found = Parts(fn)
    parts, key = found.objects, (*found.key, *[row.dim() if isinstance(row, Tensor) else None for row in rows])
    verdict = _found(parts, key)
    if verdict is None:
        return _first_use(fn, rows, parts, key, is_view=is_view) if _can_judge(rows) else fn(*rows)
    return fn(*_copies(rows) if is_view and verdict.writes else rows)


def _can_judge(rows: Rows) -> bool:
    """Whether values can be looked at: not in transforms and modes, nor where there are none."""
    return (
        not is_transformed()
        and not has_dispatch_modes()
        and not is_tracing()
        and all(type(row) in (Tensor, nn.Parameter) and not row.is_meta for row in rows if isinstance(row, Tensor))
        and not (rows[0].is_cuda and torch.cuda.is_current_stream_capturing())
    )


# -- the cache ---------------------------------------------------------------------------------------------------------
def _found(parts: list[Any], key: tuple[Any, ...]) -> _Verdict | None:
    try:
        verdict = _verdicts.get(parts[0], {}).get(key)
    except TypeError:
        # It cannot be a key: it is judged every time.
        return None
    # An id may be another object's by now.
    if verdict is None or not all(map(operator.is_, [ref() for ref in verdict.parts], parts[1:])):
        return None
    return verdict


def _keep(parts: list[Any], key: tuple[Any, ...], *, writes: bool) -> None:
    try:
        known = _verdicts.setdefault(parts[0], {})
        if len(known) >= _KEPT:
            known.clear()
        known[key] = _Verdict(tuple(map(weakref.ref, parts[1:])), writes)
    except TypeError:
        pass


# -- judging -----------------------------------------------------------------------------------------------------------
def _first_use(fn: Any, rows: Rows, parts: list[Any], key: tuple[Any, ...], *, is_view: bool) -> Any:
    for part in parts:
        if isinstance(part, _BatchNorm):
            _check_norm(part)
    given = _copies(rows) if is_view else rows
    # Before the call, which may write into them.
    sample = _sample(rows)
    before = _versions(given)
    try:
        out = fn(*given)
    except RuntimeError as error:
        if type(error) is not RuntimeError:
            raise
        raise ArgumentError(_refusal(fn, rows, f"{type(error).__name__}: {error}".splitlines()[0])) from error
    writes = before is None or before != _versions(given)
    if sample is not None and _has_rows(out, rows[0].shape[0]):
        holds = _judge(fn, rows, out, sample)
        if holds and sample.differ:
            _keep(parts, key, writes=writes)
    return out


class _Sample(NamedTuple):
    """A few rows of each argument, and where they come from."""

    arguments: list[Any]
    places: list[int]
    #: Whether they differ: rows that are all the same would show no mixing.
    differ: bool


def _sample(rows: Rows) -> _Sample | None:
    count = rows[0].shape[0]
    if count < 2:
        return None
    values = rows[0].detach()
    # Another row at each end than among all rows, and another number of them: whatever looks there shows.
    of_first, of_last = ((values != end).reshape(count, -1).any(1) for end in (values[:1], values[-1:]))
    front, back = int(of_first.int().argmax()), count - 1 - int(of_last.flip(0).int().argmax())
    places = [front, back, back] if count != 3 else [front, back, back, back]
    index = torch.tensor(places, device=values.device)
    with torch.inference_mode(False), torch.no_grad():
        arguments = [
            row.detach().clone().index_select(0, index).requires_grad_(row.requires_grad) if _is_rows(row) else row
            for row in rows
        ]
    return _Sample(arguments, places, front > 0)


def _judge(fn: Any, rows: Rows, out: Any, sample: _Sample) -> bool:
    """Raise unless the rows of the sample give alone what they gave among all rows.

    Returns:
        Whether that holds for later calls too, and not for the random numbers of this one only.
    """
    device = rows[0].device
    with _same_random_numbers(device), _own_saved_tensors():
        state = _random_state(device)
        alone = _called(fn, rows, sample.arguments)
        if not _is_same(state, _random_state(device)):
            return _check_companies(fn, rows, sample, draws=3)
        apart = _apart(out, alone, sample.places)
        if apart > 0.0:
            # It may draw from a generator of its own.
            again = range(len(sample.places))
            if not any(_apart(alone, _called(fn, rows, sample.arguments), again) > 0.0 for _ in range(8)):
                raise ArgumentError(
                    _refusal(fn, rows, f"a row that beside others is {apart:.3g} from what it is alone")
                )
            _check_gradients(fn, rows, sample)
            return False
        return not _is_coarse(alone) or _check_companies(fn, rows, sample, draws=1)


def _check_companies(fn: Any, rows: Rows, sample: _Sample, *, draws: int) -> bool:
    """Raise unless rows are the same in two companies of one size, with the same random numbers.

    So the same products are computed for each, in the same order, and only mixing makes a difference. A permutation is
    missed by one draw in 70, which leaves every second of 8 rows among those.

    Returns:
        False where the companies drew different random numbers, as rejection sampling does, and only the gradients of
        this draw were looked at.
    """
    device = rows[0].device
    # Every second row is another, so that those before it and behind it both count.
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
        apart = _apart(one, other, range(0, 8, 2), ulps=4)
        if apart > 0.0:
            raise ArgumentError(_refusal(fn, rows, f"a row that is {apart:.3g} from what it is beside others"))
    return True


def _chosen(arguments: list[Any], places: list[int]) -> list[Any]:
    return [row.detach()[places].requires_grad_(row.requires_grad) if _is_rows(row) else row for row in arguments]


def _is_coarse(out: Any) -> bool:
    """Whether rounding is so coarse that a little mixing may pass for it."""
    return any(each.is_floating_point() and torch.finfo(each.dtype).eps > 1e-4 for each in _tensors(out))


def _own_saved_tensors() -> AbstractContextManager[Any]:
    """Hides what the judge saves for backward from the hooks around it: checkpointing counts saved tensors, and the
    judge saves them in the first call only.
    """
    if not are_saved_tensors_hooks_enabled():
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged)


def _unchanged(saved: Tensor) -> Tensor:
    return saved


def _called(fn: Any, rows: Rows, arguments: list[Any]) -> Any:
    # Copies, which fn may write into, and differentiate by where the rows require grad.
    fresh = [row.clone() if _is_rows(row) else row for row in arguments]
    try:
        out = fn(*fresh)
    except Exception as error:
        got = f"{type(error).__name__} for {fresh[0].shape[0]} rows, where {rows[0].shape[0]} are taken"
        raise ArgumentError(_refusal(fn, rows, got)) from error
    if not _has_rows(out, fresh[0].shape[0]):
        raise ArgumentError(_refusal(fn, rows, f"another number of rows than {fresh[0].shape[0]} for as many"))
    return out


def _apart(all_rows: Any, alone: Any, places: Iterable[int], *, ulps: float | None = None) -> float:
    """How far the rows at these places are from those that were computed alone; 0 where rounding explains it.

    Products round differently by the number of rows, and the layers behind them pass that on: by the square root of
    the precision, or by so many ``ulps``, of the largest value of the same feature.
    """
    places = list(places)
    worst = 0.0
    for one, other in zip(_tensors(all_rows), _tensors(alone), strict=True):
        if one.shape[1:] != other.shape[1:] or one.dtype != other.dtype:
            return math.inf
        every, theirs = _comparable(one), _comparable(other)
        mine = every[places[: theirs.shape[0]]]
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
    """In a dtype that has arithmetic: those of 8 bits have none."""
    values = values.detach()
    return values.float() if values.is_floating_point() and values.element_size() == 1 else values


def _check_gradients(fn: Any, rows: Rows, sample: _Sample) -> None:
    """Raise if a row of a random function has a gradient of another row's result."""
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [
            row.detach().clone().requires_grad_() if _is_rows(row) and row.is_floating_point() else row
            for row in sample.arguments
        ]
        wanted = [row for row in leaves if _is_rows(row) and row.requires_grad]
        # A copy, which may be written into.
        out = fn(*(row.clone() if _is_rows(row) else row for row in leaves))
        firsts = [each[0].sum() for each in _tensors(out) if each.requires_grad]
        if not wanted or not firsts:
            return
        total = torch.stack([first.real.double() for first in firsts]).sum()
        found = torch.autograd.grad(total, wanted, allow_unused=True)
    if any(gradient is not None and bool((gradient[1:] != 0).any()) for gradient in found):
        raise ArgumentError(_refusal(fn, rows, "a row with a gradient of another row's result"))


def _check_norm(norm: _BatchNorm) -> None:
    if not (norm.training or norm.running_mean is None):
        return
    got = f"{type(norm).__name__}, which in training mode normalizes each row by all of them"
    hint = "mw.nn.MaskedBatchNorm1d(C)(x.mT, mask).mT, or fn.eval()"
    raise ArgumentError(say("apply", "fn", must="treat each row by itself", got=got, hint=hint))


def _refusal(fn: Any, rows: Rows, got: str) -> str:
    shape = f"(n, {', '.join(map(str, rows[0].shape[1:]))})" if rows[0].dim() > 1 else "(n,)"
    name = getattr(fn, "__name__", type(fn).__name__)
    must = f"take any number of rows, {shape}, and treat each by itself"
    hint = "mw.pack(x, mask).map(fn) for a function of all kept rows, mw.mean(x, mask, dim) for what rows share"
    return say("apply", "fn", must=must, got=f"{name}: {got}", hint=hint)


# -- rows --------------------------------------------------------------------------------------------------------------
def _is_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _copies(rows: Rows) -> list[Any]:
    return [row.clone() if _is_rows(row) else row for row in rows]


def _versions(rows: Rows) -> list[int] | None:
    """How often the rows were written to; None where that is not counted."""
    try:
        return [row._version for row in rows if _is_rows(row)]
    except RuntimeError:
        return None


def _tensors(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def _has_rows(out: Any, count: int) -> bool:
    """Whether these are tensors of so many rows; `mw.apply` says it in full where they are not."""
    return bool(_tensors(out)) and all(_is_rows(each) and each.shape[0] == count for each in _tensors(out))


class _same_random_numbers:  # noqa: N801
    """Leaves the random numbers of what comes after as they would have been."""

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
