"""One of every module of torch.nn, with small arguments, and an input for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

B, C = 2, 4
FLAT, LINE, IMAGE, VOLUME = (B, C), (B, C, 6), (B, C, 6, 6), (B, C, 6, 6, 6)
CLASSES = {name: kind for name, kind in vars(nn).items() if isinstance(kind, type) and issubclass(kind, nn.Module)}

#: What is no layer, and why.
NO_LAYERS = {
    "Module": "abstract",
    "Container": "abstract",
    "RNNBase": "abstract",
    "RNNCellBase": "abstract",
    "ModuleList": "a container without a forward",
    "ModuleDict": "a container without a forward",
    "ParameterList": "a container without a forward",
    "ParameterDict": "a container without a forward",
    "DataParallel": "a wrapper for several devices",
    "SyncBatchNorm": "of a process group",
    "NLLLoss2d": "an old name, which warns",
    "LinearCrossEntropyLoss": "newer than the oldest torch that is served",
    **{name: "has no parameters before it is called" for name in CLASSES if name.startswith("Lazy")},
}


def values(*shape: int) -> torch.Tensor:
    """Numbers in (0, 1), always the same."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def classes(*shape: int) -> torch.Tensor:
    return (values(*shape) * C).long()


Case = tuple[Callable[[], nn.Module], tuple[Any, ...]]
CASES: dict[str, Case] = {}


def case(make: Callable[[], nn.Module], *inputs: Any) -> None:
    tensors = tuple(values(*each) if isinstance(each, tuple) else each for each in inputs)
    CASES[type(make()).__name__] = (make, tensors)


for name in ("CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU",
             "LogSigmoid", "Mish", "ReLU", "ReLU6", "RReLU", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink",
             "Softsign", "Tanh", "Tanhshrink", "AlphaDropout", "Dropout", "FeatureAlphaDropout"):  # fmt: skip
    case(CLASSES[name], FLAT)
for name in ("Softmax", "Softmin", "LogSoftmax"):
    case(lambda name=name: CLASSES[name](dim=0), FLAT)
case(lambda: nn.GLU(1), FLAT)
case(lambda: nn.PReLU(C, init=0.1), FLAT)
case(lambda: nn.Threshold(0.5, 2.0), FLAT)
case(lambda: nn.Softmax2d(), IMAGE)
for dims, shape in ((1, LINE), (2, IMAGE), (3, VOLUME)):
    for name in ("Conv", "ConvTranspose"):
        case(lambda name=name, dims=dims: CLASSES[f"{name}{dims}d"](C, 6, 3, stride=2, padding=1, bias=False), shape)
    for name in ("BatchNorm", "InstanceNorm"):
        make = CLASSES[f"{name}{dims}d"]
        case(lambda make=make: make(C, eps=0.1, affine=True, track_running_stats=True), shape)
    case(CLASSES[f"Dropout{dims}d"], shape)
    case(lambda dims=dims: CLASSES[f"AvgPool{dims}d"](3, stride=2, padding=1, count_include_pad=False), shape)
    case(lambda dims=dims: CLASSES[f"MaxPool{dims}d"](2, stride=1, dilation=2, return_indices=True), shape)
    case(lambda dims=dims: CLASSES[f"LPPool{dims}d"](2.0, 2, ceil_mode=True), shape)
    case(lambda dims=dims: CLASSES[f"AdaptiveAvgPool{dims}d"](3), shape)
    case(lambda dims=dims: CLASSES[f"AdaptiveMaxPool{dims}d"](3, return_indices=True), shape)
    indices = getattr(nn.functional, f"max_pool{dims}d")(values(*shape), 2, return_indices=True)[1]
    case(lambda dims=dims: CLASSES[f"MaxUnpool{dims}d"](2), (B, C, *[3] * dims), indices)
    for name in ("Circular", "Reflection", "Replication", "Zero"):
        case(lambda name=name, dims=dims: CLASSES[f"{name}Pad{dims}d"](1), shape)
    case(lambda dims=dims: CLASSES[f"ConstantPad{dims}d"](1, 3.5), shape)
for dims, shape in ((2, IMAGE), (3, VOLUME)):
    case(lambda dims=dims: CLASSES[f"FractionalMaxPool{dims}d"](2, output_ratio=0.5), shape)
case(lambda: nn.Linear(C, 3), FLAT)
case(lambda: nn.Bilinear(C, C, 3), FLAT, FLAT)
case(lambda: nn.Embedding(C, 3, padding_idx=1, max_norm=0.5), classes(5))
case(lambda: nn.EmbeddingBag(C, 3, mode="max", padding_idx=1), classes(2, 5))
case(lambda: nn.LayerNorm(C, bias=False), FLAT)
case(lambda: nn.RMSNorm((C,), eps=0.1), FLAT)
case(lambda: nn.GroupNorm(2, C, eps=0.1), LINE)
case(lambda: nn.LocalResponseNorm(2, alpha=0.5), LINE)
case(lambda: nn.CrossMapLRN2d(2, alpha=0.5), IMAGE)
case(lambda: nn.ChannelShuffle(2), IMAGE)
case(lambda: nn.PixelShuffle(2), IMAGE)
case(lambda: nn.PixelUnshuffle(2), IMAGE)
case(lambda: nn.Upsample(scale_factor=1.5, mode="bilinear", align_corners=True), IMAGE)
case(lambda: nn.UpsamplingNearest2d(scale_factor=2), IMAGE)
case(lambda: nn.UpsamplingBilinear2d(size=(4, 5)), IMAGE)
case(lambda: nn.Flatten(0, 1), LINE)
case(lambda: nn.Unflatten(1, (2, 2)), FLAT)
case(lambda: nn.Fold((4, 4), (2, 2), stride=2), (B, C, 4))
case(lambda: nn.Unfold((2, 2), stride=2), IMAGE)
case(lambda: nn.CosineSimilarity(dim=0), FLAT, FLAT)
case(lambda: nn.PairwiseDistance(p=1.0), FLAT, (C,))
case(lambda: nn.RNN(C, 3, 2, nonlinearity="relu"), (B, 5, C))
case(lambda: nn.LSTM(C, 3, batch_first=True), (B, 5, C))
case(lambda: nn.GRU(C, 3, bidirectional=True), (B, 5, C))
case(lambda: nn.RNNCell(C, 3, nonlinearity="relu"), FLAT)
case(lambda: nn.LSTMCell(C, 3), FLAT)
case(lambda: nn.GRUCell(C, 3, bias=False), FLAT)
case(lambda: nn.MultiheadAttention(C, 2, batch_first=True), (B, 5, C), (B, 5, C), (B, 5, C))
case(lambda: nn.TransformerEncoderLayer(C, 2, 8, activation="gelu", batch_first=True), (B, 5, C))
case(lambda: nn.TransformerDecoderLayer(C, 2, 8), (5, B, C), (6, B, C))
case(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(C, 2, 8, batch_first=True), 2), (B, 5, C))
case(lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(C, 2, 8), 1), (5, B, C), (6, B, C))
case(lambda: nn.Transformer(C, 2, 1, 1, 8, batch_first=True), (B, 5, C), (B, 6, C))
case(lambda: nn.Sequential(nn.Linear(C, 3), nn.ReLU()), FLAT)
case(lambda: nn.AdaptiveLogSoftmaxWithLoss(C, 6, [2, 4], div_value=1.0), FLAT, classes(B))
SIGNS = torch.tensor([1.0, -1.0])
for name in ("BCELoss", "BCEWithLogitsLoss", "GaussianNLLLoss", "HuberLoss", "KLDivLoss", "L1Loss", "MSELoss",
             "MultiLabelSoftMarginLoss", "PoissonNLLLoss", "SmoothL1Loss", "SoftMarginLoss"):  # fmt: skip
    inputs = (FLAT, FLAT, FLAT) if name == "GaussianNLLLoss" else (FLAT, FLAT)
    case(lambda name=name: CLASSES[name](reduction="sum"), *inputs)
case(lambda: nn.CrossEntropyLoss(weight=values(C), ignore_index=1, label_smoothing=0.1), FLAT, classes(B))
case(lambda: nn.NLLLoss(reduction="none"), FLAT, classes(B))
case(lambda: nn.MultiMarginLoss(margin=0.3), FLAT, classes(B))
case(lambda: nn.MultiLabelMarginLoss(), FLAT, classes(B, C))
case(lambda: nn.HingeEmbeddingLoss(0.5), FLAT, SIGNS[:, None].expand(B, C))
case(lambda: nn.MarginRankingLoss(0.3), (B,), (B,), SIGNS)
case(lambda: nn.CosineEmbeddingLoss(0.1), FLAT, FLAT, SIGNS)
case(lambda: nn.TripletMarginLoss(0.4, swap=True), FLAT, FLAT, FLAT)
case(lambda: nn.TripletMarginWithDistanceLoss(margin=0.4), FLAT, FLAT, FLAT)
case(lambda: nn.CTCLoss(blank=1), (5, B, C), torch.tensor([[0, 2], [3, 2]]), torch.tensor([5, 5]), torch.tensor([2, 2]))
