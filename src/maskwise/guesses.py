"""What is tried first, by users of torch, numpy and other libraries of masks, and what is written here instead."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

__all__ = ["instead_of"]

_LOSS = "maskwise.loss(F.{name}, input, target, mask)"
_MASK = "maskwise.Mask.{name}"
#: By name; ``{name}`` stands for the name itself.
_GUESSES = {
    "masked_fill": "maskwise.fill(x, mask, value) for x.masked_fill(~mask, value)",
    "masked_fill_": "maskwise.fill(x, mask, value)",
    "masked_select": "maskwise.pack(x, mask).values",
    "masked_scatter": "maskwise.pack(x, mask), and unpack() of the result",
    "masked_tensor": "maskwise.pack(x, mask), or a plain tensor beside a Mask",
    "MaskedTensor": "maskwise.pack(x, mask), or a plain tensor beside a Mask",
    "masked_array": "maskwise.Mask.from_numpy(array), and array.data",
    "select": "maskwise.pack(x, mask).values",
    "gather": "maskwise.pack(x, mask).values",
    "scatter": "maskwise.pack(x, mask), and unpack() of the result",
    "unpack": "maskwise.pack(x, mask).unpack()",
    "pad": "maskwise.pack(x, mask).unpack()",
    "multiply": "maskwise.mul(x, mask)",
    "maximum": "maskwise.max(x, mask)",
    "minimum": "maskwise.min(x, mask)",
    "nonzero": "maskwise.Mask(mask).indices()",
    "nansum": "maskwise.sum(x, ~x.isnan())",
    "nanmean": "maskwise.mean(x, ~x.isnan())",
    "nanmedian": "maskwise.median(x, ~x.isnan())",
    "nanquantile": "maskwise.quantile(x, ~x.isnan(), q)",
    "average": "maskwise.mean(x, mask)",
    "std_mean": "maskwise.std(x, mask, dim), maskwise.mean(x, mask, dim)",
    "var_mean": "maskwise.var(x, mask, dim), maskwise.mean(x, mask, dim)",
    "cat": "maskwise.Mask.cat([a, b], dim) for masks, torch.cat for tensors",
    "concat": "maskwise.Mask.cat([a, b], dim) for masks, torch.cat for tensors",
    "stack": "maskwise.Mask.stack([a, b]) for masks, torch.stack for tensors",
    "split": "maskwise.pack(x, mask).values.split(mask.lengths.tolist())",
    "einsum": "torch.einsum(equation, maskwise.mul(a, mask), b)",
    "matmul": "maskwise.linear(x, weight, mask) for a mask on weights, maskwise.mul(a, mask) @ b for one on a",
    "mm": "maskwise.linear(x, weight, mask) for a mask on weights, maskwise.mul(a, mask) @ b for one on a",
    "bmm": "maskwise.mul(a, mask) @ b, or maskwise.attention(q, k, v, mask)",
    "dot": "(maskwise.mul(a, mask) * maskwise.mul(b, mask)).sum(-1)",
    "add": "maskwise.apply(lambda x: x + y, x, mask=mask), or maskwise.where(mask, x + y, x)",
    "dropout": "maskwise.apply(torch.nn.functional.dropout, x, mask=mask)",
    "embedding": "maskwise.apply(layer, tokens, mask=mask), layer being an nn.Embedding",
    "layer_norm": "maskwise.nn.MaskedLayerNorm(features)(x, mask)",
    "batch_norm": "maskwise.nn.MaskedBatchNorm1d(channels)(x, mask)",
    "instance_norm": "maskwise.nn.MaskedInstanceNorm1d(channels)(x, mask)",
    "mean_pool": "maskwise.mean(x, mask[..., None], dim=1), or maskwise.nn.MaskedMeanPool()(x, mask)",
    "max_pool": "maskwise.amax(x, mask[..., None], dim=1), or maskwise.nn.MaskedMaxPool()(x, mask)",
    "pool": "maskwise.nn.MaskedMeanPool()(x, mask)",
    "scaled_dot_product_attention": "maskwise.attention(q, k, v, mask)",
    "sdpa": "maskwise.attention(q, k, v, mask)",
    "flash_attention": "maskwise.attention(q, k, v, mask)",
    "flex_attention": "maskwise.attention(q, k, v, mask)",
    "lengths_to_mask": "maskwise.Mask.from_lengths(lengths, max_len)",
    "sequence_mask": "maskwise.Mask.from_lengths(lengths, max_len)",
    "padding_mask": "maskwise.Mask.from_lengths(lengths, max_len)",
    "causal_mask": "maskwise.Mask.causal(length)",
    "tril": "maskwise.Mask.causal(length)",
    "lengths": "maskwise.Mask.from_lengths(lengths, max_len), or mask.lengths",
    "pad_sequence": "maskwise.Packed.from_list(sequences).unpack()",
    "pack_sequence": "maskwise.Packed.from_list(sequences)",
    "pack_padded_sequence": "maskwise.pack(x, maskwise.Mask.from_lengths(lengths, max_len))",
    "pad_packed_sequence": "maskwise.Packed.from_packed_sequence(sequence).unpack()",
    "PackedSequence": "maskwise.Packed.from_packed_sequence(sequence)",
    "prune": "maskwise.nn.prune(model, 0.9)",
    "attach": "maskwise.nn.attach(layer, mask)",
    "gates": "maskwise.nn.gates",
    "Linear": "maskwise.nn.MaskedLinear(inputs, outputs, gate=mask), or maskwise.nn.SparseLinear",
    **dict.fromkeys(("MaskedLinear", "SparseLinear", "MaskedLayerNorm", "MaskedMeanPool"), "maskwise.nn.{name}"),
    **dict.fromkeys(("from_lengths", "from_indices", "from_values", "from_segments", "causal", "window"), _MASK),
    **dict.fromkeys(
        ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "binary_cross_entropy_with_logits", "kl_div"), _LOSS
    ),
    **dict.fromkeys(
        ("exp", "log", "sqrt", "abs", "sigmoid", "tanh", "relu", "neg"), "maskwise.apply(torch.{name}, x, mask=mask)"
    ),
    **dict.fromkeys(("gelu", "silu"), "maskwise.apply(torch.nn.functional.{name}, x, mask=mask)"),
}

#: Functions that need a dim.
_ALONG_ONE = ("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")


def instead_of(name: str, public: Sequence[str]) -> str:
    """The hint for a name that is not there: what does it, else the nearest of the public names.

    >>> instead_of("masked_mean", ["mean", "median"]), instead_of("summ", ["sum"]), instead_of("x", ["sum"])
    ('maskwise.mean(x, mask)', 'maskwise.sum', 'dir(maskwise)')
    """
    if name in _GUESSES:
        return _GUESSES[name].format(name=name)
    bare = name.removeprefix("masked_").removesuffix("_masked")
    if bare != name and bare in public:
        return f"maskwise.{bare}(x, mask, dim=-1)" if bare in _ALONG_ONE else f"maskwise.{bare}(x, mask)"
    if bare != name and bare in _GUESSES:
        return _GUESSES[bare].format(name=bare)
    near = get_close_matches(name, public, 1)
    return f"maskwise.{near[0]}" if near else "dir(maskwise)"
