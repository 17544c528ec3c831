"""What holds for every gate. A test class of a gate writes `make`, and inherits the rest."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import maskwise as mw
from maskwise.errors import DtypeError
from maskwise.nn.gates import Gate

X = (7, 8)
SHAPE = (6, 8)


def poisoned(weight: torch.Tensor, kept: torch.Tensor, value: float) -> torch.Tensor:
    """The weight with a value where it is dropped."""
    return torch.where(kept, weight, value)


class GateConformance:
    #: Whether the effective weight is the weight itself where it is kept.
    hard = True
    #: Whether what is kept is decided anew by every weight that comes.
    follows_weight = False

    def make(self) -> Gate:
        """A gate that drops some of `SHAPE`, and not all."""
        raise NotImplementedError("a suite says here which gate it is for")

    def layer(self, dtype: torch.dtype = torch.float32) -> nn.Linear:
        torch.manual_seed(3)
        return mw.nn.attach(nn.Linear(8, 6).to(dtype), self.make())

    def gate(self, layer: nn.Module) -> Gate:
        return layer.parametrizations.weight[0]

    def original(self, layer: nn.Module) -> nn.Parameter:
        return layer.parametrizations.weight.original

    def dropped(self, layer: nn.Module) -> torch.Tensor:
        """Where the effective weight of evaluation is 0."""
        with torch.no_grad():
            return layer.eval().weight == 0

    # -- the effective weight and the mask -----------------------------------------------------------------------------
    def test_the_mask_is_a_mask_of_the_weights_shape_that_drops_some(self):
        layer = self.layer()
        mask = self.gate(layer).mask(self.original(layer))
        assert isinstance(mask, mw.Mask)
        assert mask.shape == SHAPE
        assert 0 < mask.count() < mask.numel()

    def test_the_effective_weight_is_the_weight_where_kept_and_exactly_zero_elsewhere(self):
        layer = self.layer().eval()
        kept = self.gate(layer).mask(self.original(layer)).to_bool()
        effective = layer.weight
        assert effective.dtype is torch.float32
        assert effective.shape == SHAPE
        if self.hard:
            assert torch.equal(effective, torch.where(kept, self.original(layer), 0.0))
        assert torch.equal(effective[self.dropped(layer)], torch.zeros(int(self.dropped(layer).sum())))

    def test_a_mask_that_was_taken_stays_what_it_was_when_the_gate_changes(self):
        layer = self.layer()
        mask = self.gate(layer).mask(self.original(layer))
        before = mask.to_bool().clone()
        for tensor in (*self.gate(layer).parameters(), *self.gate(layer).buffers()):
            tensor.detach().zero_()
        assert torch.equal(mask.to_bool(), before)

    @pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
    def test_poison_in_dropped_weights_changes_no_bit_of_outputs_or_gradients(self, poison):
        layer, x = self.layer(), torch.randn(X)
        dropped = self.dropped(layer)
        if self.follows_weight and poison == poison:
            pytest.skip("what is large is not dropped by this gate")
        found = []
        for value in (0.0, poison):
            other = copy.deepcopy(layer).eval()
            with torch.no_grad():
                self.original(other)[dropped] = value
            leaf = x.clone().requires_grad_()
            out = other(leaf)
            found.append([out.detach(), *torch.autograd.grad(out.square().sum(), [leaf, *other.parameters()])])
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)
            assert a.isfinite().all()

    # -- gradients -----------------------------------------------------------------------------------------------------
    def test_gradients_are_those_of_the_dense_product_in_float64(self):
        layer, x = self.layer(torch.float64).eval(), torch.randn(X, dtype=torch.float64)
        original, gate = self.original(layer), self.gate(layer)
        out = layer(x)
        scale = torch.linspace(0.5, 2.0, out.numel(), dtype=torch.float64).reshape(out.shape)
        (found,) = torch.autograd.grad((out * scale).sum(), original)
        dense = scale.mT @ x
        if gate.straight_through:
            expected = dense
        elif self.hard:
            expected = torch.where(gate.mask(original).to_bool(), dense, 0.0)
        else:
            expected = dense * gate.opening(original).detach()
        # One product of the same numbers in another order.
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)

    def test_parameters_of_the_gate_always_get_gradients(self):
        layer = self.layer()
        gate = self.gate(layer)
        loss = layer(torch.randn(X)).square().sum()
        if hasattr(gate, "penalty"):
            loss = loss + gate.penalty()
        loss.backward()
        for parameter in gate.parameters():
            assert (parameter.grad != 0).all()

    @pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
    def test_no_optimizer_revives_what_is_dropped(self, optimizer):
        layer = self.layer()
        gate, original = self.gate(layer), self.original(layer)
        if gate.straight_through or not self.hard:
            pytest.skip("what is dropped gets gradients here, as straight_through requires")
        makers = {
            "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
        }
        optimizer = makers[optimizer](layer.parameters())
        # The optimizer has seen the dense weight's gradients: its momentum points everywhere.
        original.grad = torch.ones_like(original)
        optimizer.step()
        before = gate.mask(original).to_bool()
        for _ in range(5):
            optimizer.zero_grad()
            layer(torch.randn(X)).square().sum().backward()
            assert torch.equal(original.grad[~before], torch.zeros(int((~before).sum())))
            optimizer.step()
            assert torch.equal(layer.weight[~before], torch.zeros(int((~before).sum())))

    # -- copies, graphs, dtypes ----------------------------------------------------------------------------------------
    @pytest.mark.parametrize(
        "make_copy", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
    )
    def test_copies_are_equal_and_stand_on_their_own(self, make_copy):
        layer, x = self.layer().eval(), torch.randn(X)
        # A graph that hangs on the module must not keep it from being copied.
        layer(x).sum().backward()
        other = make_copy(layer)
        assert torch.equal(other(x), layer(x))
        mw.nn.detach(other)
        assert type(other) is nn.Linear
        assert torch.equal(other(x), layer(x))

    def test_the_state_dict_brings_the_topology_under_stable_keys(self):
        layer, x = self.layer().eval(), torch.randn(X)
        state = layer.state_dict()
        assert {"bias", "parametrizations.weight.original"} <= state.keys()
        other = mw.nn.attach(nn.Linear(8, 6), self.make()).eval()
        other.load_state_dict(state)
        assert torch.equal(other(x), layer(x))
        assert self.gate(other).mask(self.original(other)).equal(self.gate(layer).mask(self.original(layer)))

    # Dynamo makes an instance of autograd.Function, which torch itself warns of.
    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
    def test_it_compiles_into_one_graph_with_the_eager_results(self):
        torch._dynamo.reset()
        layer, x = self.layer().eval(), torch.randn(X)
        found = []
        for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
            out = call(x)
            found.append([out.detach(), *torch.autograd.grad(out.square().sum(), list(layer.parameters()))])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)

    def test_autocast_computes_in_bfloat16_and_keeps_float32_gradients(self):
        layer, x = self.layer().eval(), torch.randn(X)
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
        assert out.dtype is torch.bfloat16
        # Eight bits of mantissa, sums of eight.
        torch.testing.assert_close(out.float(), layer(x), rtol=2e-2, atol=2e-2)
        out.float().sum().backward()
        assert self.original(layer).grad.dtype is torch.float32

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
    def test_the_effective_weight_has_the_dtype_of_the_weight(self, dtype):
        layer = self.layer().to(dtype)
        assert layer.weight.dtype is dtype
        assert mw.nn.attach(nn.Linear(8, 6).to(dtype), self.make()).weight.dtype is dtype

    def test_detach_leaves_the_effective_or_the_original_weight_in_the_same_parameter(self):
        for keep in ("masked", "original"):
            layer = self.layer()
            original, before = self.original(layer), self.original(layer).detach().clone()
            effective = layer.eval().weight.detach().clone()
            mw.nn.detach(layer.train(), keep=keep)
            assert type(layer) is nn.Linear
            assert layer.weight is original
            assert torch.equal(layer.weight, effective if keep == "masked" else before)

    def test_a_gate_can_be_attached_again_after_it_was_detached(self):
        layer = self.layer().eval()
        gate, effective = self.gate(layer), layer.weight.detach().clone()
        mw.nn.attach(mw.nn.detach(layer, keep="original"), gate)
        assert torch.equal(layer.weight, effective)

    def test_a_weight_of_ints_is_refused(self):
        module = nn.Module()
        module.register_buffer("weight", torch.ones(SHAPE, dtype=torch.int64))
        with pytest.raises(DtypeError, match=r"must be of a floating dtype, got torch\.int64"):
            mw.nn.attach(module, self.make())
