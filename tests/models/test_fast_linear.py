"""Linear layers of packed inference by oneDNN."""

import pytest
import torch
from torch import nn

import maskwise as mw
from maskwise.models import linear
from maskwise.ops.torch_private import onednn_linear
from tests.models.zoo import build

KEEP = torch.arange(40) < torch.tensor([40, 31, 7])[:, None]


@pytest.fixture
def calls(monkeypatch):
    """The shapes of what oneDNN computed, on any processor."""
    if onednn_linear is None:
        pytest.skip("this torch has no oneDNN")
    found = []

    def count(x, weight, bias):
        found.append(tuple(x.shape))
        return onednn_linear(x, weight, bias)

    monkeypatch.setattr(linear, "onednn_linear", count)
    monkeypatch.setattr(linear, "is_onednn_faster", lambda: True)
    return found


def test_a_packed_call_without_gradients_gives_the_same_by_onednn(calls):
    model = build("bert").eval()
    given = {"input_ids": torch.randint(3, 99, KEEP.shape), "attention_mask": KEEP.long()}
    with torch.no_grad():
        wanted = model(**given).last_hidden_state
        found = mw.unpad(model)(**given).last_hidden_state
        assert calls
        assert {shape[0] * shape[1] for shape in calls} == {78}
        torch.testing.assert_close(found[KEEP], wanted[KEEP], rtol=1e-4, atol=1e-5)
        calls.clear()
        with mw.force("padded"):
            model(**given)
        assert not calls
    model(**given).last_hidden_state.sum().backward()
    assert not calls


def test_encoders_of_torch_take_it_too_and_other_dtypes_do_not(calls):
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(*KEEP.shape, 32)
    for dtype in (torch.float32, torch.float64):
        mw.models.repad(mw.unpad(model.to(dtype)))
        with torch.no_grad():
            wanted = model(x.to(dtype), src_key_padding_mask=~KEEP)
            found = mw.unpad(model)(x.to(dtype), src_key_padding_mask=~KEEP)
        mw.models.repad(model)
        torch.testing.assert_close(found[KEEP], wanted[KEEP], rtol=1e-4, atol=1e-5)
        assert bool(calls) is (dtype is torch.float32)
        calls.clear()
