"""Assertions for test suites: a model does not leak, and a training step does not depend on how a batch is split."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from maskwise.errors import ArgumentError, say
from maskwise.models.audit.api import bound
from maskwise.models.audit.batch import Batch, MaskLike
from maskwise.models.audit.leaks import find_leaks
from maskwise.models.audit.subject import Loss, preserved
from maskwise.models.compress.example import tensors_of

__all__ = ["assert_no_leak", "assert_split_invariant"]


def assert_no_leak(
    model: nn.Module, batch: Any, *, mask: MaskLike | None = None, loss: Loss | None = None, nan: bool = False
) -> None:
    """Assert that kept outputs, the loss and gradients do not depend on dropped values.

    >>> import torch, maskwise as mw
    >>> from torch import nn
    >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    >>> padding = mw.Mask.from_lengths([5, 2]).to_key_padding()
    >>> mw.testing.assert_no_leak(model, {"src": torch.randn(2, 5, 8), "src_key_padding_mask": padding})
    >>> mw.testing.assert_no_leak(model, torch.randn(2, 5, 8), mask=~padding)
    Traceback (most recent call last):
    ...
    AssertionError: layers.0.self_attn: attention without mask (other values in dropped positions, eval and train)...

    Args:
        model: any module. It is not changed.
        batch: what it is called with, as for `mw.audit`; some positions must be dropped, or rows packed.
        mask: a Mask or a bool tensor (B, L); True means keep. By default it is found, as by `mw.audit`.
        loss: as for `mw.audit`.
        nan: whether NaN in dropped positions must not leak, either: attention weights of 0 times NaN are NaN.

    Raises:
        AssertionError: something leaks; the message has where, why and the line that repairs it.
        ArgumentError: nothing is dropped, so that nothing can be tested.
    """
    found, tokens = bound("assert_no_leak", model, batch, mask, loss)
    if all(bool(each.keep.all()) and each.segments is None for each in tokens):
        must, hint = "drop some positions, or pack several sequences into a row", "mask=, of what is kept"
        raise ArgumentError(say("assert_no_leak", "batch", must=must, got="neither", hint=hint))
    with preserved(model, loss) as subject:
        leaks = [leak for leak in find_leaks(subject, found, tokens) if nan or not leak.only_nan]
    if leaks:
        raise AssertionError("\n".join(f"{leak}: {leak.reason}. Hint: {leak.repair}" for leak in leaks))


def assert_split_invariant(
    step: Callable[[list[Any]], Any], batch: Any, *, rtol: float = 1e-4, atol: float = 1e-6
) -> None:
    """Assert that a training step gives the same values however its batch is split into micro-batches.

    >>> import torch, torch.nn.functional as F, maskwise as mw
    >>> x, y = torch.randn(4, 5), torch.randn(4, 5)
    >>> keep = mw.Mask.from_lengths([5, 1, 2, 4]).to_bool()
    >>> def step(micro_batches):
    ...     with mw.accumulate([keep for *_, keep in micro_batches]) as window:
    ...         return sum(mw.loss(F.mse_loss, x, y, keep, denominator=window) for x, y, keep in micro_batches)
    >>> mw.testing.assert_split_invariant(step, (x, y, keep))
    >>> def mean_of_means(micro_batches):
    ...     return sum(mw.loss(F.mse_loss, x, y, keep) for x, y, keep in micro_batches) / len(micro_batches)
    >>> mw.testing.assert_split_invariant(mean_of_means, (x, y, keep))
    Traceback (most recent call last):
    ...
    AssertionError: assert_split_invariant: the step gives other values for ... micro-batches...

    Args:
        step: takes a list of micro-batches in the form of ``batch``, and returns a tensor or several: the loss and, to
            have them compared, gradients. It must start from the same parameters each time, and draw no random numbers.
        batch: a tensor, a tuple or a dict, of which every tensor has the rows in its first dim.
        rtol: relative tolerance, of each tensor's largest element.
        atol: absolute tolerance.

    Raises:
        AssertionError: it does; the message has the split and the difference.
        ArgumentError: ``batch`` has no rows to split.
    """
    whole = Batch.of(nn.Identity(), batch, "assert_split_invariant")
    rows = whole.rows
    if rows is None or rows < 2:
        must, hint = "have two rows or more in every tensor", "a batch of several sequences"
        raise ArgumentError(say("assert_split_invariant", "batch", must=must, got=rows, hint=hint))
    expected = [each.detach().clone() for each in tensors_of(step([whole.as_passed()]))]
    for cuts in _splits(rows):
        parts = [whole.take(list(range(a, b))).as_passed() for a, b in pairwise(cuts)]
        found = [each.detach() for each in tensors_of(step(parts))]
        gap = _largest(expected, found, rtol, atol)
        if gap is not None:
            sizes = [b - a for a, b in pairwise(cuts)]
            raise AssertionError(
                f"assert_split_invariant: the step gives other values for {len(sizes)} micro-batches of {sizes} rows, "
                f"by {gap:.2e}. Hint: with mw.accumulate(masks) as window, and mw.loss(..., denominator=window)."
            )


def _splits(rows: int) -> list[list[int]]:
    """Halves, an uneven split, and single rows: the borders of each."""
    found = [[0, rows // 2, rows], [0, 1, rows], list(range(rows + 1))]
    return [cuts for index, cuts in enumerate(found) if cuts not in found[:index]]


def _largest(expected: list[Tensor], found: list[Tensor], rtol: float, atol: float) -> float | None:
    """The difference that is too large, or None."""
    for old, new in zip(expected, found, strict=True):
        gap = (new.double() - old.double()).abs().max() if old.numel() else torch.zeros(())
        if not bool(gap <= atol + rtol * old.double().abs().max()):
            return float(gap)
    return None
