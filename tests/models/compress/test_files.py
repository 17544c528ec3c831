import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import maskwise as mw
from maskwise.errors import ArgumentError, DtypeError
from maskwise.models import load_compressed, save_compressed
from maskwise.models.compress import LiveLinear, MissingSafetensorsError
from tests.models.compress.networks import FeedForward, drop, feed_forward

pytest.importorskip("safetensors", reason="files of compressed models are safetensors")


def run(model, x):
    with torch.no_grad():
        return model(x)


@pytest.mark.parametrize("form", ["sparse", "live units", "dense"])
def test_a_sequential_comes_back_from_its_file_alone(form, prefer, tmp_path):
    prefer(form)
    model = feed_forward()
    with torch.no_grad():
        model[2].weight[:128] = 0
    model.append(nn.Sequential(nn.LayerNorm(256), nn.Dropout(0.1), drop(nn.Linear(256, 4, bias=False), 0.3)))
    x = torch.randn(4, 256)
    compressed, _ = mw.compress(model, x)
    save_compressed(compressed, tmp_path / "model.safetensors")
    loaded = load_compressed(tmp_path / "model.safetensors")
    assert str(loaded) == str(compressed)
    assert not loaded.training
    assert torch.equal(run(loaded, x), run(compressed, x))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_convolutions_and_bfloat16_come_back(prefer, tmp_path):
    prefer("live units")
    conv = nn.Conv2d(4, 4, 3, padding="same", padding_mode="circular")
    with torch.no_grad():
        conv.weight[0] = 0
    x = torch.randn(1, 4, 5, 5).bfloat16()
    compressed, _ = mw.compress(nn.Sequential(conv, nn.Flatten()).bfloat16(), x)
    save_compressed(compressed, tmp_path / "conv")
    assert torch.equal(run(load_compressed(tmp_path / "conv"), x), run(compressed, x))


def test_any_other_model_is_loaded_into_a_new_one(prefer, tmp_path):
    prefer("sparse")
    model, x = nn.Sequential(FeedForward(64, 128), nn.Tanh()).eval(), torch.randn(4, 64)
    mw.nn.prune(model, lambda: mw.nn.gates.TopK(0.1))
    compressed, _ = mw.compress(model, x)
    save_compressed(compressed, tmp_path / "model")
    with pytest.raises(ArgumentError, match=r"`into` must be a Sequential, .* Hint: into=Sequential\(...\)"):
        load_compressed(tmp_path / "model")
    for fresh in (nn.Sequential(FeedForward(64, 128), nn.Tanh()), model):
        loaded = load_compressed(tmp_path / "model", into=fresh)
        assert type(loaded[0].up) is mw.nn.SparseLinear
        assert torch.equal(run(loaded, x), run(compressed, x))
    with pytest.raises(ArgumentError, match=r"must have a module '0\.up'"):
        load_compressed(tmp_path / "model", into=nn.Sequential(nn.Tanh()))


def test_torchs_encoders_run_after_they_were_loaded(prefer, tmp_path):
    prefer("sparse")

    def encoder():
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()

    model, x = encoder(), torch.randn(2, 5, 32)
    drop(model.layers[0].linear1, 0.1)
    compressed, _ = mw.compress(model, x)
    save_compressed(compressed, tmp_path / "model")
    assert torch.equal(run(load_compressed(tmp_path / "model", into=encoder()), x), run(compressed, x))


def test_tied_tensors_are_written_once(tmp_path):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    save_compressed(model, tmp_path / "tied")
    assert (tmp_path / "tied").stat().st_size < 2 * 32 * 32 * 4
    x = torch.randn(2, 32)
    assert torch.equal(run(load_compressed(tmp_path / "tied"), x), run(model, x))


def test_a_fresh_process_loads_it_without_gates_or_compress(prefer, tmp_path):
    prefer("sparse")
    x = torch.linspace(-1, 1, 256)[None]
    compressed, _ = mw.compress(feed_forward(), x)
    save_compressed(compressed, tmp_path / "model")
    program = f"""
import json, torch, maskwise as mw
model = mw.models.load_compressed({str(tmp_path / "model")!r})
with torch.no_grad():
    print(json.dumps(model(torch.linspace(-1, 1, 256)[None]).tolist()))
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    # Two processes may take different numbers of threads.
    torch.testing.assert_close(torch.tensor(json.loads(done.stdout)), run(compressed, x))


def test_other_files_raise_with_a_hint(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.ones(1)}, tmp_path / "other")
    with pytest.raises(ArgumentError, match="`path` must be a file of save_compressed"):
        load_compressed(tmp_path / "other")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ArgumentError, match="`path` must be a safetensors file"):
        load_compressed(tmp_path / "text")
    with pytest.raises(FileNotFoundError):
        load_compressed(tmp_path / "nothing")


def rewrite(path, name, value):
    """Write another last entry into a tensor of a file."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {each: file.get_tensor(each) for each in file.keys()}  # noqa: SIM118
    tensors[name][-1] = value
    save_file(tensors, path, metadata=metadata)


def test_a_file_that_points_outside_of_a_layer_is_refused(prefer, tmp_path):
    prefer("sparse")
    compressed, _ = mw.compress(nn.Sequential(drop(nn.Linear(8, 8), 0.5)), torch.ones(1, 8))
    save_compressed(compressed, tmp_path / "bad")
    rewrite(tmp_path / "bad", "0.columns", 100)
    with pytest.raises(ArgumentError, match=r"columns must be in \[0, 8\)"):
        load_compressed(tmp_path / "bad")
    prefer("live units")
    layer = nn.Linear(8, 8)
    with torch.no_grad():
        layer.weight[0] = 0
    compressed, _ = mw.compress(nn.Sequential(layer), torch.ones(1, 8))
    save_compressed(compressed, tmp_path / "bad")
    rewrite(tmp_path / "bad", "0.outputs", 8)
    with pytest.raises(ArgumentError, match=r"outputs must be in \[0, 8\)"):
        load_compressed(tmp_path / "bad")


def test_a_file_cannot_name_what_is_not_in_the_table(tmp_path):
    from safetensors.torch import save_file

    layers = {"": {"kind": "System", "arguments": {}, "dtype": None}}
    header = {"version": 1, "layers": layers, "structure": "layer", "aliases": {}, "model": "System"}
    save_file({}, tmp_path / "bad", metadata={"maskwise.compressed": json.dumps(header)})
    with pytest.raises(ArgumentError, match="must name only layers that a file can hold, got a file with 'System'"):
        load_compressed(tmp_path / "bad")


def test_without_safetensors_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingSafetensorsError, match=r"pip install 'maskwise\[safetensors\]'"):
        save_compressed(nn.Linear(1, 1), tmp_path / "x")


# -- what a file must bring back --------------------------------------------------------------------------------------
class Head(nn.Module):
    """Not a Sequential, with a layer of which whole units are dead."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 6)

    def forward(self, x):
        return self.layer(x).tanh()


def test_a_model_of_another_class_with_live_units_is_loaded(prefer, tmp_path):
    prefer("live units")
    model, x = Head().eval(), torch.randn(3, 8)
    with torch.no_grad():
        model.layer.weight[2:] = 0
    compressed, _ = mw.compress(model, x)
    assert type(compressed.layer) is LiveLinear
    save_compressed(compressed, tmp_path / "model")
    for into in (Head(), compressed):
        assert torch.equal(run(load_compressed(tmp_path / "model", into=into), x), run(compressed, x))


def test_a_layer_that_is_used_twice_comes_back_once_in_both_places(prefer, tmp_path):
    prefer("sparse")
    layer = drop(nn.Linear(8, 8), 0.3)
    inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    model, x = nn.Sequential(layer, nn.ReLU(), layer, inner, inner).eval(), torch.randn(3, 8)
    compressed, _ = mw.compress(model, x)
    save_compressed(compressed, tmp_path / "model")
    loaded = load_compressed(tmp_path / "model")
    assert loaded[0] is loaded[2]
    assert loaded[3] is loaded[4]
    assert torch.equal(run(loaded, x), run(compressed, x))


def test_weights_are_shared_as_in_the_file_and_not_as_in_the_model_that_it_is_loaded_into(tmp_path):
    def tied():
        model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)).eval()
        model[1].weight = model[0].weight
        return model

    x = torch.arange(20)
    model = tied()
    save_compressed(model, tmp_path / "tied")
    for into in (None, tied(), nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20, bias=False))):
        loaded = load_compressed(tmp_path / "tied", into=into)
        assert loaded[0].weight is loaded[1].weight
        assert torch.equal(run(loaded, x), run(model, x))
    mw.nn.attach(model[1], mw.nn.gates.TopK(0.3))
    compressed, _ = mw.compress(model, x)
    save_compressed(compressed, tmp_path / "apart")
    for into in (None, tied()):
        loaded = load_compressed(tmp_path / "apart", into=into)
        assert loaded[0].weight is not loaded[1].weight
        assert torch.equal(run(loaded, x), run(model, x))


def test_what_a_constructor_does_not_say_is_not_made_up(tmp_path):
    hooked = nn.Sequential(nn.Linear(4, 4))
    hooked[0].register_forward_hook(lambda module, args, out: out * 2)
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    extra = nn.Sequential(nn.Linear(4, 4))
    extra[0].register_buffer("scale", torch.ones(1))
    mixed = nn.Sequential(nn.BatchNorm1d(4)).eval().bfloat16()
    mixed[0].running_mean = torch.rand(4)
    x = torch.randn(3, 4)
    for number, model in enumerate((hooked, normed, extra)):
        save_compressed(model, tmp_path / f"{number}")
        with pytest.raises(ArgumentError, match=r"Hint: into=Sequential\(...\)"):
            load_compressed(tmp_path / f"{number}")
        expected = run(model, x)
        assert torch.equal(run(load_compressed(tmp_path / f"{number}", into=model), x), expected)
    save_compressed(mixed, tmp_path / "mixed")
    loaded = load_compressed(tmp_path / "mixed")
    assert loaded[0].running_mean.dtype is torch.float32
    assert torch.equal(loaded[0].running_mean, mixed[0].running_mean)


def test_a_lazy_module_is_refused_before_it_has_parameters(tmp_path):
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ArgumentError, match=r"must have all its parameters, got none yet at '0\.weight'"):
        mw.compress(model, torch.randn(2, 4))
    with pytest.raises(DtypeError, match="a lazy module gets its own by a first call"):
        save_compressed(model, tmp_path / "lazy")


def test_a_file_of_an_unpadded_model_is_loaded_unpadded(prefer, tmp_path):
    prefer("sparse")

    def encoder():
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()

    model, x = encoder(), torch.randn(3, 5, 32)
    drop(model.layers[0].linear1, 0.1)
    padding = mw.Mask.from_lengths([5, 3, 2]).to_key_padding()
    compressed, _ = mw.compress(mw.unpad(model), {"src": x, "src_key_padding_mask": padding})
    save_compressed(compressed, tmp_path / "model")
    with torch.no_grad():
        expected = compressed(x, src_key_padding_mask=padding)
        assert not expected[padding].any()
        for into in (encoder(), mw.unpad(encoder())):
            loaded = load_compressed(tmp_path / "model", into=into)
            assert torch.equal(loaded(x, src_key_padding_mask=padding), expected)
    padded = encoder()
    save_compressed(padded, tmp_path / "padded")
    with pytest.raises(ArgumentError, match=r"must be unpadded as the saved model, in no module.* Hint: into=Model"):
        load_compressed(tmp_path / "padded", into=mw.unpad(encoder()))
    with pytest.raises(ArgumentError, match=r"must be a model that mw\.unpad supports"):
        load_compressed(tmp_path / "model", into=nn.Linear(2, 2))


def _under(kind):
    return lambda: kind(nn.Linear(8, 8))


NEED_INTO = {
    "LSTM": lambda: nn.LSTM(8, 8),
    "GRU": lambda: nn.GRU(8, 8),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "TransformerEncoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False
    ),
    "weight_norm": _under(nn.utils.parametrizations.weight_norm),
    "orthogonal": _under(nn.utils.parametrizations.orthogonal),
    "spectral_norm": _under(nn.utils.parametrizations.spectral_norm),
}


@pytest.mark.parametrize("name", NEED_INTO)
def test_a_sequential_with_a_layer_that_the_docs_name_is_loaded_into_a_new_one(name, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(NEED_INTO[name]()).eval()
    save_compressed(net, tmp_path / "model")
    with pytest.raises(ArgumentError, match="`into` must be a Sequential"):
        load_compressed(tmp_path / "model")
    loaded = load_compressed(tmp_path / "model", into=nn.Sequential(NEED_INTO[name]()))
    x = torch.randn(3, 2, 8)
    mine, expected = loaded(x), net(x)
    # A recurrent layer returns its state, too.
    assert torch.equal(*((mine[0], expected[0]) if isinstance(mine, tuple) else (mine, expected)))
    assert name in (Path(__file__).parents[3] / "docs" / "compress.md").read_text()
