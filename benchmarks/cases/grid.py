"""The standard grid: the shapes, densities and masks at which every function is measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.case import Case, Side, Target, at_least, at_most, never_slower
from benchmarks.cases.sides import Call, Masked, compiled, masked_inputs, torch_dtype, with_backward

__all__ = ["Measured", "grid"]

Prepare = Callable[[Masked], Call]


@dataclass(frozen=True)
class Measured:
    """One function and what it is measured against."""

    family: str
    name: str
    ours: Prepare
    """Takes ``i.keep``, a bool tensor: what users of the idioms hold."""
    idiom: Prepare
    """The plain idiom, at its best."""
    masked: Prepare | None = None
    """torch.masked's function, where there is one."""
    floor: Prepare | None = None
    """The unmasked function of torch."""
    written: float = 0.0
    """Bytes written for each element read, at least."""
    gradient: bool = True
    compiles: bool = True
    targets: tuple[Target, ...] = (never_slower(),)
    at_floor: float | None = None
    """How many times the floor's time the forward pass may take, where a figure is promised."""
    backward_factor: float | None = None
    """How many times faster than the idiom forward and backward together must be, where a figure is promised."""
    setup: Callable[..., Masked] = masked_inputs

    def sides(self, *, compile: bool) -> tuple[Side, ...]:
        """Ours, the idiom, torch.masked, the compiled idiom, the floor: as far as they exist."""
        found = [Side(f"mw.{self.name}", self.ours, kind="ours"), Side("idiom", self.idiom)]
        if self.masked is not None:
            found.append(Side(f"torch.masked.{self.name}", self.masked))
        if compile and self.compiles:
            found.append(compiled("idiom", self.idiom))
        if self.floor is not None:
            found.append(Side("unmasked", self.floor, kind="floor"))
        return tuple(found)


def grid(f: Measured) -> tuple[Case, ...]:
    """Return one function's cases: three densities, dim 0, a broadcast mask, three dims, tiny inputs, gradients."""

    def moved(case: Case) -> int:
        # Every value and every byte of the mask is read at least once.
        return round(math.prod(case.shape) * (torch_dtype(case).itemsize + 1 + f.written))

    def broadcast(case: Case) -> Masked:
        return f.setup(case, mask_shape=(1, *case.shape[1:]))

    at_floor = () if f.at_floor is None else (at_most(f.at_floor, "unmasked"),)
    large = Case(
        f.family,
        f.name,
        "",
        f.setup,
        f.sides(compile=True),
        (4096, 4096),
        0.5,
        -1,
        targets=f.targets,
        moved_bytes=moved,
        relative_tolerance=1e-3,
        # Of values about 1 that cancel to nearly 0, what is left is rounding.
        absolute_tolerance=1e-5,
    )
    tiny = replace(
        large,
        shape=(4, 8),
        moved_bytes=None,
        sides=f.sides(compile=False),
        targets=(at_most(1.5, "idiom"), never_slower()),
    )
    cases = [
        *(
            replace(
                large, variant=f"4096x4096 dim=-1 keep={round(100 * d)}%", density=d, targets=(*f.targets, *at_floor)
            )
            for d in (0.1, 0.5, 0.9)
        ),
        replace(large, variant="4096x4096 dim=0 keep=50%", dim=0),
        replace(large, variant="4096x4096 dim=-1 mask=1x4096", setup=broadcast),
        replace(large, variant="64x512x256 dim=1 keep=50%", shape=(64, 512, 256), dim=1),
        replace(tiny, variant="4x8"),
    ]
    if f.gradient:
        backward = tuple(with_backward(side) for side in f.sides(compile=False))
        faster = never_slower() if f.backward_factor is None else at_least(f.backward_factor, "idiom")
        more: dict[str, Any] = {"sides": backward, "moved_bytes": None}
        cases += [
            replace(large, variant="4096x4096 forward+backward", targets=(faster,), **more),
            replace(tiny, variant="4x8 forward+backward", **{**more, "targets": (never_slower(),)}),
        ]
    return tuple(cases)
