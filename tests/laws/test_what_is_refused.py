"""Tensors that no function serves: nested, sparse, without data, unsigned. Each is refused by us, with a hint."""

import warnings

import pytest
import torch
from torch.nn import functional as F

import maskwise as mw
from maskwise import Mask
from maskwise.errors import ArgumentError, DeviceError, DtypeError
from tests.laws.samples import UNDER_LAW, outputs
from tests.laws.test_plain_tensors import caller, example

x, keep = example()
WEIGHT = torch.randn(4, 6)
TOKENS = torch.randn(1, 1, 4, 6)


def own(input, target, reduction):
    return (input - target) ** 2


#: Everything that takes a tensor and a mask, as ``call(x, mask)``.
CALLS = {
    **{function.name: caller(function) for function in UNDER_LAW if function.name != "loss"},
    "loss": lambda x, mask: mw.loss(F.mse_loss, x, torch.zeros(4, 6, device=meta_of(x)), mask),
    "loss of a target": lambda x, mask: mw.loss(F.mse_loss, torch.zeros(4, 6, device=meta_of(x)), x, mask),
    "loss of two inputs": lambda x, mask: mw.loss(F.margin_ranking_loss, (x, x), x, mask),
    "loss of one's own": lambda x, mask: mw.loss(own, x, torch.zeros(4, 6, device=meta_of(x)), mask),
    "linear": lambda x, mask: mw.linear(torch.zeros(2, 6, device=meta_of(x)), x, mask),
    "apply": lambda x, mask: mw.apply(torch.tanh, x, mask=mask),
    "apply_": lambda x, mask: mw.apply_(torch.tanh, x.clone(), mask=mask),
    "pack": lambda x, mask: mw.pack(x, mask, capacity=24).values,
    "MaskedMeanPool": lambda x, mask: mw.nn.MaskedMeanPool(dim=1)(x, mask),
    "MaskedMaxPool": lambda x, mask: mw.nn.MaskedMaxPool(dim=1)(x, mask),
    "MaskedLayerNorm": lambda x, mask: mw.nn.MaskedLayerNorm(6, device=meta_of(x))(x, mask),
}
#: What takes only one of them.
OF_X = {
    "linear of x": lambda x: mw.linear(x, WEIGHT, torch.ones(4, 6, dtype=torch.bool)),
    "MaskedLinear": lambda x: mw.nn.MaskedLinear(6, 4)(x),
    "SparseLinear": lambda x: mw.nn.SparseLinear(6, 4, density=0.5)(x),
    "attention": lambda x: mw.attention(x, TOKENS, TOKENS),
    "conv1d": lambda x: mw.conv1d(x, WEIGHT[:, :, None]),
    "conv_transpose1d": lambda x: mw.conv_transpose1d(x, WEIGHT[:, :, None]),
    "Mask.from_additive": Mask.from_additive,
    "Mask.from_attention_mask": Mask.from_attention_mask,
    "Mask.from_values": lambda x: Mask.from_values(x, [1.0]),
    "Mask.from_lengths": lambda x: Mask.from_lengths(x, 4),
    "apply with more": lambda more: mw.apply(torch.add, x, more, mask=keep),
}
OF_MASK = {
    "Mask": Mask,
    "count": mw.count,
    "count along a dim": lambda mask: mw.count(mask, dim=-1),
    "and": lambda mask: Mask.full((4, 6)) & mask,
    "attention": lambda mask: mw.attention(TOKENS, TOKENS, TOKENS, mask),
    "conv2d": lambda mask: mw.conv2d(TOKENS, TOKENS, mask=mask),
    "outputs of conv2d": lambda outputs: mw.conv2d(TOKENS, TOKENS, outputs=outputs),
}


def meta_of(x):
    return "meta" if x.device.type == "meta" else None


def csr(tensor):
    with warnings.catch_warnings():
        # Torch's own, that these are in beta.
        warnings.simplefilter("ignore")
        return tensor.to_sparse_csr()


LAYOUTS = {
    "coo": lambda tensor: tensor.to_sparse(),
    "csr": csr,
    "nested": lambda tensor: torch.nested.nested_tensor([tensor[0], tensor[1][:3]], layout=torch.strided),
    "jagged": lambda tensor: torch.nested.nested_tensor([tensor[0], tensor[1][:3]], layout=torch.jagged),
}
ODD = [
    *(pytest.param(lambda odd, call=call: call(odd(x), keep), id=f"{name}-x") for name, call in CALLS.items()),
    *(pytest.param(lambda odd, call=call: call(x, odd(keep)), id=f"{name}-mask") for name, call in CALLS.items()),
    *(pytest.param(lambda odd, call=call: call(odd(x)), id=name) for name, call in OF_X.items()),
    *(pytest.param(lambda odd, call=call: call(odd(keep)), id=f"{name}-mask") for name, call in OF_MASK.items()),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", ODD)
def test_a_nested_or_sparse_tensor_is_refused_with_what_to_write_instead(call, layout):
    hint = "to_dense" if layout in ("coo", "csr") else "to_padded_tensor"
    with pytest.raises(ArgumentError, match=rf"must be a dense tensor, got .*Hint: .*{hint}"):
        call(LAYOUTS[layout])


# -- the meta device ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CALLS)
def test_a_result_whose_shape_no_data_decide_is_computed_on_meta(name):
    found = outputs(CALLS[name](x.to("meta"), keep.to("meta")))
    expected = outputs(CALLS[name](x, keep))
    assert [(each.device.type, each.shape, each.dtype) for each in found] == [
        ("meta", each.shape, each.dtype) for each in expected
    ]


ON_META = {
    "dense": lambda: Mask(torch.ones(2, 3, dtype=torch.bool, device="meta")),
    "lengths": lambda: Mask.from_lengths(torch.tensor([1, 3], device="meta"), max_len=3),
    "segments": lambda: Mask.from_segments(torch.tensor([0, 0, 1], device="meta")),
}
DATA = {
    "count": lambda mask: mask.count(),
    "density": lambda mask: mask.density,
    "is_full": lambda mask: mask.is_full,
    "is_empty": lambda mask: mask.is_empty,
    "indices": lambda mask: mask.indices(),
    "to_numpy": lambda mask: mask.to_numpy(),
    "to_cu_seqlens": lambda mask: mask.to_cu_seqlens(),
    "to": lambda mask: mask.to("cpu"),
    "equal": lambda mask: mask.equal(~mask),
    "bool": lambda mask: bool(mask[0, 0]),
}


@pytest.mark.parametrize("asked", DATA)
@pytest.mark.parametrize("kind", ON_META)
def test_what_depends_on_values_is_refused_on_meta(kind, asked):
    with pytest.raises(DeviceError, match=r"must be on a device that holds values, got meta.*Hint: "):
        DATA[asked](ON_META[kind]())


@pytest.mark.parametrize("kind", ON_META)
def test_pack_on_meta_wants_a_capacity(kind):
    mask = ON_META[kind]()
    given = torch.zeros(*mask.shape, 5, device="meta")
    with pytest.raises(ArgumentError, match=r"`capacity` must be given on the meta device.*Hint: capacity="):
        mw.pack(given, mask)
    assert mw.pack(given, mask, capacity=4).values.shape == (4, 5)


def test_what_lies_on_the_host_is_known_on_meta():
    mask = Mask.from_lengths([1, 3], max_len=4, device="meta")
    assert (mask.count(), mask.density, mask.is_full) == (4, 0.5, False)
    assert mask.indices().shape == (4, 2)
    assert mask.to_numpy().tolist() == [[True, False, False, False], [True, True, True, False]]
    assert mask.to("cpu").equal(Mask.from_lengths([1, 3], max_len=4))
    assert mw.pack(torch.zeros(2, 4, 5, device="meta"), mask).values.shape == (4, 5)


# -- unsigned integers -------------------------------------------------------------------------------------------------
INTEGERS = torch.tensor([[5, 3, 9, 1, 1, 0], [2, 2, 7, 200, 4, 6], [8, 9, 1, 3, 0, 2], [4, 4, 4, 1, 9, 255]])
#: What an empty slice gives is the least or the greatest of the dtype, so every row keeps its first.
KEPT = torch.tensor([1, 1, 0, 1, 0, 1]).bool().expand(4, 6)


UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
ORDERED = ["sort", "topk", "median", "amax", "amin", "argmax", "argmin", "cummax", "cummin"]
SERVED = [function.name for function in UNDER_LAW if function.unsigned]
BY_NAME = {function.name: function for function in UNDER_LAW}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.uint8) for name in ORDERED), *((n, d) for n in SERVED for d in UNSIGNED)]
)
def test_unsigned_integers_give_what_signed_ones_give(name, dtype):
    try:
        torch.where(KEPT, INTEGERS.to(dtype), 0)
    except NotImplementedError:
        pytest.skip(f"this torch has no where of {dtype}")
    call = caller(BY_NAME[name])
    for mine, theirs in zip(outputs(call(INTEGERS.to(dtype), KEPT)), outputs(call(INTEGERS, KEPT)), strict=True):
        torch.testing.assert_close(mine.double(), theirs.double())


@pytest.mark.parametrize("name", sorted({*BY_NAME} - {*SERVED, "loss"}))
@pytest.mark.parametrize("dtype", UNSIGNED)
def test_what_torch_cannot_order_or_divide_is_refused(name, dtype):
    wanted = r"have a dtype that torch can sort.*Hint: x.long\(\)" if name in ORDERED else "be floating.*Hint: .*float"
    with pytest.raises(DtypeError, match=wanted):
        caller(BY_NAME[name])(INTEGERS.to(dtype), KEPT)
