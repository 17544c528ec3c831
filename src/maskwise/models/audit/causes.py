"""Known causes of leaks: by the operation that reads what is dropped, what is wrong, and the line that repairs it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from maskwise.models.audit.tracing import Place

__all__ = ["Cause", "cause_of"]


@dataclass(frozen=True)
class Cause:
    """Why something leaks.

    Attributes:
        name: a short name, the same for every leak of its kind.
        reason: a sentence.
        repair: the line that repairs it.
    """

    name: str
    reason: str
    repair: str


_CONV = ("conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d", "conv3d", "_conv_forward")
_MEAN = (
    "mean",
    "sum",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "avg_pool1d",
    "avg_pool2d",
    "logsumexp",
    "var",
    "std",
)
_MAX = ("max", "amax", "min", "amin", "adaptive_max_pool1d", "adaptive_max_pool2d", "max_pool1d", "argmax")
_ATTENTION = ("scaled_dot_product_attention", "multi_head_attention_forward", "softmax", "_native_multi_head_attention")
_MIXES = ("matmul", "bmm", "baddbmm", "einsum", "__matmul__", "linear")
_TIME = "its statistics run over time, dropped positions included"
_NORMS = {
    "batch_norm": ("BatchNorm over padding", "its statistics count dropped positions", "MaskedBatchNorm1d"),
    "group_norm": (
        "GroupNorm over padding",
        _TIME,
        "MaskedGroupNorm",
    ),
    "instance_norm": (
        "InstanceNorm over padding",
        _TIME,
        "MaskedInstanceNorm1d",
    ),
    "layer_norm": ("LayerNorm over padding", "it normalizes over positions", "MaskedLayerNorm"),
}
_OF_MODULE = (
    (nn.modules.batchnorm._BatchNorm, "batch_norm"),
    (nn.GroupNorm, "group_norm"),
    (nn.modules.instancenorm._InstanceNorm, "instance_norm"),
    (nn.LayerNorm, "layer_norm"),
    (nn.modules.conv._ConvNd, "conv1d"),
    (nn.MultiheadAttention, "softmax"),
    (nn.RNNBase, "gru"),
)


def cause_of(place: Place, kind: str) -> Cause:
    """The cause of a leak that begins at a place."""
    path = f"model.{place.path}" if place.path else "model"
    operation = place.operation or next((name for each, name in _OF_MODULE if isinstance(place.module, each)), "")
    if place.is_input or (kind == "amount" and operation not in (*_CONV, *_MEAN, *_MAX, *_ATTENTION, *_NORMS)):
        return Cause(
            "position ids from padding",
            "positions are counted from the start of the padded row, so they change with the amount of padding",
            "position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0), passed to the model",
        )
    if kind == "nan":
        attends = operation in _ATTENTION
        return Cause(
            "0 times NaN",
            f"`{operation or place.kind}` multiplies dropped values by 0, and 0 times NaN is NaN; finite ones are safe",
            "mw.attention(q, k, v, mask[:, None, None, :])" if attends else "x = mw.fill(x, mask[..., None]) before it",
        )
    if operation in _NORMS:
        name, reason, layer = _NORMS[operation]
        module = place.module
        layer = layer.replace("BatchNorm1d", f"BatchNorm{_dims(module)}d") if "BatchNorm" in layer else layer
        return Cause(name, reason, f"{path} = mw.nn.{layer}({_sizes(module)}), called with the mask")
    if operation in _CONV:
        function = "mw.conv2d" if "2d" in operation else "mw.conv1d"
        return Cause(
            "convolution over padding",
            "windows at the end of a sequence reach into dropped positions",
            f"{function}(x, {path}.weight, {path}.bias, ..., mask=mask)",
        )
    if operation in _ATTENTION or (kind == "packed" and operation in _MIXES):
        if kind == "packed":
            return Cause(
                "packed sequences attend to each other",
                "attention crosses the boundaries of sequences in a row",
                "mw.attention(q, k, v, mw.Mask.from_segments(segment_ids), is_causal=...)",
            )
        return Cause(
            "attention without mask",
            "kept queries attend to dropped keys",
            "mw.attention(q, k, v, mask[:, None, None, :])",
        )
    if operation in _MEAN:
        return Cause("mean without mask", "dropped positions are averaged in", "mw.mean(x, mask[..., None], dim=1)")
    if operation in _MAX:
        return Cause(
            "maximum without mask", "a dropped position may be the largest", "mw.amax(x, mask[..., None], dim=1)"
        )
    if operation in ("__getitem__", "select", "narrow", "getitem"):
        return Cause(
            "fixed position",
            "it reads a position by its index, which is dropped in some rows",
            "x[torch.arange(len(x)), mask.sum(1) - 1] for the last kept position of a right-padded batch",
        )
    if operation in ("gru", "lstm", "rnn_tanh", "rnn_relu"):
        return Cause(
            "recurrence over padding",
            "the state runs through dropped positions",
            "nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)",
        )
    if operation.startswith("cum"):
        return Cause("scan over padding", "it accumulates dropped positions", f"mw.{operation}(x, mask, dim=1)")
    return Cause(
        "mixes positions",
        f"`{operation}` reads dropped positions" if operation else "its forward reads dropped positions",
        "mw.fill(x, mask[..., None]) before it, or a masked function of mw in its place",
    )


def _dims(module: nn.Module) -> int:
    for dims, kind in ((2, nn.BatchNorm2d), (3, nn.BatchNorm3d)):
        if isinstance(module, kind):
            return dims
    return 1


def _sizes(module: nn.Module) -> str:
    if isinstance(module, nn.GroupNorm):
        return f"{module.num_groups}, {module.num_channels}"
    size = getattr(module, "num_features", None) or getattr(module, "normalized_shape", None)
    return "features" if size is None else str(size[0] if isinstance(size, tuple) and len(size) == 1 else size)
