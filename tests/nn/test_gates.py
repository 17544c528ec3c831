"""Every gate under the conformance suite, and what each does that others do not."""

import math

import pytest
import torch
from torch import nn

import maskwise as mw
from maskwise.errors import ArgumentError, DtypeError, OutOfRangeError, ShapeError
from maskwise.nn.gates import NM, Binary, Block, Gate, HardConcrete, Sigmoid, Threshold, TopK
from tests.nn.gate_conformance import SHAPE, GateConformance

BITS = torch.arange(48).reshape(SHAPE) % 3 == 0


class TestBinary(GateConformance):
    def make(self):
        return Binary(mw.Mask(BITS))


class TestBinaryBroadcast(GateConformance):
    def make(self):
        return Binary(BITS[:, :1])


class TestThreshold(GateConformance):
    follows_weight = True

    def make(self):
        return Threshold(0.15)


class TestThresholdByValue(GateConformance):
    follows_weight = True

    def make(self):
        return Threshold(0.0, by="value", straight_through=False)


class TestTopK(GateConformance):
    def make(self):
        return TopK(0.3)


class TestTopKStraightThrough(GateConformance):
    def make(self):
        return TopK(0.3, straight_through=True)


class TestNM(GateConformance):
    def make(self):
        return NM(2, 4)


class TestBlock(GateConformance):
    def make(self):
        return Block((4, 1), 0.25)


class TestSigmoid(GateConformance):
    hard = False

    def make(self):
        # Shut, half-shut and open: -inf is exactly 0, and its gradient with it, so it is left to the last row.
        return Sigmoid(torch.linspace(-3.0, 3.0, 48).reshape(SHAPE))


class TestHardConcrete(GateConformance):
    hard = False

    def make(self):
        return HardConcrete(torch.linspace(-6.0, 6.0, 48).reshape(SHAPE))


class Positive(Gate):
    """A gate that a user might write."""

    def bits(self, weight):
        return weight > 0


class TestOfAUser(GateConformance):
    follows_weight = True

    def make(self):
        return Positive()


# -- what each keeps ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("density", [0.0, 0.01, 0.1, 1 / 3, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("shape", [(7, 9), (3, 2, 3, 3), (13,), (1, 1)])
def test_topk_keeps_exactly_its_share_and_nothing_smaller_than_what_it_drops(shape, density):
    weight = torch.randn(shape)
    kept = TopK(density).mask(weight).to_bool()
    assert kept.sum() == round(density * weight.numel())
    if 0 < kept.sum() < weight.numel():
        assert weight.abs()[kept].min() >= weight.abs()[~kept].max()


def test_topk_of_equal_weights_keeps_exactly_its_share_and_the_first():
    assert TopK(0.5).mask(torch.ones(2, 4)).to_bool().int().tolist() == [[1, 1, 1, 1], [0, 0, 0, 0]]


def test_topk_takes_nan_last():
    weight = torch.tensor([float("nan"), 0.0, float("-inf"), 1.0])
    assert TopK(0.75).mask(weight).to_bool().tolist() == [False, True, True, True]


def test_a_gate_without_a_weight_of_its_own_chooses_from_whatever_it_is_given():
    gate = TopK(0.5)
    for weight in (torch.tensor([1.0, 2.0]), torch.tensor([[2.0], [1.0]])):
        assert gate.mask(weight).equal(mw.Mask(weight == 2.0))


def test_a_gate_that_is_attached_holds_its_choice_until_it_is_asked_again():
    layer = mw.nn.attach(nn.Linear(4, 4), TopK(0.25))
    gate, original = layer.parametrizations.weight[0], layer.parametrizations.weight.original
    before = gate.mask(original)
    with torch.no_grad():
        original.copy_(torch.arange(16.0).reshape(4, 4))
    assert gate.mask(original).equal(before)
    gate.select(original)
    assert gate.mask(original).equal(mw.Mask(original >= 12))


def test_nm_keeps_the_n_largest_of_every_m_along_the_input():
    weight = torch.randn(5, 12, 3, 3)
    kept = NM(2, 4).mask(weight).to_bool()
    groups, sizes = kept.movedim(1, -1).unflatten(-1, (3, 4)), weight.abs().movedim(1, -1).unflatten(-1, (3, 4))
    assert torch.equal(groups.sum(-1), torch.full((5, 3, 3, 3), 2))
    least = sizes.masked_fill(~groups, torch.inf).amin(-1)
    assert (least >= sizes.masked_fill(groups, -torch.inf).amax(-1)).all()


def test_nm_goes_along_another_dim_when_told_to():
    assert NM(1, 2, dim=0).mask(torch.tensor([[1.0], [2.0]])).to_bool().tolist() == [[False], [True]]


@pytest.mark.parametrize("size", [(4, 1), (2, 3), 5, (16, 16)])
def test_block_keeps_whole_blocks_of_the_largest_mean_also_at_the_edges(size):
    weight = torch.randn(9, 11)
    rows, columns = (size, size) if isinstance(size, int) else size
    kept = Block(size, 0.4).mask(weight).to_bool()
    means, bits = [], []
    for i in range(0, 9, rows):
        for j in range(0, 11, columns):
            block = kept[i : i + rows, j : j + columns]
            assert block.all() or not block.any()
            means.append(weight[i : i + rows, j : j + columns].abs().mean())
            bits.append(bool(block.all()))
    means, bits = torch.stack(means), torch.tensor(bits)
    assert bits.sum() == round(0.4 * len(bits))
    if 0 < bits.sum() < len(bits):
        assert means[bits].min() >= means[~bits].max()


def test_block_sees_a_convolution_as_outputs_by_everything_else():
    weight = torch.randn(8, 4, 3, 3)
    expected = Block((4, 2), 0.25).mask(weight.flatten(1)).to_bool().reshape(weight.shape)
    assert torch.equal(Block((4, 2), 0.25).mask(weight).to_bool(), expected)


def test_threshold_compares_in_the_dtype_of_the_weight():
    weight = torch.tensor([0.1], dtype=torch.float64)
    assert Threshold(0.1).mask(weight).count() == 0
    assert Threshold(0.1).mask(weight.nextafter(torch.tensor(1.0).double())).count() == 1


def test_the_threshold_can_be_changed_and_is_in_the_state_dict():
    layer = mw.nn.attach(nn.Linear(4, 4), Threshold(0.0))
    layer.parametrizations.weight[0].threshold.fill_(100.0)
    assert (layer.weight == 0).all()
    assert layer.state_dict()["parametrizations.weight.0.threshold"] == 100.0


# -- learned gates -----------------------------------------------------------------------------------------------------
def test_a_learned_gate_gets_its_gradient_through_the_layer():
    # The third example of the text where this began: there, `.data =` cut the gradient off.
    layer = nn.Linear(10, 5)
    mw.nn.attach(layer, Sigmoid(torch.randn(5, 10)))
    logits, x = layer.parametrizations.weight[0].logits, torch.randn(1, 10)
    layer(x).sum().backward()
    original = layer.parametrizations.weight.original
    opening = logits.detach().sigmoid()
    torch.testing.assert_close(logits.grad, x.expand(5, 10) * original.detach() * opening * (1 - opening))
    torch.testing.assert_close(original.grad, x.expand(5, 10) * opening)


def test_hard_concrete_draws_in_training_and_is_deterministic_in_evaluation():
    layer = mw.nn.attach(nn.Linear(50, 50), HardConcrete(0.0))
    assert not torch.equal(layer.weight, layer.weight)
    layer.eval()
    assert torch.equal(layer.weight, layer.weight)


def test_hard_concrete_draws_exact_zeros_and_ones_as_often_as_its_penalty_says():
    weight = torch.ones(400, 500)
    for start in (-1.0, 0.0, 1.5):
        gate = HardConcrete(start)
        gate.bind(weight)
        opening = gate(weight).detach()
        expected = gate.penalty().item() / weight.numel()
        # 200,000 draws: a standard deviation of at most 0.0012.
        assert abs((opening > 0).float().mean().item() - expected) < 0.005
        assert expected == pytest.approx(1 / (1 + math.exp(-start + 2 / 3 * math.log(0.1 / 1.1))))
        assert (opening == 1).any()


def test_penalties_need_a_weight_and_say_so():
    with pytest.raises(ArgumentError, match=r"HardConcrete.penalty: `gate` must belong to a weight"):
        HardConcrete().penalty()


# -- errors ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("module", "mask", "hint"),
    [
        (nn.Linear(10, 5), (10, 5), r"mask\.T"),
        (nn.Conv2d(3, 8, 5), (3, 8, 5, 5), r"mask\.transpose\(0, 1\)"),
        (nn.Conv2d(3, 8, 5), (8,), r"mask\[\.\.\., None, None, None\]"),
        (nn.Linear(10, 5), (5,), r"mask\[\.\.\., None\]"),
        (nn.Linear(10, 5), (4, 10), "sizes line up"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused_with_what_would(module, mask, hint):
    before = list(module.state_dict())
    shape = rf"\({', '.join(map(str, module.weight.shape))}\)"
    with pytest.raises(ShapeError, match=rf"Binary: `mask` must broadcast to weight's shape {shape}.*Hint: {hint}"):
        mw.nn.attach(module, Binary(torch.ones(mask, dtype=torch.bool)))
    assert list(module.state_dict()) == before
    assert type(module) in (nn.Linear, nn.Conv2d)


def test_a_transposed_start_of_a_learned_gate_is_refused_with_what_would_fit():
    with pytest.raises(ShapeError, match=r"Sigmoid: `init` .* Hint: init\.T\."):
        mw.nn.attach(nn.Linear(10, 5), Sigmoid(torch.randn(10, 5)))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: Binary(torch.ones(2)),
            DtypeError,
            r"Binary: `mask` must be a Mask or a bool tensor, got torch.float32",
        ),
        (lambda: Binary([True]), DtypeError, "got list"),
        (lambda: Threshold("a"), DtypeError, "Threshold: `t` must be a number, got str"),
        (lambda: Threshold(float("nan")), ArgumentError, "Threshold: `t`"),
        (lambda: Threshold(0.1, by="size"), ArgumentError, 'Threshold: `by` must be "magnitude" or "value"'),
        (lambda: TopK(10), ArgumentError, r"TopK: `density` must be between 0 and 1, got 10. Hint: density=0.1"),
        (lambda: TopK(-0.1), ArgumentError, "between 0 and 1, got -0.1"),
        (lambda: TopK(float("nan")), ArgumentError, "between 0 and 1, got nan"),
        (lambda: TopK("half"), DtypeError, "TopK: `density` must be a number, got str"),
        (lambda: TopK(0.1, scope="model"), ArgumentError, 'TopK: `scope` must be "layer" or "global"'),
        (lambda: NM(5, 4), ArgumentError, "NM: `n` must be an int from 0 to m"),
        (lambda: NM(2, 4)(torch.ones(2, 6)), ShapeError, r"multiple of m = 4, got \(2, 6\). Hint: NM\(2, 3\)"),
        (lambda: NM(2, 4)(torch.ones(8)), OutOfRangeError, r"NM: `dim` .* Hint: NM\(2, 4, dim=0\)"),
        (lambda: Block(0, 0.1), ArgumentError, "Block: `size` must be one or two positive ints, got 0"),
        (lambda: Block((1, 2, 3), 0.1), ArgumentError, "Block: `size`"),
        (lambda: Sigmoid("open"), DtypeError, "Sigmoid: `init` must be a number or a tensor, got str"),
        (lambda: Sigmoid(torch.ones(2).int()), DtypeError, "Sigmoid: `init` must be of a floating dtype"),
        (lambda: HardConcrete(temperature=0), ArgumentError, "HardConcrete: `temperature` must be positive"),
        (lambda: HardConcrete(stretch=(0.0, 1.1)), ArgumentError, "HardConcrete: `stretch` must reach below 0"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
