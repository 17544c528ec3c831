import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import maskwise as mw
from maskwise.errors import ArgumentError
from maskwise.models import load_compressed, save_compressed
from maskwise.models.compress import MissingSafetensorsError
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


def test_what_is_no_such_file_is_told(tmp_path):
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
