"""Where torch meets a mask: compiled graphs, pytrees, data loaders, indexing."""

import subprocess
import sys
import warnings

import pytest
import torch
from torch.utils import _pytree
from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from maskwise.errors import ShapeError
from maskwise.mask import Mask

X = torch.arange(12.0).view(3, 4)

MASKS = {
    "dense": lambda: Mask(X % 3 == 0),
    "intervals": lambda: Mask.from_lengths([1, 4, 2]),
    "not": lambda: ~Mask.from_indices([[0, 1], [2, 2]], (3, 4)),
    "combination": lambda: Mask(X % 2 == 0) & Mask.causal(3, 4),
    "view": lambda: Mask.causal(4, 3).T,
    "segments": lambda: Mask.from_segments(torch.tensor([0, 0, 1, -1]))[None, :3][0],
}

USES = {
    "to_bool": lambda m, x: torch.where(m.to_bool(), x, 0.0),
    "where": lambda m, x: torch.where(m, x, 0.0),
    "masked_fill": lambda m, x: x.masked_fill(m, 9.0),
    "and": lambda m, x: torch.where(Mask(x > 1) & m, x, 0.0),
    "tensor and mask": lambda m, x: torch.where((x > 3) & m, x, 0.0),
    "minus": lambda m, x: torch.where(Mask.full((3, 4)) - m, x, 0.0),
    "not": lambda m, x: torch.where(m.logical_not(), x, 0.0),
    "views": lambda m, x: torch.where(m[:, None].expand(-1, 2, -1)[:, 0], x, 0.0),
    "transpose": lambda m, x: torch.where(m.T.mT, x, 0.0),
    "lengths": lambda m, x: x * m.lengths[:, None],
    "additive": lambda m, x: x + m.to_additive(),
}

BUILDS = {
    "bool": lambda x: Mask(x > 1),
    "lengths": lambda x: Mask.from_lengths(x[:, 0].long().clamp(0, 4), x.shape[1]),
    "list": lambda x: Mask.from_lengths([1, 2, 3], x.shape[1]),
    "indices": lambda x: Mask.from_indices([[0, 1], [2, 2]], (3, 4)),
    "values": lambda x: Mask.from_values(x, [1, 2]),
    "segments": lambda x: Mask.from_segments((x[0] // 2).long())[:3],
    "function": lambda x: Mask.from_function(lambda q, k: k <= q, (3, 4)),
    "causal": lambda x: Mask.causal(x.shape[0], x.shape[1]),
    "window": lambda x: Mask.window(x.shape[0], 1, k=x.shape[1]),
    "full": lambda x: Mask.full(x.shape),
    "attention mask": lambda x: Mask.from_attention_mask((x > 2).long()),
    "causal & lengths": lambda x: Mask.causal(3, 4) & Mask.from_lengths(x[:, 0].long().clamp(0, 4), 4),
}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", ["dense", "intervals"])
def test_compiled_functions_take_masks(kind, use):
    expected = USES[use](MASKS[kind](), X)
    compiled = torch.compile(USES[use], fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(MASKS[kind](), X), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["not", "combination", "view", "segments"])
def test_compiled_functions_take_masks_of_every_other_structure(kind):
    for use in (USES["views"], USES["lengths"]):
        compiled = torch.compile(use, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(MASKS[kind](), X), use(MASKS[kind](), X), rtol=0, atol=0)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_functions_make_masks(build, dynamic):
    def use(x):
        return torch.where(BUILDS[build](x), x, 0.0)

    compiled = torch.compile(use, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    torch.testing.assert_close(compiled(X), use(X), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["dense", "intervals"])
def test_compiled_gradients_flow_past_a_mask(kind):
    x = X.clone().requires_grad_()
    compiled = torch.compile(lambda m, x: torch.where(m, x, 0.0).sum(), fullgraph=True, backend="aot_eager")
    compiled(MASKS[kind](), x).backward()
    assert torch.equal(x.grad, MASKS[kind]().to_bool().float())


def test_nothing_is_remembered_while_compiling():
    mask = Mask.from_lengths([1, 4, 2])
    torch.compile(lambda m, x: torch.where(m, x, m.lengths[:, None]), fullgraph=True, backend="eager")(mask, X)
    assert not mask._cache


def test_indexing_with_a_small_mask_warns_of_nothing():
    mask = Mask.from_lengths(2, 3)
    x = torch.arange(3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert x[mask].tolist() == [0.0, 1.0]
        x[mask] = 5.0
    assert x.tolist() == [5.0, 5.0, 2.0]


def test_writing_a_mask_into_a_tensor_keeps_it_a_tensor():
    bits = torch.tensor([True, True])
    bits &= Mask.from_lengths(1, 2)
    assert bits.tolist() == [True, False]


def test_bool_of_one_position_is_that_position():
    assert bool(Mask.full((1, 1)))
    assert not Mask.causal(3)[0, 2]


def test_masks_are_hashed_by_identity_and_compared_by_position():
    a, b = Mask.full(2), Mask.full(2)
    assert len({a, b}) == 2
    assert (a == b).is_full
    assert (a != b).is_empty
    assert a.equal(b)
    assert a.equals(b)
    assert not a.equal(Mask.full(3))
    assert not a.equal(torch.tensor([True, False]))


def test_masks_compare_with_numbers_and_tensors_as_bool_tensors_do():
    mask = Mask.from_lengths([1, 3])
    bits = mask.to_bool()
    for other in (True, False, 0, 1, 1.0, 2, bits[:1], bits.int(), torch.tensor([0.5, 1.0, 0.0])):
        for found, expected in ((mask == other, bits == other), (mask != other, bits != other)):
            assert isinstance(found, Mask)
            assert torch.equal(found.to_bool(), expected)
    assert isinstance(bits.int() == mask, Mask)
    assert mask != None  # noqa: E711 - as code that tests an optional mask may write
    assert (mask == None) is False  # noqa: E711
    assert (mask == "mask") is False


def test_two_masks_of_intervals_compare_without_a_bool_tensor():
    differing = Mask.causal(100_000) != Mask.window(100_000, left=1)
    assert differing[5].to_bool()[:8].tolist() == [True] * 4 + [False] * 4


def test_sum_any_and_all_of_intervals_come_from_their_bounds():
    mask = Mask.causal(100_000)
    assert mask.sum() == 100_000 * 100_001 // 2
    assert torch.equal(mask.sum(0), torch.arange(100_000, 0, -1))
    assert (bool(mask.any()), bool(mask.all())) == (True, False)
    assert mask.all(0).nonzero().tolist() == [[0]]
    assert mask.any(-1).all()


def test_sum_any_all_and_float_trace_into_a_graph():
    def call(mask):
        return mask.sum(), mask.any(-1), mask.all(0, keepdim=True), mask.float()

    torch._dynamo.reset()
    mask = Mask.from_lengths([1, 3])
    for found, expected in zip(torch.compile(call, fullgraph=True, backend="eager")(mask), call(mask), strict=True):
        assert torch.equal(found, expected)


def test_a_data_loader_stacks_masks():
    rows = [{"x": torch.ones(4), "mask": Mask.from_lengths(n, 4)} for n in (1, 3, 2, 4)]
    batches = list(DataLoader(rows, batch_size=2))
    assert [b["mask"].lengths.tolist() for b in batches] == [[1, 3], [2, 4]]
    assert batches[0]["mask"].facts.kind == "intervals"
    assert default_collate([Mask(torch.tensor([True])), Mask(torch.tensor([False]))]).to_bool().tolist() == [
        [True],
        [False],
    ]


def test_worker_processes_send_masks():
    rows = [Mask.from_lengths(n, 4) for n in (1, 3)]
    (batch,) = DataLoader(rows, batch_size=2, num_workers=1)
    assert batch.lengths.tolist() == [1, 3]


def test_pinning_pins_the_tensors_that_the_mask_is_made_of(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: pinned.append(t) or t.clone())
    mask = Mask.from_lengths([1, 3])
    assert pin_memory({"mask": mask})["mask"].equal(mask)
    assert [t.tolist() for t in pinned] == [[1, 3]]


def test_mapping_the_leaves_to_another_device_takes_the_mask_along():
    mask = _pytree.tree_map(lambda t: t.to("meta"), Mask.from_lengths([1, 3]))
    assert mask.device.type == "meta"
    assert mask.to_bool().device.type == "meta"


def test_leaves_may_be_mapped_to_anything():
    mapped = _pytree.tree_map(lambda t: t.shape, {"m": Mask.from_lengths([1, 3]), "d": Mask(torch.tensor([True]))})
    assert _pytree.tree_leaves(mapped) == [2, 1]


def test_vmap_runs_over_dense_masks_and_refuses_structures():
    mask = Mask.from_lengths([1, 3])
    sums = torch.vmap(lambda m, x: torch.where(m, x, 0.0).sum())(Mask(mask.to_bool()), torch.ones(2, 3))
    assert sums.tolist() == [1.0, 3.0]
    with pytest.raises(ShapeError, match=r"Hint: pass mask.to_bool\(\) to vmap"):
        torch.vmap(lambda m: m.to_bool())(mask)


def test_moving_keeps_the_same_mask_where_there_is_nothing_to_move():
    mask = Mask.from_lengths([1, 3])
    assert mask.to("cpu") is mask
    assert mask.cpu() is mask
    assert mask.to(torch.ones(1, device="meta")).device.type == "meta"


def test_importing_maskwise_imports_nothing_heavy():
    heavy = ["torch.nn.attention.flex_attention", "numpy.ma", "rich", "torch._dynamo", "triton"]
    code = "import sys, torch; before = set(sys.modules); import maskwise.mask; print(*(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not set(heavy) & set(loaded)
