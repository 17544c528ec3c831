"""A mask that is given, and stays."""

from __future__ import annotations

import torch
from torch import Tensor

from maskwise.errors import DtypeError, say
from maskwise.mask import Mask
from maskwise.nn.gates.fitting import expanded
from maskwise.nn.gates.gate import Gate, check_device, check_weight
from maskwise.ops.arguments import MaskLike

__all__ = ["Binary"]


class Binary(Gate):
    """Keep what a given mask keeps.

    >>> import torch, maskwise as mw
    >>> gate = mw.nn.gates.Binary(mw.Mask.from_lengths([1, 2], max_len=3))
    >>> gate(torch.ones(2, 3))
    tensor([[1., 0., 0.],
            [1., 1., 0.]])

    Attached to a layer it holds the mask in weight's full shape, under ``kept`` in the state_dict.

    Args:
        mask: a Mask or a bool tensor that broadcasts to the weight; True means keep. The weight of
            ``nn.Linear(10, 5)`` is (5, 10).

    Raises:
        DtypeError: the mask is neither a Mask nor a bool tensor.
        ShapeError: the mask does not broadcast to the weight; the hint says what would.
    """

    kept: Tensor

    def __init__(self, mask: MaskLike) -> None:
        super().__init__()
        if not isinstance(mask, Mask) and not (isinstance(mask, Tensor) and mask.dtype is torch.bool):
            got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            hint = "Binary(mask != 0)" if isinstance(mask, Tensor) else "Binary(torch.as_tensor(mask).bool())"
            raise DtypeError(say("Binary", "mask", must="be a Mask or a bool tensor", got=got, hint=hint))
        # The gate owns its topology: a mask is a value, and what it was made of may be written into.
        bits = mask.to_bool() if isinstance(mask, Mask) else mask
        self.register_buffer("kept", bits.detach().clone())

    def bits(self, weight: Tensor) -> Tensor:
        """What is kept, of weight's shape."""
        return self.kept if self.kept.shape == weight.shape else expanded("Binary", "mask", self.kept, weight)

    @property
    def held(self) -> Tensor | None:
        """The mask, once it has weight's shape."""
        return self.kept if self.bound else None

    def bind(self, weight: Tensor) -> None:
        """Check that the mask fits, and hold it in weight's shape."""
        check_weight("Binary", weight)
        check_device("Binary", "mask", self.kept, weight)
        kept = expanded("Binary", "mask", self.kept, weight)
        super().bind(weight)
        self.kept = kept

    def extra_repr(self) -> str:
        """Shape and density, for print."""
        return f"{tuple(self.kept.shape)}, density={Mask(self.kept).density:.3g}"
