"""Whether a model gives the same packed as padded: asked of the model itself, before anyone relies on it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from maskwise.models.adapter import UnsupportedModelError
from maskwise.models.hugging_face.frames import Frame, enter, leave
from maskwise.models.hugging_face.inputs import takes

__all__ = ["probe"]

LENGTH = 12
FLOAT32_TOLERANCE = 1e-3
"""Relative to the largest output. Packing moves float32 sums by 1e-6; a wrong mask or position moves them by 1e-1."""
HALF_TOLERANCE = 5e-2


def probe(base: Any, *, causal: bool) -> bool:
    """Compare a small batch, right-padded, left-padded, with a hole and full.

    Returns:
        Whether a first token that is dropped comes out the same too.

    Raises:
        UnsupportedModelError: kept tokens do not come out the same.
    """
    embedding = base.get_input_embeddings()
    device = embedding.weight.device
    if device.type == "meta":
        return not causal
    keep = _masks(device)
    generator = torch.Generator().manual_seed(0)
    # Ids from the upper half: special tokens, padding among them, have the first ids or few at the very end.
    tokens = embedding.num_embeddings
    ids = torch.randint(tokens // 2, max(tokens // 2 + 1, tokens - 8), keep.shape, generator=generator).to(device)
    if isinstance(mask_token := getattr(base.config, "mask_token_id", None), int) and 0 <= mask_token < tokens:
        # Some models weigh a whole row by how many of its tokens are masked for training.
        ids[0, 2] = mask_token
    named: dict[str, Any] = {"input_ids": ids, "attention_mask": keep.long()}
    if takes(base, "use_cache"):
        named["use_cache"] = False
    training = {module: module.training for module in base.modules()}
    base.eval()
    try:
        with torch.no_grad():
            outer = nn.Identity()
            enter(Frame(outer, padded="a probe"))
            try:
                padded = _last(base(**named))
            finally:
                leave(outer)
            packed = _last(base(**named))
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(f"a small packed batch raised {type(error).__name__}: {error}") from error
    finally:
        for module, mode in training.items():
            module.training = mode
    if (difference := _difference(padded[keep], packed[keep])) > _limit(padded.dtype):
        raise UnsupportedModelError(
            f"its outputs change when tokens are packed, by {difference:.0e} of the largest: "
            "something other than attention looks at more than one token"
        )
    return not causal and _difference(padded[:, 0], packed[:, 0]) <= _limit(padded.dtype)


def _masks(device: torch.device) -> Tensor:
    keep = torch.ones(4, LENGTH, dtype=torch.bool, device=device)
    keep[0, 7:] = False
    keep[1, :5] = False
    keep[2, 4:6] = False
    return keep


def _last(output: Any) -> Tensor:
    last: Tensor = output[0]
    return last


def _difference(padded: Tensor, packed: Tensor) -> float:
    """The largest difference, as a part of the largest value."""
    if padded.shape != packed.shape:
        return float("inf")
    found = (padded.float() - packed.float()).abs().max() / padded.float().abs().max().clamp_min(1e-12)
    return float(torch.nan_to_num(found, nan=torch.inf))


def _limit(dtype: torch.dtype) -> float:
    return FLOAT32_TOLERANCE if dtype in {torch.float32, torch.float64} else HALF_TOLERANCE
