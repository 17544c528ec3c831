"""New layers in the place of old ones, as far as the model around them takes them."""

from __future__ import annotations

from torch import nn

from maskwise.models.compress.choosing import DENSE, Choice, Swap
from maskwise.models.compress.copying import put
from maskwise.models.compress.example import Example
from maskwise.models.compress.fast_paths import restore_fast_paths, turn_off_fast_paths
from maskwise.models.compress.guarding import guard, unguard

__all__ = ["Swapped"]


class Swapped:
    """A model with as many of the swaps as it runs with.

    Args:
        plain: the model, which is changed.
        before: the model as it was.
        call: what it must run.
        swaps: what takes whose place.
    """

    def __init__(self, plain: nn.Module, before: nn.Module, call: Example, swaps: list[Swap]) -> None:
        self.names = {module: name for name, module in plain.named_modules()}
        self.model, self._before = plain, before
        #: What became of layers; those that are not here are what they would be by themselves.
        self.choices: dict[nn.Module, Choice] = {}
        self.is_as_it_was = False
        self._swaps = swaps
        self._apply(swaps)
        problem = self._problem(call)
        if problem is None:
            return
        # Some layer is not only called. Which, is found by trying one by one.
        self._revert(swaps)
        good = []
        for swap in swaps:
            self._apply([swap])
            problem = self._problem(call)
            self._revert([swap])
            if problem is None:
                good.append(swap)
            else:
                self._refuse(swap, f"the model does more than call it: {problem}")
        self._swaps = good
        self._apply(good)

    def undo(self, reason: str) -> None:
        """Put the old layers back."""
        self._revert(self._swaps)
        for swap in self._swaps:
            self._refuse(swap, reason)
        self._swaps = []

    def _problem(self, call: Example) -> str | None:
        try:
            call.run(self.model)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _apply(self, swaps: list[Swap]) -> None:
        for swap in swaps:
            for old, choice in swap.choices.items():
                self.model = put(self.model, old, choice.module)
                self.choices[old] = choice
            for other, new in swap.others.items():
                self.model = put(self.model, other, new)
            if swap.owner is not None:
                self.model = guard(self.model, swap.owner, [choice.module for choice in swap.choices.values()])
        self._see_to_fast_paths()

    def _revert(self, swaps: list[Swap]) -> None:
        for swap in swaps:
            if swap.owner is not None:
                self.model = unguard(self.model, swap.owner, [choice.module for choice in swap.choices.values()])
            for old, choice in swap.choices.items():
                self.model = put(self.model, choice.module, old)
                del self.choices[old]
            for other, new in swap.others.items():
                self.model = put(self.model, new, other)
        self._see_to_fast_paths()

    def _refuse(self, swap: Swap, reason: str) -> None:
        for old, choice in swap.choices.items():
            self.choices[old] = Choice(DENSE, old, f"{choice.kind} was faster, but {reason}", None, None)

    def _see_to_fast_paths(self) -> None:
        restore_fast_paths(self.model, self._before)
        turn_off_fast_paths(self.model)
