import copy
import json
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import maskwise as mw
from maskwise.errors import ArgumentError, DtypeError
from maskwise.models import CompressionError
from maskwise.models.compress import LiveConv2d, LiveLinear
from maskwise.models.compress.candidates import Times
from tests.models.compress.networks import ReadsWeight, drop, feed_forward

# Sums of some hundred float32 numbers near 1 in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def run(model, x):
    with torch.no_grad():
        return model(x)


@pytest.mark.parametrize("how", ["attach", "masked", "sparse", "prune", "zeros"])
def test_every_way_to_drop_weights_gives_the_same_sparse_layer(how, prefer):
    prefer("sparse")
    linear = nn.Linear(64, 32)
    keep = torch.rand(32, 64) < 0.2
    expected = copy.deepcopy(linear)
    with torch.no_grad():
        expected.weight.mul_(keep)
    layer = {
        "attach": lambda: mw.nn.attach(linear, mw.nn.gates.Binary(keep)),
        "masked": lambda: mw.nn.MaskedLinear.from_linear(linear, keep),
        "sparse": lambda: mw.nn.SparseLinear.from_linear(linear, keep),
        "prune": lambda: prune.custom_from_mask(linear, "weight", keep),
        "zeros": lambda: copy.deepcopy(expected),
    }[how]()
    x = torch.randn(5, 64)
    model, report = mw.compress(nn.Sequential(layer, nn.ReLU()), x)
    assert type(model[0]) is mw.nn.SparseLinear
    assert torch.equal(model[0].to_dense(), expected.weight)
    torch.testing.assert_close(run(model, x), run(expected, x).relu(), **CLOSE)
    assert report["0"].after.parameters == int(keep.sum()) + 32


@pytest.mark.parametrize(("block", "name"), [((4, 1), "sparse 4x1"), ((16, 16), "sparse 16x16")])
def test_a_pattern_of_blocks_becomes_blocks(block, name, prefer):
    prefer(name)
    layer = mw.nn.MaskedLinear(64, 64, gate=mw.nn.gates.Block(block, 0.25))
    with torch.no_grad():
        # A kept weight that is 0 by chance leaves its block whole.
        layer.weight[tuple(layer.mask.to_bool().nonzero()[0])] = 0.0
    x = torch.randn(5, 64)
    model, report = mw.compress(layer, x)
    assert model.block == block
    assert report[""].after.kind == name
    torch.testing.assert_close(run(model, x), run(layer.eval(), x), **CLOSE)


def test_no_blocks_are_tried_where_they_would_be_mostly_empty(prefer):
    prefer("sparse 16x16", "sparse 4x1", "sparse")
    model, _ = mw.compress(drop(nn.Linear(64, 64), 0.1), torch.randn(5, 64))
    assert model.block == (1, 1)


def test_dead_inputs_and_outputs_of_a_single_layer_are_removed(prefer):
    prefer("live units")
    layer = nn.Linear(8, 6)
    with torch.no_grad():
        layer.weight[2:] = 0
        layer.weight[:, 5:] = 0
    x = torch.randn(2, 3, 8)
    model, report = mw.compress(nn.Sequential(layer), x)
    assert type(model[0]) is LiveLinear
    assert model[0].small.weight.shape == (2, 5)
    torch.testing.assert_close(run(model, x), run(layer, x), **CLOSE)
    assert report["0"].before.flops == 2 * 48 * 6
    assert report["0"].after.flops == 2 * 10 * 6


def test_dead_channels_of_a_single_convolution_are_removed(prefer):
    prefer("live units")
    layer = nn.Conv2d(4, 6, 3, stride=2, padding=1)
    with torch.no_grad():
        layer.weight[2:] = 0
        layer.weight[:, 1] = 0
    x = torch.randn(2, 4, 7, 7)
    model, _ = mw.compress(layer, x)
    assert type(model) is LiveConv2d
    assert model.small.weight.shape == (2, 3, 3, 3)
    torch.testing.assert_close(run(model, x), run(layer, x), **CLOSE)


def test_a_layer_that_is_faster_dense_stays_so_and_says_why(prefer):
    prefer()
    model, report = mw.compress(feed_forward(), torch.randn(4, 256))
    assert [type(model[i]) for i in (0, 2)] == [nn.Linear, nn.Linear]
    assert "sparse took 99.00 × as long" in report["0"].reason


def test_a_layer_of_which_nothing_is_dropped_is_left_alone():
    model, report = mw.compress(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4))
    assert report["0"].reason == "nothing is dropped"
    assert report["0"].before == report["0"].after
    assert type(model[0]) is nn.Linear


def test_the_original_is_not_changed_and_its_mode_is_kept(prefer):
    prefer("sparse")
    model = nn.Sequential(mw.nn.attach(nn.Linear(32, 32), mw.nn.gates.HardConcrete()), nn.Dropout(0.5)).train()
    before = copy.deepcopy(model.state_dict())
    compressed, _ = mw.compress(model, torch.randn(3, 32))
    assert model.training
    assert not compressed.training
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_what_other_gated_modules_are_left_with_is_their_effective_weight():
    model = nn.LSTM(8, 8)
    mw.nn.attach(model, mw.nn.gates.TopK(0.5), name="weight_hh_l0")
    x = torch.randn(4, 2, 8)
    compressed, report = mw.compress(model, x)
    assert torch.equal(compressed(x)[0], model(x)[0])
    assert int((compressed.weight_hh_l0 == 0).sum()) == 128
    assert report[""].reason == "there is no other form of LSTM"


def test_a_layer_with_hooks_stays_and_its_hooks_run(prefer):
    prefer("sparse")
    model, seen = feed_forward(), []
    model[0].register_forward_hook(lambda module, args, out: seen.append(tuple(module.weight.shape)))
    compressed, report = mw.compress(model, torch.randn(4, 256))
    assert report["0"].reason == "it has hooks, which may read its weight"
    assert type(compressed[2]) is mw.nn.SparseLinear
    seen.clear()
    run(compressed, torch.randn(4, 256))
    assert seen == [(512, 256)]


def test_tied_weights_stay_tied(prefer):
    prefer("sparse")
    model = nn.Sequential(drop(nn.Linear(16, 16), 0.2), nn.ReLU(), nn.Linear(16, 16))
    model[2].weight = model[0].weight
    compressed, report = mw.compress(model, torch.randn(4, 16))
    assert compressed[0].weight is compressed[2].weight
    assert report["0"].reason == "its weight or its bias is shared with another layer"


@pytest.mark.parametrize("how", ["attach", "prune"])
def test_a_gated_weight_that_is_tied_to_an_embedding_is_compressed_and_the_embedding_stays(how, prefer):
    prefer("sparse")
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 50)).eval()
    model[1].weight = model[0].weight
    keep = torch.rand(50, 32) < 0.2
    dense = model[0].weight.detach().clone()
    mw.nn.attach(model[1], mw.nn.gates.Binary(keep)) if how == "attach" else prune.custom_from_mask(
        model[1], "weight", keep
    )
    x = torch.arange(50)
    compressed, _ = mw.compress(model, x)
    assert type(compressed[1]) is mw.nn.SparseLinear
    assert torch.equal(compressed[0].weight, dense)
    torch.testing.assert_close(run(compressed, x), run(model, x), **CLOSE)


def test_a_module_in_two_places_is_replaced_in_both(prefer):
    prefer("sparse")
    layer = drop(nn.Linear(16, 16), 0.2)
    x = torch.randn(4, 16)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    compressed, report = mw.compress(model, x)
    assert compressed[0] is compressed[2]
    assert type(compressed[0]) is mw.nn.SparseLinear
    assert len(report) == 1
    torch.testing.assert_close(run(compressed, x), run(model, x), **CLOSE)


def test_a_layer_that_is_not_called_stays(prefer):
    prefer("sparse")
    model = nn.Module()
    model.used, model.unused = drop(nn.Linear(16, 16), 0.2), drop(nn.Linear(16, 16), 0.2)
    model.forward = lambda x: x * 2
    _, report = mw.compress(model, torch.randn(4, 16))
    assert report["unused"].reason == "the example does not call it"


def test_a_layer_whose_weight_the_model_reads_stays(prefer):
    prefer("sparse")
    model = nn.Sequential(drop(nn.Linear(256, 256), 0.1), ReadsWeight())
    drop(model[1].inner, 0.1)
    compressed, report = mw.compress(model, torch.randn(4, 256))
    assert type(compressed[0]) is mw.nn.SparseLinear
    assert type(compressed[1].inner) is nn.Linear
    assert "the model does more than call it: AttributeError" in report["1.inner"].reason


def test_where_the_whole_model_is_slower_nothing_is_done(prefer, monkeypatch):
    prefer("sparse")
    slow = {"before": Times(1.0, 1.0), "after": Times(2.0, 2.0), "dense": Times(1.0, 1.0)}
    monkeypatch.setattr(
        "maskwise.models.compress.api.time_calls", lambda calls, _: {name: slow[name] for name in calls}
    )
    model = nn.Sequential(mw.nn.MaskedLinear(32, 32, gate=mw.nn.gates.TopK(0.1)))
    compressed, report = mw.compress(model, torch.randn(4, 32))
    assert type(compressed[0]) is mw.nn.MaskedLinear
    assert report.speedup == 1.0
    assert report["0"].reason == "as it was, since the whole model is faster so"


def test_outputs_that_would_change_are_an_error(prefer):
    prefer("sparse")
    model = feed_forward()
    with pytest.raises(CompressionError, match=r"outputs differ by .*, more than the tolerance of 0.00e\+00"):
        mw.compress(model, torch.randn(64, 256), tolerance=0.0)
    assert type(model[0]) is nn.Linear


def test_dtypes_without_a_kernel_stay_dense_and_say_so():
    _, report = mw.compress(feed_forward().double(), torch.randn(4, 256, dtype=torch.float64))
    assert "there is no sparse kernel for torch.float64" in report["0"].reason


def test_bfloat16_is_compressed_too(prefer):
    prefer("sparse")
    x = torch.randn(4, 256).bfloat16()
    model = feed_forward().bfloat16()
    compressed, _ = mw.compress(model, x)
    assert compressed[0].values.dtype is torch.bfloat16
    # Eight bits of mantissa, and outputs near 0.1.
    torch.testing.assert_close(run(compressed, x), run(model, x), rtol=2e-2, atol=5e-3)


def test_torchs_encoder_layers_run_their_new_layers(prefer):
    prefer("sparse")
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    for each in model.layers:
        drop(each.linear1, 0.1), drop(each.linear2, 0.1)
    x = torch.randn(2, 5, 32)
    compressed, _ = mw.compress(model, x)
    assert isinstance(compressed.layers[1].linear2, mw.nn.SparseLinear)
    torch.testing.assert_close(run(compressed, x), run(model, x), **CLOSE)


def test_examples_may_be_tensors_tuples_or_keywords(prefer):
    prefer("sparse")
    model, x = feed_forward(), torch.randn(3, 256)
    for example in (x, (x,), [x], {"input": x}):
        compressed, _ = mw.compress(model, example)
        assert type(compressed[0]) is mw.nn.SparseLinear


def test_bad_arguments_raise_with_a_hint():
    with pytest.raises(DtypeError, match=r"compress: `model` must be a torch\.nn\.Module, got str"):
        mw.compress("model", torch.ones(1))
    with pytest.raises(DtypeError, match=r"`example` must be a tensor, a tuple .* Hint: \(argument,\)"):
        mw.compress(nn.Linear(1, 1), 3)
    with pytest.raises(ArgumentError, match="`seconds` must be more than 0"):
        mw.compress(nn.Linear(1, 1), torch.ones(1), seconds=0)
    silent = nn.Module()
    silent.forward = lambda x: None
    with pytest.raises(ArgumentError, match="`model` must return tensors for the example"):
        mw.compress(silent, torch.ones(1))


def test_the_result_can_be_copied_pickled_compiled_and_trained(prefer):
    prefer("sparse")
    compressed, _ = mw.compress(feed_forward(), torch.randn(4, 256))
    x = torch.randn(4, 256)
    expected = run(compressed, x)
    for twin in (copy.deepcopy(compressed), pickle.loads(pickle.dumps(compressed))):
        assert torch.equal(run(twin, x), expected)
    torch.testing.assert_close(run(torch.compile(compressed, fullgraph=True, backend="aot_eager"), x), expected)
    compressed.train()
    optimizer = torch.optim.SGD(compressed.parameters(), lr=0.1)
    before = compressed[0].values.detach().clone()
    compressed(x).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before, compressed[0].values)


def test_the_report_is_a_table_and_json(prefer):
    prefer("sparse")
    _, report = mw.compress(feed_forward(), torch.randn(4, 256))
    data = json.loads(report.to_json())
    row = data["layers"][0]
    assert row["before"]["kind"] == "Linear"
    assert row["after"]["kind"] == "sparse"
    assert row["before"]["bytes"] == 4 * (256 * 512 + 512)
    kept = row["after"]["parameters"] - 512
    assert row["after"]["flops"] == 2 * kept * 4
    # Values and columns of what is kept, where each row starts, and the bias.
    assert row["after"]["bytes"] == 8 * kept + 4 * 513 + 4 * 512
    assert data["difference"] < 1e-5
    text = str(report)
    assert "Linear → sparse" in text
    assert "whole model" in text


def test_a_model_that_runs_under_autocast_is_compressed(prefer):
    prefer("sparse")

    class Low(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = feed_forward()

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.body(x).float()

    model, x = Low(), torch.randn(4, 256)
    # Eight bits of mantissa, and outputs near 0.1.
    compressed, _ = mw.compress(model, x, tolerance=5e-3)
    assert type(compressed.body[2]) is mw.nn.SparseLinear
    torch.testing.assert_close(run(compressed, x), run(model, x), rtol=2e-2, atol=5e-3)


def test_a_hugging_face_model_is_compressed(prefer):
    transformers = pytest.importorskip("transformers", reason="an extra")
    prefer("sparse")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes)).eval()
    mw.nn.prune(model, lambda: mw.nn.gates.TopK(0.1), include="*.dense")
    batch = {"input_ids": torch.randint(50, (2, 7)), "attention_mask": torch.ones(2, 7, dtype=torch.int64)}
    compressed, _ = mw.compress(model, batch)
    assert type(compressed.encoder.layer[1].intermediate.dense) is mw.nn.SparseLinear
    with torch.no_grad():
        found, expected = (m(**batch).last_hidden_state for m in (compressed, model))
    torch.testing.assert_close(found, expected, **CLOSE)
