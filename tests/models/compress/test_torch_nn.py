"""Files of every kind of module that torch.nn has: in a fresh process, outputs are the same to the bit."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import maskwise as mw
from maskwise.models import load_compressed, save_compressed
from maskwise.models.compress.example import tensors_of
from tests.models.compress.torch_nn import CASES, CLASSES, NO_LAYERS

pytest.importorskip("safetensors", reason="files of compressed models are safetensors")

#: What is made of other modules, of functions or of tensors: a file has their state, and is loaded into a new one.
NEEDS_INTO = {
    *("AdaptiveLogSoftmaxWithLoss", "CrossEntropyLoss", "GRU", "LSTM", "MultiheadAttention", "RNN"),
    *("Transformer", "TransformerDecoder", "TransformerDecoderLayer", "TransformerEncoder", "TransformerEncoderLayer"),
    "TripletMarginWithDistanceLoss",
}
LOAD_ALL = """
import json, sys, torch
from pathlib import Path
from tests.models.compress.torch_nn import CASES
from tests.models.compress.test_torch_nn import NEEDS_INTO, loaded_outputs
torch.set_num_threads(1)
wrong = {}
for file in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    name = file.stem
    try:
        expected = torch.load(file.with_suffix(".pt"))
        found = loaded_outputs(name, file)
        if len(found) != len(expected) or not all(map(torch.equal, found, expected)):
            wrong[name] = "outputs differ"
    except Exception as error:
        wrong[name] = f"{type(error).__name__}: {error}"
print(json.dumps(wrong))
"""


def outputs(model, inputs):
    torch.manual_seed(0)
    with torch.no_grad():
        return [tensor.clone() for tensor in tensors_of(model(*inputs))]


def made(name):
    """The module, in a Sequential if that can hold it."""
    make, inputs = CASES[name]
    return nn.Sequential(make()) if len(inputs) == 1 else make()


def loaded_outputs(name, file):
    _, inputs = CASES[name]
    torch.manual_seed(1)
    model = load_compressed(file, into=made(name)) if name in NEEDS_INTO else load_compressed(file)
    return outputs(model, inputs)


def test_every_module_of_torch_nn_is_tried():
    assert sorted({*CASES, *NO_LAYERS}) == sorted({*CLASSES, *NO_LAYERS})


def test_every_module_of_torch_nn_comes_back_in_a_fresh_process(prefer, tmp_path):
    prefer("sparse", "live units")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # Torch has no deterministic way to unpool.
    torch.use_deterministic_algorithms(False)
    for name, (_, inputs) in CASES.items():
        torch.manual_seed(2)
        model = made(name)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point():
                    # Nothing is as its constructor leaves it, and something is dropped.
                    tensor.uniform_(0.1, 1.0)
                    tensor.reshape(-1)[0] = 0.0
        compressed, _ = mw.compress(model, inputs)
        save_compressed(compressed, tmp_path / f"{name}.safetensors")
        torch.save(outputs(compressed, inputs), tmp_path / f"{name}.pt")
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    done = subprocess.run([sys.executable, "-c", LOAD_ALL, str(tmp_path)], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == {}
