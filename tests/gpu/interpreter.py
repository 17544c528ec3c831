"""Triton's interpreter, quick enough for a test run.

A reduction or a scan with a combination of its own is interpreted element by element, one after the other; here
neighbours are combined pair by pair, for all pairs at once, as a GPU does it.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _part(op, arrays, start, stop, step):
    at = [slice(None)] * arrays[0].ndim
    at[op.axis] = slice(start, stop, step)
    return [array[tuple(at)] for array in arrays]


def _combined(op, dtypes, first, second):
    """The combination of two lists of arrays, the first being the earlier."""
    operands = [
        op.to_tensor(np.ascontiguousarray(a), d) for a, d in zip((*first, *second), (*dtypes, *dtypes), strict=True)
    ]
    result = op.combine_fn.fn(*operands)
    return [out.handle.data for out in (result if isinstance(result, tuple) else (result,))]


def generic_reduce(op, input):
    arrays, dtypes = [arg.handle.data for arg in input], [arg.dtype for arg in input]
    # The length is a power of two.
    while arrays[0].shape[op.axis] > 1:
        arrays = _combined(op, dtypes, _part(op, arrays, 0, None, 2), _part(op, arrays, 1, None, 2))
    return [op.to_tensor(np.squeeze(a, op.axis), d) for a, d in zip(arrays, dtypes, strict=True)]


def generic_scan(op, input):
    arrays, dtypes = [arg.handle.data for arg in input], [arg.dtype for arg in input]
    length, reach = arrays[0].shape[op.axis], 1
    while reach < length:
        # The first ones have nobody that far before them, and stay as they are.
        earlier = [np.roll(array, reach, op.axis) for array in arrays]
        found = _combined(op, dtypes, earlier, arrays)
        early = _part(op, arrays, 0, reach, 1)
        arrays = [
            np.concatenate((mine, *_part(op, [new], reach, None, 1)), axis=op.axis)
            for mine, new in zip(early, found, strict=True)
        ]
        reach *= 2
    return [op.to_tensor(a, d) for a, d in zip(arrays, dtypes, strict=True)]


def device_call(function, *args, **kwargs):
    """A call of a function by a kernel: a launch has put the interpreter's language in its place already."""
    languages = [value for value in function.fn.__globals__.values() if value is tl or value is tl.core]
    if any(tl.core.is_builtin(language.load) for language in languages):
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*args, **kwargs)


@contextmanager
def permuted(seed):
    """Run the programs of each launch in another order than theirs: on a device any of them may be the last."""
    builder = interpreter.interpreter_builder
    own, orders = type(builder).set_grid_idx, {}

    def set_grid_idx(x, y, z):
        programs = builder.grid_dim[0]
        if programs not in orders:
            order = random.Random(f"{seed} {programs}").sample(range(programs), programs)
            orders[programs] = order[::-1] if order == sorted(order) else order
        own(builder, orders[programs][x], y, z)

    builder.set_grid_idx = set_grid_idx
    try:
        yield orders
    finally:
        del builder.set_grid_idx


def install() -> None:
    """Put the quicker ways in the place of the interpreter's own."""
    interpreter.ReduceOps.generic_reduce = generic_reduce
    interpreter.ScanOps.generic_scan = generic_scan
    interpreter.InterpretedFunction.__call__ = device_call
    # Each sum would be computed once more in 64 bits, for an assertion that is off.
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    # What a kernel computes for elements that it then throws away may be anything, on a GPU without a word.
    np.seterr(all="ignore")
