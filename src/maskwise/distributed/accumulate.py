"""mw.accumulate: what is kept in all micro-batches of all ranks, counted once, as the denominator of their losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sized
from types import TracebackType
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, distributed

from maskwise.distributed.group import process_group, whole
from maskwise.errors import ArgumentError, DeviceError, DtypeError, MaskwiseError, ShapeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import MaskLike, need_dense
from maskwise.ops.loss.denominator import Kind, wide_dtype
from maskwise.ops.reduce import count

__all__ = ["Average", "Countable", "Result", "Window", "Windows", "accumulate"]

#: What can be counted of a micro-batch: a mask, labels (with ``ignore_index``), or the count itself.
Countable: TypeAlias = MaskLike | int
#: What gradients are divided by after the backward pass.
Average: TypeAlias = Literal["ranks", "none"] | int
_Batch = TypeVar("_Batch")

#: What the ranks sum up, as int64: kept elements, rows that keep something, micro-batches and their square, ranks that
#: failed, micro-batches of which rows are not known, factors and their square. A sum of squares shows whether all
#: numbers are equal, so one all-reduce serves for the counts and for the checks.
_TOKENS, _ROWS, _BATCHES, _SQUARES, _FAILED, _ROWLESS, _FACTORS, _FACTOR_SQUARES = range(8)
_KINDS = {"token": _TOKENS, "sequence": _ROWS}
#: Above any factor: the squares of 2**15 ranks add up to an int64.
_FACTOR_LIMIT = 2**24
#: In the sums of what was scaled: after those of the kinds, what was divided by a number.
_CONSTANT = 2


def accumulate(
    masks: Countable | Iterable[Countable],
    group: Any = None,
    average: Average = "ranks",
    *,
    ignore_index: int | None = None,
) -> Window:
    """Count the kept elements of all micro-batches on all ranks: the denominator of their losses.

    The mean of means over micro-batches and ranks is not the mean over tokens. A window counts before the first
    backward pass, and each loss is divided by the total count: ``mw.loss(..., denominator=window)``,
    ``mw.linear_cross_entropy(..., denominator=window)``, or ``window.scale(total)`` for any other sum. Gradients then
    equal those of the full batch in one process, for every split.

    >>> import torch, torch.nn.functional as F, maskwise as mw
    >>> x, y = torch.tensor([1.0, 2.0, 6.0], requires_grad=True), torch.zeros(3)
    >>> keep = torch.tensor([True, True, True])
    >>> with mw.accumulate([keep[:1], keep[1:]]) as window:         # micro-batches of one and of two elements
    ...     for part in (slice(0, 1), slice(1, 3)):
    ...         mw.loss(F.l1_loss, x[part], y[part], keep[part], denominator=window).backward()
    >>> window.result()                                             # the mean over three, not the mean of means
    Result(sum=tensor(9., dtype=torch.float64), count=tensor(3))
    >>> x.grad
    tensor([0.3333, 0.3333, 0.3333])

    Args:
        masks: one entry for each micro-batch of this rank, or a single one: a Mask or a bool tensor of the unreduced
            loss's shape (True means keep); a tensor of labels, with ``ignore_index``; or the count itself, as an int or
            as an integer tensor without dims. Where a target has labels to ignore under its mask, both count:
            ``mask & (target != -100)``.
        group: the ranks whose data differ: a process group, or a device mesh of one dim. None for all ranks, or for
            this process alone where torch.distributed is not initialised. Ranks that hold the same data, such as those
            of tensor parallelism, must not be in it together.
        average: the number by which the engine divides gradients after the backward pass; ``window.factor`` undoes it.
            "ranks" is the size of the group, as for DistributedDataParallel and fully_shard; "none" is for summed
            gradients; an int is any other number below 2**24.
        ignore_index: the label that is not kept. Integer tensors are accepted as labels with it only.

    Returns:
        A Window: a context manager. The all-reduce has started; nothing waits for it before the window is entered, and
        on a GPU not then, either.

    Raises:
        DtypeError: an entry is no mask, label tensor or count, ``group`` is no group, or ``ignore_index`` no int.
        DeviceError: an entry is on the device meta.
        ArgumentError: a count is negative; a tensor is nested or sparse; ``average`` is not one of the above; the
            process is not in the group, or there are no groups. On entering the window, on every rank: ranks have
            different numbers of micro-batches, or an ``average`` of different factors, or one of them raised.
    """
    entries = (masks,) if isinstance(masks, (Mask, Tensor, int)) else masks
    window = Window._start(entries, _process_group(group), average, ignore_index)
    window._raise_own()
    return window


class Result(NamedTuple):
    """What a window scaled, on all ranks: the sum of the totals, and by what they were divided."""

    sum: Tensor
    count: Tensor  # type: ignore[assignment]  # in the place of tuple's method

    @property
    def mean(self) -> Tensor:
        """The value that was optimised, 0 where nothing is kept."""
        return self.sum / self.count.clamp(min=1)


class Window:
    """What `mw.accumulate` returns: the count of a whole batch, and the context in which losses are divided by it.

    A window is entered once. Losses are scaled inside of it, and ``result()`` is read after it.

    Attributes:
        factor: by what each loss is multiplied, because gradients are divided by it after the backward pass: the size
            of the group for ``average="ranks"``, 1 for "none", or the number given.
        micro_batches: how many micro-batches were counted on this rank.
    """

    def __init__(self, tally: _Tally, group: Any, factor: int, error: Exception | None = None) -> None:
        self.factor = factor
        self.micro_batches = tally.batches
        self._group, self._error = group, error
        self._ranks = 1 if group is None else distributed.get_world_size(group)
        self._state: Literal["new", "open", "closed"] = "new"
        # Of all ranks, as soon as it is known.
        self._rowless = tally.rowless
        self._counts = tally.to_tensor(_device_of(group, tally), factor, failed=error is not None)
        self._work = None if group is None else distributed.all_reduce(self._counts, group=group, async_op=True)
        self._readback: _Readback | None = None
        self._agreed = group is None
        self._divisors: dict[tuple[Any, ...], Tensor] = {}
        self._sums: list[Tensor | float] = [0.0, 0.0, 0.0]
        self._reduced: Tensor | None = None
        self._reducing: Any = None

    @classmethod
    def _start(cls, entries: Iterable[Countable], group: Any, average: Average, ignore_index: int | None) -> Window:
        """Count and start the all-reduce. A rank that fails takes part in it, so that no other waits for it."""
        tally, factor = _Tally(), 1
        try:
            factor = _factor(average, group)
            if ignore_index is not None and (not isinstance(ignore_index, int) or isinstance(ignore_index, bool)):
                got = type(ignore_index).__name__
                raise DtypeError(say("accumulate", "ignore_index", must="be an int", got=got, hint="ignore_index=-100"))
            if not isinstance(entries, Iterable):
                raise _not_countable(entries)
            for entry in entries:
                tally.add(entry, ignore_index)
        except Exception as error:
            return cls(_Tally(), group, factor, error)
        return cls(tally, group, factor)

    def __repr__(self) -> str:
        return f"Window(micro_batches={self.micro_batches}, ranks={self._ranks}, factor={self.factor}, {self._state})"

    # -- as a context --------------------------------------------------------------------------------------------------
    def __enter__(self) -> Window:
        if self._state != "new":
            hint = "with mw.accumulate(masks) as window, anew for each step of the optimizer"
            raise ArgumentError(say("accumulate", "window", must="be entered once", got="a second use", hint=hint))
        self._state = "closed"
        self._raise_own()
        self._verify(wait=self._counts.device.type == "cpu")
        self._state = "open"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._state = "closed"
        if kind is not None:
            # The other ranks may be anywhere: a collective could wait for ever.
            return
        self._verify(wait=True)
        device = self._counts.device
        wide = torch.float32 if device.type == "mps" else torch.float64
        self._reduced = torch.stack([_moved(torch.as_tensor(each, dtype=wide), device) for each in self._sums])
        if self._group is not None:
            self._reducing = distributed.all_reduce(self._reduced, group=self._group, async_op=True)

    # -- what is counted -----------------------------------------------------------------------------------------------
    def count(self, kind: Literal["token", "sequence"] = "token") -> Tensor:
        """How many are kept in all micro-batches of all ranks.

        >>> import torch, maskwise as mw
        >>> window = mw.accumulate([mw.Mask.from_lengths([2, 0], max_len=3), mw.Mask.from_lengths([1], max_len=3)])
        >>> window.count(), window.count("sequence")
        (tensor(3), tensor(2))

        Args:
            kind: "token" for kept elements, "sequence" for rows (indices of dim 0) that keep something.

        Returns:
            int64, 0-d, on the device where ranks communicate. No host-device sync.

        Raises:
            ArgumentError: ``kind`` is none of these, or rows are not known of plain counts.
        """
        place = self._place(kind)
        self._wait()
        return self._counts[place]

    def scale(self, total: Tensor, kind: Kind = "token") -> Tensor:
        """A total as the part of the whole batch's mean that it is: times `factor`, divided by the count.

        For any sum that is not of `mw.loss`, such as an auxiliary loss on the same count.

        >>> import torch, maskwise as mw
        >>> logits = torch.tensor([[1.0, 1.0], [0.0, 0.0]], requires_grad=True)
        >>> with mw.accumulate([2, 2]) as window:                   # 2 tokens here, 2 in another micro-batch
        ...     z_loss = window.scale(logits.logsumexp(-1).square().sum())
        ...     per_batch = window.scale(logits.square().sum(), kind=16)
        >>> z_loss, per_batch
        (tensor(0.8368, grad_fn=<DivBackward0>), tensor(0.1250, grad_fn=<DivBackward0>))

        Args:
            total: 0-d, floating: the un-normalised sum over this micro-batch. For "token" that is the sum of the loss
                over kept elements, for "sequence" the sum over rows of each row's own mean. It stays in the graph where
                nothing is kept.
            kind: what it is divided by: "token", by the kept elements of the window; "sequence", by its rows that keep
                something; a number, by that.

        Returns:
            0-d, of the total's dtype, and float32 for half precision. 0 where nothing is kept in the whole window.

        Raises:
            ArgumentError: the window is not open; ``kind`` is none of the above, or rows are not known of plain counts.
                On a GPU also what entering the window raises on the CPU.
            DtypeError: the total is not a floating tensor.
            ShapeError: the total has dims.
            DeviceError: the total is on the device meta.
        """
        if self._state != "open":
            got = "a window that is not entered yet" if self._state == "new" else "a window that was left"
            hint = "with mw.accumulate(masks) as window: around the losses of its micro-batches"
            raise ArgumentError(say("accumulate", "window", must="be open when a loss is scaled", got=got, hint=hint))
        if not isinstance(total, Tensor) or not total.is_floating_point():
            got = str(total.dtype) if isinstance(total, Tensor) else type(total).__name__
            raise DtypeError(say("scale", "total", must="be a floating tensor", got=got, hint='reduction="sum"'))
        if total.dim():
            must = "be a sum, of no dims"
            raise ShapeError(say("scale", "total", must=must, got=tuple(total.shape), hint="total.sum()"))
        if total.device.type == "meta":
            must, hint = "hold data", "a model on the device of its batches"
            raise DeviceError(say("scale", "total", must=must, got="the device meta", hint=hint))
        place = self._place(kind)
        self._verify(wait=False)
        total = total.to(wide_dtype(total.dtype))
        value = whole(total.detach())
        if not isinstance(kind, str):
            self._sums[_CONSTANT] = self._sums[_CONSTANT] + value / kind
            return total / (kind / self.factor)
        # Sums of many windows' worth of micro-batches, in float64 where there is one.
        self._sums[place] = self._sums[place] + (value if value.device.type == "mps" else value.double())
        return total / self._divisor(place, total)

    def result(self, kind: Literal["token", "sequence"] = "token") -> Result:
        """What was scaled, reduced over all ranks: the logged value is the optimised value.

        >>> import torch, maskwise as mw
        >>> with mw.accumulate([2, 0]) as window:
        ...     for total in (torch.tensor(3.0), torch.tensor(0.0)):
        ...         part = window.scale(total)
        >>> window.result().mean
        tensor(1.5000, dtype=torch.float64)

        The ranks sum up when the window is left, so that any of them may read it alone.

        Args:
            kind: the totals of which kind.

        Returns:
            The sum of the totals, float64, and their count, int64: 0-d tensors on the device where ranks communicate.

        Raises:
            ArgumentError: the window is not left yet, or was left by an error; ``kind`` is none of the above.
        """
        place = self._place(kind)
        return Result(self._totals()[place], self.count(kind))

    def value(self) -> Tensor:
        """The value that was optimised, over all ranks and kinds: each total divided by what its kind is divided by.

        >>> import torch, maskwise as mw
        >>> with mw.accumulate([2, 0]) as window:
        ...     part = window.scale(torch.tensor(3.0)) + window.scale(torch.tensor(1.0), kind=4)
        >>> window.value()
        tensor(1.7500, dtype=torch.float64)

        Raises:
            ArgumentError: the window is not left yet, or was left by an error.
        """
        totals = self._totals()
        self._wait()
        return (totals[:_CONSTANT] / self._counts[:_CONSTANT].clamp(min=1)).sum() + totals[_CONSTANT]

    # -- inside --------------------------------------------------------------------------------------------------------
    def _place(self, kind: object) -> int:
        if kind == "sequence" and self._rowless:
            must, hint = (
                'be "token" where plain counts were given',
                "mw.accumulate([mask, ...]), of the masks themselves",
            )
            raise ArgumentError(say("accumulate", "kind", must=must, got=repr(kind), hint=hint))
        if isinstance(kind, str) and kind in _KINDS:
            return _KINDS[kind]
        if isinstance(kind, (int, float)) and not isinstance(kind, bool) and 0 < kind < math.inf:
            return _CONSTANT
        must = 'be "token", "sequence" or a positive number'
        raise ArgumentError(say("accumulate", "kind", must=must, got=repr(kind), hint='kind="token"'))

    def _divisor(self, place: int, total: Tensor) -> Tensor:
        """What a total is divided by. Nothing kept counts as one: the total is 0 then."""
        key = (place, total.dtype, total.device)
        if key not in self._divisors:
            self._wait()
            counts = _moved(self._counts.clamp(min=1)[place], total.device)
            wide = torch.float32 if total.device.type == "mps" else torch.float64
            self._divisors[key] = (counts.to(wide) / self.factor).to(total.dtype)
        return self._divisors[key]

    def _totals(self) -> Tensor:
        if self._reduced is None:
            must, hint = "be left before its result is read", "window.result() after the block of the window"
            raise ArgumentError(say("accumulate", "window", must=must, got=f"{self!r}", hint=hint))
        if self._reducing is not None:
            self._reducing.wait()
            self._reducing = None
        return self._reduced

    def _wait(self) -> None:
        """Wait for the counts: on a GPU, the stream does."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._readback = _Readback(self._counts)

    def _raise_own(self) -> None:
        """Raise what failed on this rank, once no other rank waits for it."""
        if self._error is not None:
            self._wait()
            self._state = "closed"
            raise self._error

    def _is_end(self) -> bool:
        """Whether no rank has micro-batches. The host waits for the counts, at the end of a loader."""
        self._wait()
        return not bool(self._counts[_BATCHES] + self._counts[_FAILED])

    def _verify(self, wait: bool) -> None:
        """Raise, on every rank, unless the ranks agree: as soon as the host knows, or by waiting for that."""
        if self._agreed:
            return
        self._wait()
        assert self._readback is not None
        values = self._readback.values(wait)
        if values is None:
            return
        self._agreed = True
        self._rowless = values[_ROWLESS]
        if failed := values[_FAILED]:
            self._state = "closed"
            must, got = "be countable on every rank", f"an error on {failed} of {self._ranks}"
            raise ArgumentError(say("accumulate", "masks", must=must, got=got, hint="the message of that rank"))
        if values[_SQUARES] * self._ranks != values[_BATCHES] ** 2:
            self._state = "closed"
            must = "have as many micro-batches on every rank"
            got = f"{self.micro_batches} on this one, {values[_BATCHES]} on all {self._ranks}"
            hint = "fill up with micro-batches of which nothing is kept: masks.append(Mask.none((1, 1)))"
            raise ArgumentError(say("accumulate", "masks", must=must, got=got, hint=hint))
        if values[_FACTOR_SQUARES] * self._ranks != values[_FACTORS] ** 2:
            self._state = "closed"
            must = "undo the same factor on every rank"
            got = f"{self.factor} on this one, {values[_FACTORS]} on all {self._ranks}"
            hint = 'average="ranks" on every rank, under DDP and fully_shard'
            raise ArgumentError(say("accumulate", "average", must=must, got=got, hint=hint))


class Windows(Generic[_Batch]):
    """Micro-batches of a DataLoader in windows, each counted before its first micro-batch is used.

    >>> import torch, torch.nn.functional as F, maskwise as mw
    >>> loader = [torch.tensor([1.0, 2.0]), torch.tensor([3.0]), torch.tensor([4.0, 5.0])]
    >>> for window, batches in mw.distributed.Windows(loader, 2, lambda x: torch.ones_like(x, dtype=torch.bool)):
    ...     with window:
    ...         for x in batches:
    ...             part = window.scale(x.sum())
    ...     print(len(batches), window.result().mean.item())
    2 2.0
    1 4.5

    The last window may have fewer micro-batches. If the loaders of the ranks end in different windows, entering that
    window raises on every rank.

    Args:
        batches: yields micro-batches; a DataLoader. It can be iterated as often as that can.
        size: how many micro-batches make a window.
        count: from a micro-batch to what is counted of it: a mask, labels, or a count, as `mw.accumulate` takes them.
        group: as for `mw.accumulate`.
        average: as for `mw.accumulate`.
        ignore_index: as for `mw.accumulate`.

    Raises:
        DtypeError: ``size`` is not an int, ``count`` not a function, or ``group`` no group.
        ArgumentError: ``size`` is not positive; the process is not in the group, or there are no groups.
    """

    def __init__(
        self,
        batches: Iterable[_Batch],
        size: int,
        count: Callable[[_Batch], Countable],
        *,
        group: Any = None,
        average: Average = "ranks",
        ignore_index: int | None = None,
    ) -> None:
        if not isinstance(size, int) or isinstance(size, bool):
            raise DtypeError(say("Windows", "size", must="be an int", got=type(size).__name__, hint="size=4"))
        if size < 1:
            raise ArgumentError(say("Windows", "size", must="be positive", got=size, hint="size=1"))
        if not callable(count):
            hint = 'count=lambda batch: batch["mask"]'
            raise DtypeError(say("Windows", "count", must="be a function", got=type(count).__name__, hint=hint))
        self.batches, self.size = batches, size
        self._count, self._group = count, _process_group(group)
        self._average, self._ignore_index = average, ignore_index

    @property
    def sampler(self) -> Any:
        """The loader's sampler, or its batch sampler if that has ``set_epoch``: Lightning sets the epoch of it."""
        whole = getattr(self.batches, "batch_sampler", None)
        return whole if hasattr(whole, "set_epoch") else getattr(self.batches, "sampler", None)

    def __len__(self) -> int:
        """The number of windows, where the loader knows its own."""
        if not isinstance(self.batches, Sized):
            hint = "for window, batches in windows, without len"
            raise DtypeError(
                say("Windows", "batches", must="have a length", got=type(self.batches).__name__, hint=hint)
            )
        return (len(self.batches) + self.size - 1) // self.size

    def __iter__(self) -> Iterator[tuple[Window, list[_Batch]]]:
        source = iter(self.batches)
        while True:
            held: list[_Batch] = []
            window = Window._start(self._take(source, held), self._group, self._average, self._ignore_index)
            if not held and window._error is None and window._is_end():
                return
            yield window, held
            if len(held) < self.size:
                return

    def _take(self, source: Iterator[_Batch], held: list[_Batch]) -> Iterator[Countable]:
        """Hold the micro-batches of a window, and yield what is counted of each."""
        for _ in range(self.size):
            try:
                batch = next(source)
            except StopIteration:
                return
            held.append(batch)
            yield self._count(batch)


# -- counting ----------------------------------------------------------------------------------------------------------
class _Tally:
    """The counts of the micro-batches of this rank, on their devices."""

    def __init__(self) -> None:
        self.batches = self.rowless = 0
        self.tokens = 0
        self.found: list[Tensor] = []

    def add(self, entry: Any, ignore_index: int | None) -> None:
        """Count a micro-batch."""
        self.batches += 1
        if isinstance(entry, int) and not isinstance(entry, bool):
            _need_count(entry)
            self.tokens += entry
            self.rowless += 1
            return
        need_dense("accumulate", "masks", entry)
        if isinstance(entry, (Mask, Tensor)) and entry.device.type == "meta":
            must, hint = "hold data", "masks on the device of the micro-batches"
            raise DeviceError(say("accumulate", "masks", must=must, got="the device meta", hint=hint))
        is_tensor = isinstance(entry, Tensor)
        integral = is_tensor and not entry.is_floating_point() and not entry.is_complex()
        if integral and entry.dtype is not torch.bool and not entry.dim():
            if entry.is_cpu:
                # Elsewhere a look at it is a host-device sync.
                _need_count(int(entry))
            self.found.append(torch.stack((entry.detach().long(), torch.zeros_like(entry, dtype=torch.int64))))
            self.rowless += 1
            return
        if integral and entry.dtype is not torch.bool and ignore_index is not None:
            entry = entry != ignore_index
        elif not isinstance(entry, Mask) and not (is_tensor and entry.dtype is torch.bool):
            raise _not_countable(entry)
        dims = range(1, entry.dim())
        rows = count(entry, tuple(dims)) if dims else (entry.to_bool() if isinstance(entry, Mask) else entry)
        self.found.append(torch.stack((rows.sum(), (rows != 0).sum())))

    def to_tensor(self, device: torch.device, factor: int, failed: bool) -> Tensor:
        """What is sent: see `_TOKENS` and the others. No host-device sync."""
        n = self.batches
        numbers = [self.tokens, 0, n, n * n, int(failed), self.rowless, factor, factor * factor]
        sent = _moved(torch.tensor(numbers), device)
        if self.found:
            sent[: _ROWS + 1] += torch.stack([_moved(each, device) for each in self.found]).sum(0)
        return sent


class _Readback:
    """Reduced counts on their way to the host, for the checks."""

    def __init__(self, counts: Tensor) -> None:
        self._counts, self._arrived = counts, None
        if counts.device.type != "cpu":
            self._counts = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            self._counts.copy_(counts, non_blocking=True)
            self._arrived = torch.Event(counts.device)
            self._arrived.record()

    def values(self, wait: bool) -> list[int] | None:
        """The counts; None where they have not arrived, unless one waits for them."""
        if self._arrived is not None and not self._arrived.query():
            if not wait:
                return None
            self._arrived.synchronize()
        values: list[int] = self._counts.tolist()
        return values


def _need_count(value: int) -> None:
    if value < 0:
        must, hint = "not be a negative count", "int(mask.sum())"
        raise ArgumentError(say("accumulate", "masks", must=must, got=value, hint=hint))


def _not_countable(entry: object) -> MaskwiseError:
    got: object = type(entry).__name__
    hint = "mw.accumulate([mask, ...])"
    if isinstance(entry, Tensor):
        got = entry.dtype
        hint = "ignore_index=-100 for labels, Mask.from_attention_mask(mask) for 0 and 1"
    must = "hold masks, label tensors with ignore_index, or counts"
    return DtypeError(say("accumulate", "masks", must=must, got=got, hint=hint))


def _moved(x: Tensor, device: torch.device) -> Tensor:
    """X on another device, without a host-device sync."""
    if x.device == device:
        return x
    pinned = x.pin_memory() if x.device.type == "cpu" and device.type == "cuda" else x
    return pinned.to(device, non_blocking=device.type != "cpu")


# -- groups ------------------------------------------------------------------------------------------------------------
def _process_group(group: Any) -> Any:
    """The process group, or None for this process alone; raise where this process is not in it."""
    started = distributed.is_available() and distributed.is_initialized()
    if group is None:
        return distributed.group.WORLD if started else None
    if not started:
        must, hint = "be None before torch.distributed.init_process_group", "group=None"
        raise ArgumentError(say("accumulate", "group", must=must, got=type(group).__name__, hint=hint))
    return process_group("accumulate", group)


def _factor(average: object, group: Any) -> int:
    """What gradients are divided by after the backward pass."""
    if average == "ranks":
        return 1 if group is None else distributed.get_world_size(group)
    if average == "none":
        return 1
    if isinstance(average, int) and not isinstance(average, bool) and 0 < average < _FACTOR_LIMIT:
        return average
    must, hint = 'be "ranks", "none" or a positive int below 2**24', 'average="ranks", under DDP and fully_shard'
    raise ArgumentError(say("accumulate", "average", must=must, got=repr(average), hint=hint))


def _device_of(group: Any, tally: _Tally) -> torch.device:
    """Where counts are summed: the same kind of device on every rank, whatever its data."""
    if group is None:
        return next((each.device for each in tally.found), torch.device("cpu"))
    served = distributed.get_backend_config(group)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and f"{accelerator.type}:" in served:
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")
