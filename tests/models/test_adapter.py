import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import maskwise as mw
from maskwise.models import Adapter, adapters, register, unregister

SCRIPT = """
import sys
sys.modules["transformers"] = None  # an import of it raises
import torch, maskwise as mw
layer = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
model = mw.unpad(torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))
padding = torch.tensor([[False, False, True]])
print(model(torch.ones(1, 3, 8), src_key_padding_mask=padding)[0, 2].tolist() == [0.0] * 8)
"""


def test_nothing_imports_transformers_before_a_model_of_it_is_there():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "True"


class Doubled:
    """Serves nn.Linear, by doubling: what it does is easy to see."""

    name = "doubled"

    def serves(self, module):
        return isinstance(module, nn.Linear) and module.bias is None, "it has a bias" * isinstance(module, nn.Linear)

    def install(self, module):
        module.weight.data.mul_(2)

    def undo(self, module):
        module.weight.data.div_(2)


@pytest.fixture
def doubled():
    adapter = Doubled()
    register(adapter)
    yield adapter
    unregister("doubled")


def test_a_registered_adapter_serves_every_part_it_knows_and_undoes_it(doubled):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False))
    before = [p.clone() for p in model.parameters()]
    mw.unpad(model)
    assert all(torch.equal(p, 2 * old) for p, old in zip(model.parameters(), before, strict=True))
    mw.models.repad(model)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_reason_is_shown_with_the_place_it_is_about(doubled):
    with pytest.raises(mw.models.UnsupportedModelError, match=r"(?s)this Sequential\.\n  0: doubled: it has a bias"):
        mw.unpad(nn.Sequential(nn.Linear(2, 2)))


class Objecting(Doubled):
    """Objects to a model of which it serves parts."""

    name = "objecting"

    def enclose(self, module):
        raise mw.models.UnsupportedModelError("it reads dropped tokens")


def test_a_refusal_lists_the_reason_of_the_model_before_those_of_its_parts_whichever_was_found_first():
    register(Objecting())
    try:
        with pytest.raises(mw.models.UnsupportedModelError) as refused:
            mw.unpad(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False)))
    finally:
        unregister("objecting")
    listed = str(refused.value).splitlines()[1:3]
    assert listed == ["  Sequential: objecting: it reads dropped tokens", "  0: objecting: it has a bias"]


def test_the_latest_adapter_is_asked_first(doubled):
    assert next(iter(adapters())) == "doubled"


def test_an_adapter_must_be_whole_and_have_a_name_of_its_own(doubled):
    assert isinstance(doubled, Adapter)
    with pytest.raises(ValueError, match="register: `adapter` must have a name of its own, got doubled"):
        register(Doubled())
    with pytest.raises(ValueError, match=r"must have name, serves, install, undo, got no name, serves"):
        register(object())
    with pytest.raises(ValueError, match="unregister: `name` must be one of"):
        unregister("nobody")


# -- the report --------------------------------------------------------------------------------------------------------
class Tagger(nn.Module):
    """Embeddings, an encoder, attention that appends a key, and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(8, 2, add_zero_attn=True, batch_first=True)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


APPENDS = "nn.MultiheadAttention: it appends a key to each sequence (add_bias_kv or add_zero_attn)"
UNKNOWN = "no adapter knows a module of this kind"


def unpadded_tagger():
    with pytest.warns(mw.models.PaddedRunWarning, match="appends a key"):
        return mw.unpad(Tagger())


def test_the_report_lists_what_is_served_and_why_the_rest_is_not():
    report = mw.models.report(unpadded_tagger())
    assert [(row.name, row.kind, row.adapter, row.reason) for row in report] == [
        ("embedding", "Embedding", None, UNKNOWN),
        ("encoder", "TransformerEncoderLayer", "nn.TransformerEncoderLayer", ""),
        ("attention", "MultiheadAttention", "nn.MultiheadAttention", ""),
        ("cross", "MultiheadAttention", None, APPENDS),
        ("head", "Sequential", None, UNKNOWN),
    ]
    assert not any(row.padded for row in report)
    assert (report.adapted, len(report)) == (2, 5)
    assert json.loads(report.to_json())[3]["reason"] == APPENDS
    text = " ".join(str(report).split())
    assert "2 of 5 parts" in text
    assert "appends a key" in text


def test_the_report_lists_why_calls_ran_padded_and_what_to_change():
    model, x = unpadded_tagger(), torch.ones(2, 3, 8)
    padding = mw.Mask.from_lengths([3, 1]).to_key_padding()
    assert mw.models.report(model)["attention"].padded == ()
    with pytest.warns(mw.models.PaddedRunWarning):
        model.attention(x, x, x, key_padding_mask=padding)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found = mw.models.report(each)["attention"].padded
        assert found == (("the attention weights are requested", "need_weights=False"),)


def test_repad_leaves_nothing_of_the_report():
    model = mw.models.repad(unpadded_tagger())
    assert not [name for module in model.modules() for name in vars(module) if "maskwise" in name]
    with pytest.raises(ValueError, match=r"report: `model` must be unpadded, got Tagger. Hint: mw.unpad\(model\)."):
        mw.models.report(model)


def test_a_model_that_is_served_as_a_whole_is_one_row(doubled):
    (row,) = mw.models.report(mw.unpad(nn.Linear(2, 2, bias=False)))
    assert (row.name, row.kind, row.adapter) == ("", "Linear", "doubled")
