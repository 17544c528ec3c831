"""Triton's interpreter, quick enough for a test run.

A reduction or a scan with a combination of its own is interpreted element by element; here it is combined slice by
slice: the same function on the same numbers in the same order, for all rows at once.
"""

from __future__ import annotations

import numpy as np
from triton.runtime import interpreter


def _tuple(result):
    return result if isinstance(result, tuple) else (result,)


def _slice(op, arrays, dtypes, i):
    return tuple(op.to_tensor(np.take(a, i, axis=op.axis), d) for a, d in zip(arrays, dtypes, strict=True))


def _running(op, input):
    arrays, dtypes = [arg.handle.data for arg in input], [arg.dtype for arg in input]
    state = _slice(op, arrays, dtypes, 0)
    yield state
    for i in range(1, arrays[0].shape[op.axis]):
        state = _tuple(op.combine_fn.fn(*state, *_slice(op, arrays, dtypes, i)))
        yield state


def generic_reduce(op, input):
    *_, last = _running(op, input)
    return [op.to_tensor(out.handle.data, arg.dtype) for out, arg in zip(last, input, strict=True)]


def generic_scan(op, input):
    states = list(_running(op, input))
    columns = zip(*states, strict=True)
    return [
        op.to_tensor(np.stack([s.handle.data for s in column], axis=op.axis), arg.dtype)
        for column, arg in zip(columns, input, strict=True)
    ]


def install() -> None:
    """Put the quicker ways in the place of the interpreter's own."""
    interpreter.ReduceOps.generic_reduce = generic_reduce
    interpreter.ScanOps.generic_scan = generic_scan
    # What a kernel computes for elements that it then throws away may be anything, on a GPU without a word.
    np.seterr(all="ignore")
