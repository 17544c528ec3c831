"""Known causes of leaks: by the operation that reads what is dropped, what is wrong, and the line that repairs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from maskwise.models.audit.batch import IGNORED, SEGMENTS, Batch
from maskwise.models.audit.perturb import Probe
from maskwise.models.audit.tracing import Place

__all__ = ["Cause", "cause_of", "cause_of_loss"]


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
#: Functions over positions: what they do, and the function of Maskwise that does it over kept ones.
_REDUCTIONS = {
    **dict.fromkeys(("mean", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "avg_pool1d", "avg_pool2d"), "mean"),
    **dict.fromkeys(("max", "amax", "adaptive_max_pool1d", "adaptive_max_pool2d", "max_pool1d"), "amax"),
    **dict.fromkeys(("min", "amin"), "amin"),
    **{name: name for name in ("sum", "prod", "logsumexp", "var", "std", "norm", "argmax", "argmin")},
    **{name: name for name in ("median", "quantile", "sort", "topk", "normalize")},
}
_WORDS = {
    "mean": ("mean", "dropped positions are averaged in"),
    "amax": ("maximum", "a dropped position may be the largest"),
    "argmax": ("maximum", "a dropped position may be the largest"),
    "amin": ("minimum", "a dropped position may be the smallest"),
    "argmin": ("minimum", "a dropped position may be the smallest"),
}
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


def cause_of(place: Place, probe: Probe) -> Cause:
    """The cause of a leak that begins at a place."""
    kind = probe.kind
    path = f"model.{place.path}" if place.path else "model"
    operation = place.operation or next((name for each, name in _OF_MODULE if isinstance(place.module, each)), "")
    if place.is_input or (kind == "amount" and operation not in (*_CONV, *_REDUCTIONS, *_ATTENTION, *_NORMS)):
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
            "mw.attention(q, k, v, mask[:, None, None, :])"
            if attends
            else "x = mw.fill(x, mask[..., None], 0) before it",
        )
    if operation in _NORMS:
        name, reason, layer = _NORMS[operation]
        module = place.module
        layer = layer.replace("BatchNorm1d", f"BatchNorm{_dims(module)}d") if "BatchNorm" in layer else layer
        return Cause(name, reason, f"{path} = mw.nn.{layer}({_sizes(module)}), called with the mask")
    if operation in _CONV or isinstance(place.module, nn.modules.conv._ConvNd):
        return Cause(
            "convolution over padding",
            "windows at the end of a sequence reach into dropped positions",
            _conv(place, operation, path),
        )
    if operation in _ATTENTION or (kind == "packed" and operation in _MIXES):
        if kind == "packed":
            causal = ", is_causal=True" if place.options.get("is_causal") else ""
            return Cause(
                "packed sequences attend to each other",
                "attention crosses the boundaries of sequences in a row",
                f"mw.attention(q, k, v, mw.Mask.from_segments({_segments(probe)})[:, None]{causal})",
            )
        is_layer = isinstance(place.module, nn.MultiheadAttention)
        repair = f"{path}(..., key_padding_mask=~mask)" if is_layer else "mw.attention(q, k, v, mask[:, None, None, :])"
        if place.is_inverted:
            reason = (
                "its mask keeps dropped keys alone: True means drop in a key_padding_mask, and keep in an attn_mask"
            )
            return Cause("inverted mask", reason, repair)
        return Cause("attention without mask", "kept queries attend to dropped keys", repair)
    if operation in _REDUCTIONS:
        function = _REDUCTIONS[operation]
        word, reason = _WORDS.get(function, (function, "dropped positions are counted in"))
        given = {"topk": "k, ", "quantile": "q, "}.get(function, "")
        return Cause(f"{word} without mask", reason, f"mw.{function}(x, mask[..., None], {given}{_dim(place)})")
    if operation in ("__getitem__", "select", "narrow", "getitem"):
        return Cause(
            "fixed position",
            "it reads a position by its index, which is dropped in some rows",
            _fixed(probe),
        )
    if operation in ("gru", "lstm", "rnn_tanh", "rnn_relu"):
        return Cause(
            "recurrence over padding",
            "the state runs through dropped positions",
            "nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)",
        )
    if operation == "embedding_bag":
        repair = f"{path} = nn.EmbeddingBag(..., padding_idx=pad_token_id), which leaves the ids of padding out"
        return Cause("bag over padding", "the ids of padding are looked up and reduced too", repair)
    if operation.endswith(("_loss", "cross_entropy", "cross_entropy_with_logits")):
        return cause_of_loss(probe.before, probe.checked)
    if operation.startswith("cum"):
        return Cause("scan over padding", "it accumulates dropped positions", f"mw.{operation}(x, mask, dim=1)")
    return Cause(
        "mixes positions",
        f"`{operation}` reads dropped positions" if operation else "its forward reads dropped positions",
        "mw.fill(x, mask[..., None], 0) before it, or a masked function of mw in its place",
    )


def cause_of_loss(batch: Batch, keep: Tensor) -> Cause:
    """The cause of a loss that changes while kept outputs do not."""
    found = batch.labels()
    if found is not None and found[1].shape == keep.shape:
        labels = found[1]
        counted = labels != IGNORED
        from_padding = counted[:, 1:] & ~keep[:, :-1].to(labels.device)
        if bool(from_padding.any()) and not bool((counted & ~keep.to(labels.device)).any()):
            return Cause(
                "label predicted from padding",
                "the loss shifts labels by one, so the first label of a left-padded row belongs to a dropped position",
                f"{found[0]}[mask.cumsum(1) <= 1] = {IGNORED}, the first label of every row",
            )
    return Cause(
        "loss over dropped positions",
        "kept outputs stay as they are and the loss changes: it counts dropped positions or their labels",
        f"mw.loss(F.cross_entropy, logits, labels, mask), or labels.masked_fill(~mask, {IGNORED})",
    )


def _fixed(probe: Probe) -> str:
    """The index that is kept in every row: at the end of right-padded rows, at the start of left-padded ones."""
    if bool(probe.checked[:, 0].all()):
        return "x[torch.arange(len(x)), mask.sum(1) - 1], the last kept position of right-padded rows"
    return "x[torch.arange(len(x)), mask.long().argmax(1)], the first kept position of left-padded rows"


def _segments(probe: Probe) -> str:
    """The numbers of the sequences of packed rows, from what the batch has."""
    named = next((name for name in SEGMENTS if name in probe.before.values), None)
    if named is None and "position_ids" in probe.before.values:
        return "(position_ids == 0).cumsum(1)"
    return named or "segment_ids"


def _conv(place: Place, operation: str, path: str) -> str:
    """The masked convolution with the arguments of the layer, where it is one."""
    module = place.module
    if not isinstance(module, nn.modules.conv._ConvNd):
        function = operation if operation in _CONV[:4] else "conv1d"
        return f"mw.{function}(x, weight, bias, ..., mask=mask)"
    dims = len(module.kernel_size)
    if dims > 2 or module.padding_mode != "zeros":
        return f"{path}(mw.fill(x, mask[:, None], 0))"
    names = [("stride", 1), ("padding", 0), ("dilation", 1)]
    if module.transposed:
        names.insert(2, ("output_padding", 0))
    given = {name: _entry(getattr(module, name)) for name, default in names if _entry(getattr(module, name)) != default}
    if module.groups != 1:
        given["groups"] = module.groups
    options = "".join(f", {name}={value!r}" for name, value in given.items())
    function = f"conv_transpose{dims}d" if module.transposed else f"conv{dims}d"
    return f"mw.{function}(x, {path}.weight, {path}.bias{options}, mask=mask)"


def _entry(value: Any) -> Any:
    """One number for equal ones."""
    return value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value


def _dim(place: Place) -> str:
    """The argument ``dim`` of a function, as it was called: most often the one of the positions."""
    found = [each for each in place.arguments if isinstance(each, int | tuple | list) and not isinstance(each, bool)]
    if place.operation in ("mean", "sum", "prod", "std", "var") and not found:
        return "dim=None"
    return f"dim={found[0]}" if place.operation in ("mean", "sum", "logsumexp", "amax") and found else "dim=1"


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
