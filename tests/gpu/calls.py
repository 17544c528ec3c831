"""Every op that has a Triton kernel, with inputs that make its launcher choose each of its configurations.

Tensors are on the device "meta": launchers look at shapes, strides and dtypes, never at data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf

import torch

from maskwise.ops.backends import FLOATING, INTEGRAL
from maskwise.ops.conv import gpu as conv
from maskwise.ops.fill import gpu as fill
from maskwise.ops.gpu.launch import recording
from maskwise.ops.linear import gpu as linear
from maskwise.ops.loss import gpu as loss
from maskwise.ops.reduce import gpu as reduce
from maskwise.ops.scan import gpu as scan
from maskwise.ops.select import gpu as select
from maskwise.ops.softmax import gpu as softmax

ALL = (*FLOATING, *INTEGRAL, torch.bool)


@dataclass(frozen=True)
class Layout:
    """A shape, where its rows lie, and how the mask broadcasts."""

    name: str
    shape: tuple[int, ...]
    dim: int
    mask: tuple[int, ...] | None = None
    step: int = 1
    #: The dims in the order of memory, of x and of the mask.
    order: tuple[int, ...] | None = None

    def tensors(self, dtype):
        shape = (*self.shape[:-1], self.shape[-1] * self.step)
        x = torch.empty(shape, dtype=dtype, device="meta")[..., :: self.step]
        mask = torch.empty(self.mask or self.shape, dtype=torch.bool, device="meta")
        if self.order is not None:
            back = [self.order.index(d) for d in range(len(shape))]
            x, mask = (t.permute(self.order).contiguous().permute(back) for t in (x, mask))
        return x, mask


#: The first is the default: what docs/gpu.md tells of, and what must not spill.
LAYOUTS = (
    Layout("rows", (4096, 1024), -1),
    Layout("short rows", (4096, 16), -1),
    Layout("middling rows", (4096, 128), -1),
    Layout("wide rows", (4096, 2048), -1),
    Layout("wider rows", (4096, 4096), -1),
    Layout("widest rows", (4096, 8192), -1),
    Layout("long rows", (4096, 32768), -1),
    Layout("few long rows", (2, 1 << 22), -1),
    Layout("columns", (64, 1024, 512), 1),
    Layout("short columns", (64, 32, 512), 1),
    Layout("few long columns", (1 << 16, 64), 0),
    Layout("broadcast mask", (64, 1024, 512), 1, mask=(64, 1024, 1)),
    Layout("middling broadcast mask", (64, 100, 512), 1, mask=(64, 100, 1)),
    Layout("strided mask", (1024, 64, 512), 0, mask=(1024, 64, 1)),
    Layout("strided rows", (63, 1001), -1, step=3),
    Layout("short strided rows", (63, 100), -1, step=3),
    Layout("rows of one", (4096, 1), -1),
    Layout("short rows, broadcast mask", (4096, 16), -1, mask=(4096, 1)),
    Layout("middling rows, broadcast mask", (4096, 128), -1, mask=(4096, 1)),
    Layout("many rows of one", (1 << 17, 1), -1),
    Layout("many short rows", (1 << 17, 16), -1),
    Layout("many rows", (1 << 17, 128), -1),
    Layout("64-bit rows", (2, 1 << 31), -1),
    Layout("64-bit columns", (1 << 22, 1024), 0),
    Layout("64-bit strided rows", (2, 1 << 30), -1, step=3),
)
#: Short rows, which share a tile: where they begin at 16-byte boundaries, and where not.
LAYOUTS += tuple(
    Layout(f"rows of {n}", (1 << 17, n), -1) for n in (3, 4, 7, 8, 15, 31, 32, 63, 64, 127, 255, 256, 511, 512)
)
LAYOUTS += (
    Layout("vocabulary rows", (4096, 50257), -1),
    Layout("unaligned rows", (4096, 5001), -1),
    Layout("few columns", (1 << 20, 3), 0),
    Layout("some columns", (1 << 16, 9), 0),
    Layout("long strided rows", (4096, 100_000), -1, step=3),
    Layout("middling strided rows", (4096, 10_000), -1, step=3),
    Layout("mask of one column", (64, 100, 512), 1, mask=(1, 100, 1)),
    Layout("strided rows of 2000", (4096, 2000), -1, step=3),
    Layout("strided rows of 4000", (4096, 4000), -1, step=3),
    Layout("strided rows of 8000", (4096, 8000), -1, step=3),
    Layout("row masks", (4096, 4096), -1, mask=(4096, 1)),
)
#: What is not contiguous, with a mask that lies as x does, or, of every other element, contiguously.
LAYOUTS += (
    Layout("transposed", (4096, 4096), -1, order=(1, 0)),
    Layout("channels last", (64, 32, 64, 64), -1, order=(0, 2, 3, 1)),
    Layout("every other", (4096, 8192), -1, step=2),
    Layout("columns of no whole vectors", (64, 1000, 501), 1),
    Layout("one odd row", (1, 50_001), -1),
    Layout("two columns", (1025, 2049, 2), 1),
    Layout("one strided column", (1, 33, 1), 2, mask=(1, 1, 1), step=3),
)
#: Single short rows, with gaps and without: elementwise kernels take dims without gaps for one row.
TINY = tuple(Layout(f"{n} by {step}", (1, n), -1, step=step) for n in (8, 32, 64, 128, 256, 512) for step in (1, 3))
TINY += (Layout("unaligned rows, one mask", (2, 2049), -1, mask=(1, 2049)),)
#: All rows are one segment or few.
SEGMENTED = (
    Layout("long segments", (1 << 20, 1), 1),
    Layout("longest segments", (1, (1 << 31) + 5), 0),
    Layout("segments of one row", (1, 1 << 16), -1),
)
#: What Triton specialises by itself: sizes that 16 does not divide.
ODD = Layout("odd rows", (63, 1001), -1)


@dataclass(frozen=True)
class Call:
    """An op: ``run(x, mask, dim)`` calls its launcher."""

    name: str
    run: Callable
    dtypes: tuple = FLOATING
    #: Layouts that make this launcher alone choose another tile.
    more: tuple[Layout, ...] = ()

    @property
    def layouts(self):
        """All layouts of this op."""
        return (*LAYOUTS, *self.more)

    def launches(self, layout, dtype):
        """What would be started."""
        x, mask = layout.tensors(dtype)
        with recording() as noted:
            self.run(x, mask, [layout.dim % x.dim()])
        return noted


def row(x, dim):
    """Like what a reduction gives."""
    return torch.empty([n for d, n in enumerate(x.shape) if d not in dim], dtype=x.dtype, device="meta")


def classes(x, dim):
    """X with its rows as classes in dim 1, and a target."""
    x = x.movedim(dim[0], 1)
    return x, torch.empty((x.shape[0], *x.shape[2:]), dtype=torch.int64, device="meta")


def weights(x, weighted):
    return torch.empty(x.shape[1], dtype=x.dtype, device="meta") if weighted else None


def cross_entropy(x, mask, dim, smoothing=0.0, reduction=2, weighted=False):
    x, target = classes(x, dim)
    keep = mask.select(dim[0], 0)
    return loss.cross_entropy(x, target, keep, weights(x, weighted), -100, smoothing, reduction)


def cross_entropy_backward(x, mask, dim, smoothing=0.0, reduction=2, weighted=False):
    x, target = classes(x, dim)
    sums = torch.empty_like(target, dtype=torch.float64)
    grad = torch.empty(() if reduction else target.shape, dtype=x.dtype, device="meta")
    facts = (sums, sums.new_empty(2), -100, smoothing, reduction)
    return loss.cross_entropy_backward(grad, x, target, mask.select(dim[0], 0), weights(x, weighted), *facts)


def simple(module, name, *rest):
    return lambda x, m, d: getattr(module, name)(x, m, d, *rest)


def of_row(name, *rest):
    return lambda x, m, d: getattr(reduce, name)(row(x, d), row(x, d), x, m, d, False, *rest)


def scalar(x, dtype=None):
    return torch.empty((), dtype=dtype or x.dtype, device="meta")


def rows_of(x, dim):
    """Rows to move, and the mask of them."""
    x = x.movedim(dim[0], -1)
    return x, torch.empty(x.shape[:-1], dtype=torch.bool, device="meta")


def packed_of(x, dim):
    """Half of the rows, and the mask of all of them."""
    x, mask = rows_of(x, dim)
    rows = x.reshape(-1, x.shape[-1])
    return rows[: rows.shape[0] // 2], mask


def map_of(x):
    """A map of one row, as many channels as there are rows; what is valid of it; and 64 tiles of 8 positions."""
    x = x.reshape(1, x.numel() // max(1, x.shape[-1]), 1, x.shape[-1])
    bits = torch.empty(1, 1, x.shape[-1], dtype=torch.bool, device="meta")
    return x, bits, torch.empty(64, 3, dtype=torch.int32, device="meta")


def scatter_tiles(x):
    """Tiles of 8 positions into a map."""
    x, bits, tiles = map_of(x)
    conv.scatter_out(x.new_empty(64, x.shape[1], 1, 8), tiles, bits, [1, 8], [0, 0], x)


def stretches(x, dim):
    """Rows, and 64 stretches of them."""
    x = x.movedim(dim[0], -1)
    return x.reshape(-1, x.shape[-1]), torch.empty(65, dtype=torch.int32, device="meta")


def of_stretches(x, dim, op):
    """A gradient, a result, rows and 64 stretches of them."""
    rows, bounds = stretches(x, dim)
    result = like(rows) if op == "softmax" else rows.new_empty(64, rows.shape[1])
    return like(result), result, rows, bounds


def blocks(x, dim):
    """A batch, and a weight with 1024 outputs of which a quarter of the blocks is kept."""
    x = x.movedim(dim[0], -1)
    x = x.reshape(-1, x.shape[-1])
    many = 16 * (-(-x.shape[1] // 16))
    starts, columns = (torch.empty(n, dtype=torch.int32, device="meta") for n in (65, many))
    return x, x.new_empty(many * 256), starts, columns


def weight_gradient(x, dim):
    x, _, starts, columns = blocks(x, dim)
    return linear.sampled(x.new_empty(x.shape[0], 1024), x, starts, columns, 16, 16)


def like(x):
    return torch.empty_like(x)


def intervals(x, dim):
    """The starts and ends of what is kept of each row, and their dim."""
    sizes = [1 if d in dim else n for d, n in enumerate(x.shape)]
    return torch.empty(2, *sizes, dtype=torch.int64, device="meta"), dim[0] - x.dim()


def of_intervals(module, name, *rest):
    """A call with a mask of intervals along rows."""

    def run(x, mask, dim):
        bounds, along = intervals(x, dim)
        return getattr(module, name)(x, bounds, dim, *rest, along)

    return run


def fill_intervals(x, mask, dim):
    bounds, along = intervals(x, dim)
    return fill.fill(x, bounds, torch.zeros((), dtype=x.dtype), along)


def loss_intervals(x, mask, dim):
    bounds, along = intervals(x, dim)
    return loss.loss(x, like(x), bounds, 0, 1.0, 2, along)


SEGMENTS = tuple(select.STATS)
CALLS = (
    Call("sum", simple(reduce, "sum", False), ALL),
    Call("sum of intervals", of_intervals(reduce, "sum", False)),
    Call("logsumexp of intervals", of_intervals(reduce, "logsumexp", False)),
    Call("softmax of intervals", of_intervals(softmax, "softmax")),
    Call("cumsum of intervals", of_intervals(scan, "cumsum")),
    Call("fill of intervals", fill_intervals),
    Call("loss of intervals", loss_intervals),
    Call("sum backward", lambda x, m, d: reduce.sum_backward(row(x, d), m, list(x.shape), d, False)),
    Call("prod", simple(reduce, "prod", False)),
    Call("prod backward", of_row("prod_backward")),
    Call("mean", simple(reduce, "mean", False)),
    Call("mean backward", lambda x, m, d: reduce.mean_backward(row(x, d), m, list(x.shape), d, False)),
    Call("var", simple(reduce, "var", False, 1.0)),
    Call("var backward", lambda x, m, d: reduce.var_backward(row(x, d), x, m, d, False, 1.0, False)),
    Call("std", simple(reduce, "std", False, 1.0)),
    Call("std backward", lambda x, m, d: reduce.var_backward(row(x, d), x, m, d, False, 1.0, True)),
    Call("norm", simple(reduce, "norm", False, 2.0)),
    Call("norm backward", of_row("norm_backward", 2.0)),
    *(Call(f"norm {p}", simple(reduce, "norm", False, p)) for p in (0.0, 1.0, 3.0, inf, -inf)),
    *(Call(f"norm {p} backward", of_row("norm_backward", p)) for p in (1.0, 3.0, inf)),
    Call("amax", simple(reduce, "amax", False), ALL),
    Call("amax backward", of_row("extremum_backward", True)),
    Call("amin", simple(reduce, "amin", False), ALL),
    Call("argmax", simple(reduce, "argmax", False), (*FLOATING, *INTEGRAL)),
    Call("argmin", simple(reduce, "argmin", False), (*FLOATING, *INTEGRAL)),
    Call("logsumexp", simple(reduce, "logsumexp", False)),
    Call("logsumexp backward", of_row("logsumexp_backward")),
    Call("any", simple(reduce, "any", False), ALL),
    Call("all", simple(reduce, "all", False), ALL),
    Call("softmax", simple(softmax, "softmax")),
    Call("softmax backward", lambda x, m, d: softmax.softmax_backward(torch.empty_like(x), x, m, d, False)),
    Call("log_softmax", simple(softmax, "log_softmax")),
    Call("log_softmax backward", lambda x, m, d: softmax.log_softmax_backward(torch.empty_like(x), x, m, d)),
    Call("normalize", simple(softmax, "normalize", 2.0, 1e-12)),
    Call("normalize backward", lambda x, m, d: softmax.normalize_backward(torch.empty_like(x), x, m, d, 2.0, 1e-12)),
    *(Call(f"normalize {p}", simple(softmax, "normalize", p, 1e-12)) for p in (0.0, 1.0, 3.0, inf, -inf)),
    *(
        Call(f"normalize {p} backward", lambda x, m, d, p=p: softmax.normalize_backward(like(x), x, m, d, p, 1e-12))
        for p in (0.0, 1.0, 3.0, inf, -inf)
    ),
    Call("standardize", simple(softmax, "standardize", 0.0, 1e-5)),
    Call("standardize backward", lambda x, m, d: softmax.standardize_backward(torch.empty_like(x), x, m, d, 0.0, 1e-5)),
    Call("cumsum", simple(scan, "cumsum"), ALL),
    Call("cumsum backward", lambda x, m, d: scan.cumsum_backward(x, m, d)),
    Call("cumprod", simple(scan, "cumprod"), ALL),
    Call("cumprod backward", lambda x, m, d: scan.cumprod_backward(like(x), x, m, like(x), d)),
    Call("cummax", simple(scan, "cummax"), ALL),
    Call("cummin", simple(scan, "cummin"), ALL),
    Call("cummax backward", lambda x, m, d: scan.cumextreme_backward(x, torch.empty_like(x, dtype=torch.int64), m, d)),
    Call("logcumsumexp", simple(scan, "logcumsumexp")),
    Call("logcumsumexp backward", lambda x, m, d: scan.logcumsumexp_backward(like(x), x, m, like(x), d)),
    Call("fill", lambda x, m, d: fill.fill(x, m, torch.zeros((), dtype=x.dtype)), ALL),
    Call("fill by a tensor", lambda x, m, d: fill.fill(x, m, torch.empty_like(x)), ALL),
    *(
        Call(f"loss{name}", lambda x, m, d, r=r: loss.loss(x, like(x), m, 0, 1.0, r))
        for name, r in (("", 2), (" unreduced", 0))
    ),
    *(
        Call(
            f"loss{name} backward",
            lambda x, m, d, r=r: loss.loss_backward(
                scalar(x) if r else like(x), x, like(x), m, scalar(x, torch.float64), 0, 1.0, r
            ),
            more=() if name else TINY,
        )
        for name, r in (("", 2), (" unreduced", 0))
    ),
    Call("pack", lambda x, m, d: select.pack_capacity(*rows_of(x, d), x.numel() // x.shape[d[0]]), ALL),
    Call("conv gather", lambda x, m, d: conv.gather(*map_of(x), [1, 8, 0, -1, 1, 10])),
    Call("conv scatter", lambda x, m, d: scatter_tiles(x)),
    Call("unpack", lambda x, m, d: select.unpack_capacity(*packed_of(x, d), scalar(x)), ALL),
    *(Call(f"segment {op}", lambda x, m, d, op=op: select.segments(*stretches(x, d), op)) for op in SEGMENTS),
    *(
        Call(
            f"segment {op} backward",
            lambda x, m, d, op=op: select.segment_backward(*of_stretches(x, d, op), op),
            more=SEGMENTED,
        )
        for op in SEGMENTS
    ),
    Call("linear", lambda x, m, d: linear.product(*blocks(x, d), None, 1024, 16, 16), linear.DTYPES),
    Call(
        "linear with bias",
        lambda x, m, d: linear.product(*blocks(x, d), x.new_empty(1024), 1024, 16, 16),
        linear.DTYPES,
    ),
    Call("linear weight gradient", lambda x, m, d: weight_gradient(x, d), linear.DTYPES),
    Call("cross_entropy", cross_entropy),
    Call("cross_entropy backward", cross_entropy_backward),
    *(
        Call(f"cross_entropy {name}", partial(run, **settings))
        for kind, run in (("", cross_entropy), (" backward", cross_entropy_backward))
        for name, settings in (
            (f"smoothed{kind}", {"smoothing": 0.1}),
            (f"unreduced{kind}", {"reduction": 0}),
            (f"weighted{kind}", {"weighted": True}),
        )
    ),
)
