"""Softmax and friends, and their gradients, as Triton kernels: one for all.

A row is looked at up to three times: for its state (of x), for two sums that need the state (of the gradient), and to
write the result. Where it fits into registers (WHOLE), it is read once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maskwise.ops.gpu.triton import bases, flat, joined, lift, merge, norm_of, number, offsets, power, put, read, window

__all__ = ["rowwise_kernel"]


@triton.jit
def at_least(x, least: tl.constexpr):
    """X, or ``least`` where it is less; NaN stays, which a maximum would drop."""
    return tl.where(x < least, least, x)


@triton.jit
def result_of(x, keep, a, b, n, OP: tl.constexpr, STATE: tl.constexpr, parameter: tl.constexpr, eps: tl.constexpr):
    """The function of the elements of a row, whose state is known."""
    out = x
    if OP == "softmax" or OP == "log_softmax":
        shift = tl.where(tl.abs(a) == float("inf"), 0.0, a)
        if OP == "softmax":
            out = tl.exp(x - shift) / b
        else:
            out = x - shift - tl.log(b)
        # As torch has it: what is infinite has no part of anything.
        out = tl.where(a == float("inf"), float("nan"), out)
    elif OP == "normalize":
        out = x / at_least(norm_of(a, n, STATE, parameter), eps)
    elif OP == "standardize":
        out = (x - a) * tl.rsqrt(b / tl.maximum(n.to(x.dtype) - parameter, 0.0) + eps)
    if OP == "log_softmax":
        return tl.where(keep, out, -float("inf"))
    return tl.where(keep, out, 0.0)


@triton.jit
def summed(g, x, keep, a, b, n, OP: tl.constexpr, STATE: tl.constexpr, parameter: tl.constexpr, eps: tl.constexpr):
    """What two sums over a row, that its gradient needs, are made of."""
    p, q = g, g
    if OP == "softmax":
        p = g * x
    elif OP == "normalize":
        p = g * x
        norm = norm_of(a, n, STATE, parameter)
        q = tl.where(keep & (tl.abs(x) == norm), 1.0, 0.0).to(g.dtype)
    elif OP == "standardize":
        q = tl.where(keep, g * (x - a) * tl.rsqrt(b / tl.maximum(n.to(x.dtype) - parameter, 0.0) + eps), 0.0)
    return p, q


@triton.jit
def slope_of(
    g, x, keep, a, b, n, p, q, sign,
    OP: tl.constexpr, STATE: tl.constexpr, parameter: tl.constexpr, eps: tl.constexpr,
):  # fmt: skip
    """The gradient of the elements of a row."""
    out = g
    if OP == "softmax":
        out = x * (g - p) * sign
    elif OP == "log_softmax":
        out = g - tl.exp(x) * p
    elif OP == "normalize":
        norm = norm_of(a, n, STATE, parameter)
        divisor = at_least(norm, eps)
        pull = tl.where(norm >= eps, p / (divisor * divisor), 0.0)
        side = tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))
        safe = tl.where(norm == 0, 1.0, norm)
        if STATE == "norm_0":
            grown = x * 0
        elif STATE == "norm_1":
            grown = side
        elif STATE == "norm_2":
            grown = x / safe
        elif STATE == "norm_p":
            grown = side * power(tl.where(x == 0, 1.0, tl.abs(x)) / safe, parameter - 1.0)
        else:
            grown = tl.where(tl.abs(x) == norm, side, 0.0) / tl.maximum(q, 1.0)
        out = g / divisor - pull * grown
    elif OP == "standardize":
        count = tl.maximum(n, 1).to(x.dtype)
        freedom = tl.maximum(n.to(x.dtype) - parameter, 0.0)
        scale = tl.rsqrt(b / freedom + eps)
        out = (g - p / count - (x - a) * scale * (q / freedom)) * scale
    return tl.where(keep, out, 0.0)


@triton.jit
def row_part(
    x, mask, x_base, mask_base, inner, x_inner, mask_inner, real, start, length, sign,
    OP: tl.constexpr, BACKWARD: tl.constexpr, IDENTITY: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, ELEMENTS: tl.constexpr, GROUP: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """A tile of x: where it is, and its values."""
    index, inside, keep, wanted = window(
        mask, mask_base, inner, mask_inner, real, start, length, WIDE, ELEMENTS, GROUP, SKIP
    )
    value = read(x, x_base, inner, x_inner, index, wanted, keep, IDENTITY, DTYPE, ROWS, ELEMENTS)
    if OP == "softmax" and not BACKWARD:
        value = tl.where(flat(keep, ROWS, ELEMENTS), value * sign, IDENTITY)
    return index, inside, keep, wanted, value


@triton.jit
def rowwise_kernel(
    x, grad, mask, out,
    outer, inner, x_outer, x_inner, grad_outer, grad_inner, mask_outer, mask_inner, out_outer, out_inner,
    rows, length, tiles, sign, parameter: tl.constexpr, eps: tl.constexpr,
    OP: tl.constexpr, STATE: tl.constexpr, IDENTITY: tl.constexpr, NEED_N: tl.constexpr, BACKWARD: tl.constexpr,
    WHOLE: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr,
    GROUP: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """Softmax (softmin with a ``sign`` of -1), log_softmax, normalize, standardize; or the gradient, from ``grad``."""
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, real = bases(tile, rows, ROWS)
        x_base, mask_base = offsets(row, outer, x_outer), offsets(row, outer, mask_outer)
        out_base = offsets(row, outer, out_outer)
        grad_base = out_base
        if BACKWARD:
            grad_base = offsets(row, outer, grad_outer)
        a, b, n = tl.full((ROWS,), IDENTITY, DTYPE), tl.zeros((ROWS,), DTYPE), number(ROWS, WIDE, 0)
        p, q = tl.zeros((ROWS,), DTYPE), tl.zeros((ROWS,), DTYPE)
        if WHOLE:
            index, inside, keep, wanted, value = row_part(
                x, mask, x_base, mask_base, inner, x_inner, mask_inner, real, 0, length, sign,
                OP, BACKWARD, IDENTITY, DTYPE, WIDE, ROWS, ELEMENTS, GROUP, SKIP,
            )  # fmt: skip
            kept = flat(keep, ROWS, ELEMENTS)
            if STATE != "":
                la, lb, ln = lift(value, kept, value, value, STATE, parameter, IDENTITY)
                a, b, n = merge(la, lb, ln, STATE, NEED_N)
            A, B, N = a[:, None], b[:, None], n[:, None]
            if BACKWARD:
                g = read(grad, grad_base, inner, grad_inner, index, wanted, keep, 0.0, DTYPE, ROWS, ELEMENTS)
                lp, lq = summed(g, value, kept, A, B, N, OP, STATE, parameter, eps)
                P, Q = tl.sum(lp, 1)[:, None], tl.sum(lq, 1)[:, None]
                result = slope_of(g, value, kept, A, B, N, P, Q, sign, OP, STATE, parameter, eps)
            else:
                result = result_of(value, kept, A, B, N, OP, STATE, parameter, eps)
            put(out, out_base, inner, out_inner, index, inside, result)
        else:
            if STATE != "":
                for start in range(0, length, ELEMENTS):
                    index, inside, keep, wanted, value = row_part(
                        x, mask, x_base, mask_base, inner, x_inner, mask_inner, real, start, length, sign,
                        OP, BACKWARD, IDENTITY, DTYPE, WIDE, ROWS, ELEMENTS, GROUP, SKIP,
                    )  # fmt: skip
                    la, lb, ln = lift(value, flat(keep, ROWS, ELEMENTS), value, value, STATE, parameter, IDENTITY)
                    ta, tb, tn = merge(la, lb, ln, STATE, NEED_N)
                    a, b, n = joined(a, b, n, ta, tb, tn, STATE, NEED_N)
            A, B, N = a[:, None], b[:, None], n[:, None]
            if BACKWARD:
                for start in range(0, length, ELEMENTS):
                    index, inside, keep, wanted, value = row_part(
                        x, mask, x_base, mask_base, inner, x_inner, mask_inner, real, start, length, sign,
                        OP, BACKWARD, IDENTITY, DTYPE, WIDE, ROWS, ELEMENTS, GROUP, SKIP,
                    )  # fmt: skip
                    g = read(grad, grad_base, inner, grad_inner, index, wanted, keep, 0.0, DTYPE, ROWS, ELEMENTS)
                    lp, lq = summed(g, value, flat(keep, ROWS, ELEMENTS), A, B, N, OP, STATE, parameter, eps)
                    p += tl.sum(lp, 1)
                    q += tl.sum(lq, 1)
            P, Q = p[:, None], q[:, None]
            for start in range(0, length, ELEMENTS):
                index, inside, keep, wanted, value = row_part(
                    x, mask, x_base, mask_base, inner, x_inner, mask_inner, real, start, length, sign,
                    OP, BACKWARD, IDENTITY, DTYPE, WIDE, ROWS, ELEMENTS, GROUP, SKIP,
                )  # fmt: skip
                kept = flat(keep, ROWS, ELEMENTS)
                if BACKWARD:
                    g = read(grad, grad_base, inner, grad_inner, index, wanted, keep, 0.0, DTYPE, ROWS, ELEMENTS)
                    result = slope_of(g, value, kept, A, B, N, P, Q, sign, OP, STATE, parameter, eps)
                else:
                    result = result_of(value, kept, A, B, N, OP, STATE, parameter, eps)
                put(out, out_base, inner, out_inner, index, inside, result)
