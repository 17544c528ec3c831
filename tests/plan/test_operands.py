"""What dispatch knows of a mask: whether it reaches kernels as intervals or as bits."""

import pytest
import torch

import maskwise as mw
from maskwise.plan import dispatch

LENGTHS = torch.tensor([3, 0, 5])
INTERVALS = {
    "lengths": mw.Mask.from_lengths(LENGTHS, 5),
    "left lengths": mw.Mask.from_lengths(LENGTHS, 5, side="left"),
    "causal": mw.Mask.causal(5),
    "window": mw.Mask.window(5, left=1),
    "full": mw.Mask.full((3, 5)),
    "an AND": mw.Mask.causal(5) & mw.Mask.window(5, left=2),
    "rows, by unsqueeze": mw.Mask.from_lengths(LENGTHS, 5)[..., None],
    "heads, by unsqueeze": mw.Mask.from_lengths(LENGTHS, 5)[:, None, None, :],
    "transposed": mw.Mask.causal(5).T,
    "expanded": mw.Mask.from_lengths(LENGTHS, 5)[:, None].expand(3, 2, 5),
}
BITS = {
    "a bool tensor": mw.Mask(torch.rand(3, 5) < 0.5),
    "indices": mw.Mask.from_indices([1, 3], 5),
    "every second position": mw.Mask.from_lengths(LENGTHS, 5)[:, ::2],
    "one position of each row": mw.Mask.from_lengths(LENGTHS, 5)[:, 2],
    "an OR": mw.Mask.causal(5) | mw.Mask.from_indices([4], 5),
}


@pytest.mark.parametrize(
    ("mask", "operand"),
    [pytest.param(mask, "intervals", id=name) for name, mask in INTERVALS.items()]
    + [pytest.param(mask, "bits", id=name) for name, mask in BITS.items()],
)
def test_a_mask_knows_its_operand_and_an_interval_mask_keeps_one_run_along_a_dim(mask, operand):
    assert mask.operand == operand
    if operand == "intervals":
        bits = mask.to_bool().int()
        starts = [bits.diff(dim=dim, prepend=torch.zeros_like(bits.narrow(dim, 0, 1))).eq(1).sum(dim)
                  for dim in range(bits.dim())]  # fmt: skip
        assert any(bool((runs <= 1).all()) for runs in starts)


@pytest.mark.parametrize(
    "call",
    [lambda x, mask: mw.sum(x, mask, -1), lambda x, mask: mw.apply(torch.exp, x, mask=mask), mw.pack],
    ids=["sum", "apply", "pack"],
)
def test_the_facts_of_a_call_say_which_operand_its_mask_is(call):
    dispatch.invalidate()
    x = torch.ones(3, 5)
    for mask in (mw.Mask.from_lengths(LENGTHS, 5), mw.Mask(torch.ones(3, 5, dtype=torch.bool))):
        call(x, mask)
    assert {decision.facts.mask for decision in dispatch.cache.values()} == {"intervals", "bits"}
