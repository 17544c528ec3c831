"""Softmax and normalization, and their gradients, as one Triton kernel.

It makes up to three passes over a row: for its statistics, for the two sums of a gradient, which need the statistics,
and to write the result. A row that fits into registers (IN_REGISTERS) is read once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maskwise.ops.gpu.triton import bases, flat, joined, lift, merge, norm_of, number, offsets, power, put, read, window

__all__ = ["rowwise_kernel"]


@triton.jit
def at_least(x, least: tl.constexpr):
    """The maximum of x and ``least``; unlike tl.maximum, it propagates NaN."""
    return tl.where(x < least, least, x)


@triton.jit
def result_of(x, keep, a, b, n, OP: tl.constexpr, STATE: tl.constexpr, parameter: tl.constexpr, eps: tl.constexpr):
    """The result for the elements of a row, from its statistics."""
    out = x
    if OP == "softmax" or OP == "log_softmax":
        shift = tl.where(tl.abs(a) == float("inf"), 0.0, a)
        if OP == "softmax":
            out = tl.exp(x - shift) / b
        else:
            out = x - shift - tl.log(b)
        # As in torch, +inf in a row makes it NaN.
        out = tl.where(a == float("inf"), float("nan"), out)
    elif OP == "normalize":
        out = x / at_least(norm_of(a, n, STATE, parameter), eps)
    elif OP == "standardize":
        out = (x - a) * tl.rsqrt(b / tl.maximum(n.to(x.dtype) - parameter, 0.0) + eps)
    if OP == "log_softmax":
        return tl.where(keep, out, -float("inf"))
    return tl.where(keep, out, 0.0)


@triton.jit
def gradient_terms(
    g, x, keep, a, b, n, OP: tl.constexpr, STATE: tl.constexpr, parameter: tl.constexpr, eps: tl.constexpr
):
    """The terms of the two sums over a row that its gradient needs."""
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
def gradient_of(
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
        grad_norm = tl.where(norm >= eps, p / (divisor * divisor), 0.0)
        sign_x = tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))
        safe = tl.where(norm == 0, 1.0, norm)
        if STATE == "norm_0":
            derivative = x * 0
        elif STATE == "norm_1":
            derivative = sign_x
        elif STATE == "norm_2":
            derivative = x / safe
        elif STATE == "norm_p":
            derivative = sign_x * power(tl.where(x == 0, 1.0, tl.abs(x)) / safe, parameter - 1.0)
        else:
            derivative = tl.where(tl.abs(x) == norm, sign_x, 0.0) / tl.maximum(q, 1.0)
        out = g / divisor - grad_norm * derivative
    elif OP == "standardize":
        count = tl.maximum(n, 1).to(x.dtype)
        freedom = tl.maximum(n.to(x.dtype) - parameter, 0.0)
        scale = tl.rsqrt(b / freedom + eps)
        out = (g - p / count - (x - a) * scale * (q / freedom)) * scale
    return tl.where(keep, out, 0.0)


@triton.jit
def load_tile(
    x, mask, x_base, mask_base, inner, x_inner, mask_inner, real, start, length, sign,
    OP: tl.constexpr, BACKWARD: tl.constexpr, IDENTITY: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, ELEMENTS: tl.constexpr, GROUP: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """Load a tile of x: its indices, its mask, and its values."""
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
    IN_REGISTERS: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr,
    GROUP: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """Softmax (softmin with ``sign`` -1), log_softmax, normalize, standardize; or the gradient, from ``grad``."""
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, real = bases(tile, rows, ROWS)
        x_base, mask_base = offsets(row, outer, x_outer), offsets(row, outer, mask_outer)
        out_base = offsets(row, outer, out_outer)
        grad_base = out_base
        if BACKWARD:
            grad_base = offsets(row, outer, grad_outer)
        a, b, n = tl.full((ROWS,), IDENTITY, DTYPE), tl.zeros((ROWS,), DTYPE), number(ROWS, WIDE, 0)
        p, q = tl.zeros((ROWS,), DTYPE), tl.zeros((ROWS,), DTYPE)
        if IN_REGISTERS:
            index, inside, keep, wanted, value = load_tile(
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
                lp, lq = gradient_terms(g, value, kept, A, B, N, OP, STATE, parameter, eps)
                P, Q = tl.sum(lp, 1)[:, None], tl.sum(lq, 1)[:, None]
                result = gradient_of(g, value, kept, A, B, N, P, Q, sign, OP, STATE, parameter, eps)
            else:
                result = result_of(value, kept, A, B, N, OP, STATE, parameter, eps)
            put(out, out_base, inner, out_inner, index, inside, result)
        else:
            if STATE != "":
                for start in range(0, length, ELEMENTS):
                    index, inside, keep, wanted, value = load_tile(
                        x, mask, x_base, mask_base, inner, x_inner, mask_inner, real, start, length, sign,
                        OP, BACKWARD, IDENTITY, DTYPE, WIDE, ROWS, ELEMENTS, GROUP, SKIP,
                    )  # fmt: skip
                    la, lb, ln = lift(value, flat(keep, ROWS, ELEMENTS), value, value, STATE, parameter, IDENTITY)
                    ta, tb, tn = merge(la, lb, ln, STATE, NEED_N)
                    a, b, n = joined(a, b, n, ta, tb, tn, STATE, NEED_N)
            A, B, N = a[:, None], b[:, None], n[:, None]
            if BACKWARD:
                for start in range(0, length, ELEMENTS):
                    index, inside, keep, wanted, value = load_tile(
                        x, mask, x_base, mask_base, inner, x_inner, mask_inner, real, start, length, sign,
                        OP, BACKWARD, IDENTITY, DTYPE, WIDE, ROWS, ELEMENTS, GROUP, SKIP,
                    )  # fmt: skip
                    g = read(grad, grad_base, inner, grad_inner, index, wanted, keep, 0.0, DTYPE, ROWS, ELEMENTS)
                    lp, lq = gradient_terms(g, value, flat(keep, ROWS, ELEMENTS), A, B, N, OP, STATE, parameter, eps)
                    p += tl.sum(lp, 1)
                    q += tl.sum(lq, 1)
            P, Q = p[:, None], q[:, None]
            for start in range(0, length, ELEMENTS):
                index, inside, keep, wanted, value = load_tile(
                    x, mask, x_base, mask_base, inner, x_inner, mask_inner, real, start, length, sign,
                    OP, BACKWARD, IDENTITY, DTYPE, WIDE, ROWS, ELEMENTS, GROUP, SKIP,
                )  # fmt: skip
                kept = flat(keep, ROWS, ELEMENTS)
                if BACKWARD:
                    g = read(grad, grad_base, inner, grad_inner, index, wanted, keep, 0.0, DTYPE, ROWS, ELEMENTS)
                    result = gradient_of(g, value, kept, A, B, N, P, Q, sign, OP, STATE, parameter, eps)
                else:
                    result = result_of(value, kept, A, B, N, OP, STATE, parameter, eps)
                put(out, out_base, inner, out_inner, index, inside, result)
