"""Benchmarks on a GPU: whether there is one, which targets count there, and how inputs get there."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.case import Case
from maskwise.mask import Mask

__all__ = ["for_device", "moved", "why_not"]

#: What runs on the host alone.
ON_HOST = ("startup",)


def why_not(device: str) -> str | None:
    """The reason why nothing can be measured on the device, or None when it can.

    >>> why_not("tpu")
    "the benchmarks run on 'cpu' and 'cuda', not on 'tpu'."
    """
    if device.split(":", maxsplit=1)[0] != "cuda":
        return f"the benchmarks run on 'cpu' and 'cuda', not on {device!r}."
    if not torch.cuda.is_available():
        built = "this torch is built without CUDA or ROCm" if torch.version.cuda is None else "torch finds no GPU"
        return f"no GPU to measure on: {built} (torch {torch.__version__}). `maskwise doctor` shows more."
    count, index = torch.cuda.device_count(), torch.device(device).index or 0
    if index >= count:
        return f"there {'is' if count == 1 else 'are'} {count} GPU{'s' if count > 1 else ''} here, and no {device!r}."
    return None


def for_device(case: Case, device: str) -> Case:
    """The case as it counts there: factors are promised for the CPU, never to be slower everywhere."""
    if device == "cpu":
        return case
    targets = tuple(target for target in case.targets if target.text.startswith("never slower"))
    case = replace(case, targets=targets)
    return replace(case, unavailable=lambda: "it runs on the host alone") if case.family in ON_HOST else case


def moved(inputs: Any, device: str) -> Any:
    """The inputs of a case with every tensor, mask and module in them on the device."""
    if device == "cpu":
        return inputs
    if isinstance(inputs, torch.Tensor | Mask):
        return inputs.to(device)
    if isinstance(inputs, torch.nn.Module):
        # A module moves in place, and others may share it.
        return deepcopy(inputs).to(device)
    if isinstance(inputs, SimpleNamespace):
        return SimpleNamespace(**moved(vars(inputs), device))
    if is_dataclass(inputs) and not isinstance(inputs, type):
        return replace(inputs, **{f.name: moved(getattr(inputs, f.name), device) for f in fields(inputs) if f.init})
    if isinstance(inputs, dict):
        return {key: moved(value, device) for key, value in inputs.items()}
    if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
        return type(inputs)(*(moved(value, device) for value in inputs))
    if isinstance(inputs, list | tuple):
        return type(inputs)(moved(value, device) for value in inputs)
    return inputs
