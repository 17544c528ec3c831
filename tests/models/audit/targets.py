"""What `maskwise audit` is pointed at in tests."""

import torch
from torch import nn

import maskwise as mw
from tests.models.audit.cases import Pooled, tokens


def leaky():
    torch.manual_seed(0)
    return Pooled(False), tokens()


def clean():
    torch.manual_seed(0)
    return nn.Linear(8, 8), torch.randn(4, 8), lambda output, batch: output.square().mean()


def padded():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 2, 256, batch_first=True)
    padding = mw.Mask.from_lengths([32, 4, 4, 4]).to_key_padding()
    return nn.TransformerEncoder(layer, 2), {"src": torch.randn(4, 32, 64), "src_key_padding_mask": padding}


def loss(output, batch):
    return output.square().mean()


def nothing():
    return None


def no_model():
    return "a model", torch.randn(2, 8)


def raises():
    raise ValueError("of the user's own")


not_a_function = 3
