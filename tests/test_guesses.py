"""What is tried first and is not there leads to what is."""

import re

import pytest

import maskwise as mw
from maskwise.guesses import _GUESSES, instead_of


def hint(name):
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'. Hint: ") as error:
        getattr(mw, name)
    return str(error.value).partition("Hint: ")[2]


@pytest.mark.parametrize("name", _GUESSES)
def test_a_guess_is_no_public_name_and_its_hint_names_what_exists(name):
    assert name not in mw.__all__
    text = instead_of(name, mw.__all__)
    for path in re.findall(r"maskwise((?:\.\w+)+)", text):
        found = mw
        for part in path.strip(".").split("."):
            found = getattr(found, part)
    assert "maskwise." in hint(name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("masked_fill", "maskwise.fill(x, mask, value) for x.masked_fill(~mask, value)."),
        ("masked_mean", "maskwise.mean(x, mask)."),
        ("masked_softmax", "maskwise.softmax(x, mask, dim=-1)."),
        ("masked_cross_entropy", "maskwise.loss(F.cross_entropy, input, target, mask)."),
        ("cat", "maskwise.Mask.cat([a, b], dim) for masks, torch.cat for tensors."),
        ("einsum", "torch.einsum(equation, maskwise.mul(a, mask), b)."),
        ("atention", "maskwise.attention."),
        ("xyzzy", "dir(maskwise)."),
    ],
)
def test_the_hint_can_be_pasted(name, expected):
    assert hint(name) == expected
