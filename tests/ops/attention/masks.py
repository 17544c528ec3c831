"""Masks of every kind for a call of given sizes, drawn by hypothesis."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from maskwise import Mask


def random_bits(*shape, density=0.5, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < density


def kinds(batch, heads, queries, keys, seed=0):
    """Name -> a mask as users would pass it. Some rows keep nothing, some batch entries too."""
    lengths = torch.randint(0, keys + 1, (batch,), generator=torch.Generator().manual_seed(seed)).tolist()
    by_length = Mask.from_lengths(lengths, max_len=keys)
    left = Mask.from_lengths(lengths, max_len=keys, side="left")
    ids = torch.arange(keys) // 3 - 1
    found = {
        "none": None,
        "lengths": by_length[:, None, None, :],
        "left padding": left[:, None, None, :],
        "keys with gaps": random_bits(batch, 1, 1, keys, seed=seed),
        "causal": Mask.causal(queries, keys)[None, None],
        "causal with a cache": Mask.causal(queries, keys, offset=2)[None, None],
        "window": Mask.window(queries, 2, 1, k=keys)[None, None],
        "lengths and window": by_length[:, None, None, :] & Mask.window(queries, 3, k=keys),
        "pairs": random_bits(batch, 1, queries, keys, seed=seed),
        "pairs of heads": random_bits(batch, heads, queries, keys, density=0.2, seed=seed),
        "heads": random_bits(heads, 1, keys, seed=seed),
        "lengths of heads": Mask.from_lengths(
            torch.randint(0, keys + 1, (heads, 1), generator=torch.Generator().manual_seed(seed)), max_len=keys
        ),
        "rows": random_bits(batch, 1, queries, 1, seed=seed),
        "a function": Mask.from_function(lambda i, j: (i + j) % 3 != 0, (queries, keys))[None, None],
        "nothing": Mask.none((batch, 1, 1, keys)),
        "everything": Mask.full((queries, keys))[None, None],
    }
    if queries == keys:
        found["segments"] = Mask.from_segments(ids.expand(batch, keys))[:, None]
        found["segments and causal"] = (Mask.from_segments(ids) & Mask.causal(keys))[None, None]
        found["scattered segments"] = Mask.from_segments(torch.arange(keys) % 3)[None, None]
        found["lengths both ways"] = by_length[:, None, None, :] & by_length.to_bool()[:, None, :, None]
    return found


KINDS = sorted(kinds(1, 1, 3, 3))

sizes = st.tuples(st.integers(1, 3), st.sampled_from([(1, 1), (2, 2), (4, 2)]), st.integers(1, 9), st.integers(1, 9))


def bits(mask, batch, heads, queries, keys):
    """The mask as bool (batch, heads, queries, keys)."""
    if mask is None:
        return torch.ones(batch, heads, queries, keys, dtype=torch.bool)
    found = mask.to_bool() if isinstance(mask, Mask) else mask
    return found.expand(batch, heads, queries, keys)
