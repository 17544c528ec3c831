"""Other values for what is dropped: token ids, large values, NaN, more padding, other sequences, masked weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from maskwise.models.audit.batch import IGNORED, LABELS, LENGTHS, SEGMENTS, Batch, Embedded, Tokens
from maskwise.models.audit.positions import Positions
from maskwise.nn import MaskedConv2d, MaskedLinear
from maskwise.nn.gates import Gate

__all__ = ["Probe", "change_masked_weights", "probes"]

#: The large value, as a multiple of the largest that is kept; half precision overflows early.
LARGE = {torch.float16: 8.0, torch.bfloat16: 64.0}
#: How many positions are added at most: of the output, for layers with strides.
WIDER = 4


@dataclass(frozen=True)
class Probe:
    """A batch that differs from another in what is dropped alone, and the positions that must not notice."""

    kind: str
    before: Batch
    after: Batch
    checked: Tensor
    #: The same positions of ``after``, where it has more.
    checked_after: Tensor
    #: The same probe without another value in any mask that the model makes of token ids; None where it makes none.
    by_embedding: Probe | None = None

    def positions(self) -> tuple[Positions, Positions]:
        """For the two runs."""
        return Positions(self.checked), Positions(self.checked_after)

    @property
    def across_shapes(self) -> bool:
        """Whether the two calls have different shapes."""
        return self.checked.shape != self.checked_after.shape


def probes(batch: Batch, tokens: Tokens, stride: int = 1) -> list[Probe]:
    """The probes of one mask, in order: what leaks finite values leaks NaN and more padding too."""
    found: list[Probe] = []
    dropped = ~tokens.keep
    if bool(dropped.any()) and bool(tokens.keep.any()):
        changed = batch.with_values(_replaced(batch, tokens, dropped, "large"))
        embedded = _embedded(batch, tokens, changed)
        found.append(Probe("values", batch, changed, tokens.keep, tokens.keep, embedded))
        if (wider := _widened(batch, tokens, stride)) is not None:
            found.append(wider)
        floats = [name for name in tokens.inputs if batch.values[name].is_floating_point()]
        if floats:
            poisoned = batch.with_values(_replaced(batch, tokens, dropped, "nan"))
            found.append(Probe("nan", batch, poisoned, tokens.keep, tokens.keep))
    if tokens.segments is not None:
        # Even sequences must not notice odd ones, nor the other way round.
        for parity in (0, 1):
            others, own = tokens.keep & (tokens.segments % 2 != parity), tokens.keep & (tokens.segments % 2 == parity)
            if bool(others.any()) and bool(own.any()):
                changed = batch.with_values(_replaced(batch, tokens, others, "other", labels=False))
                found.append(Probe("packed", batch, changed, own, own))
    return found


def _replaced(batch: Batch, tokens: Tokens, where: Tensor, how: str, *, labels: bool = True) -> dict[str, Tensor]:
    """The inputs with other values at some positions."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for name, dim in tokens.inputs.items():
        x: Tensor = batch.values[name]
        if name in ("position_ids", *SEGMENTS, *LENGTHS) or (name in LABELS and not labels):
            continue
        rows = x.detach().clone().movedim(dim, 1)
        kept = rows[tokens.keep.to(x.device)]
        at = where.to(x.device)
        old = rows[at]
        if x.is_floating_point():
            scale = float(kept.abs().nan_to_num(0.0, 0.0, 0.0).max()) + 1.0
            large = scale * LARGE.get(x.dtype, 1e3)
            signs = torch.randn(old.shape, generator=generator).to(x.device, x.dtype)
            new = {"nan": torch.full_like(old, torch.nan), "large": signs * large, "other": signs * scale}[how]
        else:
            pool = kept.flatten()
            pool = pool[pool != IGNORED]
            if not pool.numel():
                continue
            pick = torch.randint(len(pool), old.shape, generator=generator).to(x.device)
            values = torch.unique(pool)
            # Another one than before, where there is one.
            after = values[(torch.searchsorted(values, pool[pick]) + 1) % len(values)]
            new = torch.where(pool[pick] == old, after, pool[pick])
            new = torch.where(old == IGNORED, old, new)
        rows[at] = new.to(x.dtype)
        found[name] = rows.movedim(1, dim)
    return found


def _embedded(batch: Batch, tokens: Tokens, changed: Batch) -> Probe | None:
    """Other embeddings in the place of other ids, where one id is at all dropped positions and at no kept one."""
    marked: dict[str, Tensor] = {}
    for name, dim in tokens.inputs.items():
        ids = batch.values[name]
        if name in (*LABELS, *SEGMENTS, *LENGTHS, "position_ids") or ids.is_floating_point() or ids.dim() != 2:
            continue
        keep = tokens.keep.to(ids.device)
        padding = ids[~keep]
        if dim == 1 and bool((padding == padding[0]).all()) and not bool((ids[keep] == padding[0]).any()):
            marked[name] = ids
    if not marked:
        return None
    after = replace(changed.with_values(marked), embedded=Embedded(tuple(marked.values()), tokens.keep))
    return Probe("values", batch, after, tokens.keep, tokens.keep)


def _widened(batch: Batch, tokens: Tokens, stride: int) -> Probe | None:
    """A batch with more padding on the side where it has padding: outputs must not depend on its amount."""
    keep = tokens.keep
    length = keep.shape[1]
    sides = [side for side, column in (("right", -1), ("left", 0)) if not bool(keep[:, column].all())]
    if tokens.segments is not None or len(sides) != 1:
        return None
    dropped = ~keep
    more = min(WIDER * stride, length)
    pads = (0, more) if sides[0] == "right" else (more, 0)
    found: dict[str, Tensor] = {}
    for name, given in batch.tensors():
        x = given
        if x.dim() < 2 or length not in x.shape[1:] or x.shape[0] != keep.shape[0]:
            continue
        dims = [dim for dim in range(1, x.dim()) if x.shape[dim] == length]
        # A mask of pairs grows in both dims; of inputs the first such dim has the positions.
        for dim in dims if "mask" in name else dims[:1]:
            x = _padded(x, dim, pads, dropped)
        found[name] = x
    checked = F.pad(keep, pads)
    return Probe("amount", batch, batch.with_values(found), keep, checked)


def _padded(x: Tensor, dim: int, pads: tuple[int, int], dropped: Tensor) -> Tensor:
    """More of what stands at the outermost position of a row that is dropped there."""
    edge = -1 if pads[1] else 0
    row = int(dropped[:, edge].nonzero()[0])
    filler = x.select(dim, edge)[row]
    size = list(x.shape)
    size[dim] = sum(pads)
    block = filler.unsqueeze(0).unsqueeze(dim).expand(size)
    return torch.cat([x, block] if pads[1] else [block, x], dim)


def change_masked_weights(model: nn.Module) -> list[str]:
    """Write other values into the weights that masks drop, in place; returns the names of their modules."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, MaskedLinear | MaskedConv2d):
            found += [name] if _overwrite(module.weight, module.mask.to_bool()) else []
        elif parametrize.is_parametrized(module):
            for chain in module.parametrizations.values():
                gates = [step for step in chain if isinstance(step, Gate)]
                if len(gates) == 1 == len(chain):
                    found += [name] if _overwrite(chain.original, gates[0].bits(chain.original)) else []
        for each, mask in list(module.named_buffers(recurse=False)):
            original = module._parameters.get(each.removesuffix("_mask") + "_orig") if each.endswith("_mask") else None
            if original is not None and original.shape == mask.shape:
                found += [name] if _overwrite(original, mask != 0) else []
    return found


@torch.no_grad()
def _overwrite(weight: Tensor, keep: Tensor) -> bool:
    if bool(keep.all()):
        return False
    # Smaller than what is kept: gates that choose by magnitude choose the same again.
    kept = weight[keep].abs()
    scale = float(kept.min()) / 2 if kept.numel() else 1.0
    weight.copy_(torch.where(keep, weight, -weight.sign().where(weight != 0, torch.ones_like(weight)) * scale))
    return True
