"""Benchmarks on a GPU: whether there is one, which targets count there, and how inputs get there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.case import Case
from maskwise.mask import Mask
from maskwise.ops.gpu.launch import recording
from maskwise.plan import calibration

__all__ = ["for_device", "moved", "roofline", "why_not"]

#: What runs on the host alone.
ON_HOST = ("startup", "distributed", "serving", "audit")


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


#: Seconds that a kernel takes at least.
SHORTEST = 2e-6


def roofline(call: Callable[[], object], device: str) -> float | None:
    """The seconds that the launches of a call take at least: the bytes of each, at the bandwidth of the device.

    None where the call launches none of our kernels: what torch's own kernels move is not known here.
    """
    with recording(runs=True) as launches:
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
    if not launches:
        return None
    speed = bandwidth(device)
    return sum(max(SHORTEST, launch.moved / speed) for launch in launches)


def bandwidth(device: str) -> float:
    """Bytes a second that the memory of a device moves at most: by its clock and width, or as the cost model has it."""
    properties = torch.cuda.get_device_properties(device)
    kilohertz, bits = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    # Two transfers a clock.
    return 2e3 * kilohertz * bits / 8 or calibration.rates_for("cuda").streamed * 1e6


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
    if isinstance(inputs, torch.Tensor | Mask | torch.nn.Module):
        return inputs.to(device)
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
