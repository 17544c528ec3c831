"""A linear layer that holds only the weights that live."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from maskwise.distributed.group import Group, broadcast, is_sharded, whole
from maskwise.errors import ArgumentError, ShapeError, StaleMaskError, say
from maskwise.mask import Mask
from maskwise.nn.arguments import check_features, check_linear
from maskwise.nn.topology import (
    carry,
    fingerprint,
    indices_of,
    layout_from,
    layout_problem,
    mask_bits,
    random_layout,
    seal,
)
from maskwise.ops.arguments import MaskLike
from maskwise.ops.linear import (
    BLOCKS,
    Block,
    Product,
    SparseLayout,
    is_two_of_four,
    multiply,
    product_routes,
    semi_structured,
)
from maskwise.ops.torch_private import has_dispatch_modes, is_tracing, is_transformed, is_vmapped_or_functional
from maskwise.plan import dispatch
from maskwise.plan.dispatch import Decision, Facts, Plan, Skips
from maskwise.plan.explain import record

__all__ = ["SparseLinear"]

_OP = "SparseLinear"
# Bound here, because an attribute look-up takes a tiny call longer than the call itself.
_cached, _forced, _is_any_forced = dispatch.cache.get, dispatch.forced, dispatch.is_any_forced
_is_any_observing = dispatch.is_any_observing


class SparseLinear(nn.Module):
    """``torch.nn.Linear`` of which only some weights exist: ``values``, a Parameter of one dim.

    >>> import torch, maskwise as mw
    >>> linear = torch.nn.Linear(3, 2, bias=False)
    >>> with torch.no_grad():
    ...     _ = linear.weight.copy_(torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]))
    >>> layer = mw.nn.SparseLinear.from_linear(linear)
    >>> layer.values.tolist(), layer.density
    ([1.0, 2.0, 3.0], 0.5)
    >>> layer(torch.tensor([1.0, 10.0, 100.0])).tolist()
    [201.0, 30.0]

    Any optimizer trains it, and nothing that is dropped can come back: it is not there. Forward, the gradient of the
    input and the gradient of the values cost in proportion to what is kept; where so much is kept that the dense
    product is the faster one, that is taken. The state_dict holds ``values``, ``row_starts``, ``columns`` and ``bias``;
    one of another topology can be loaded.

    Values and indices belong together. A complete copy of all parameters and buffers, as DistributedDataParallel makes
    at its start, is taken with its topology. An average (``torch.optim.swa_utils.AveragedModel``) mixes the values of
    two layers place by place, and copies the indices: after the layer was rewired, that is a mix of different weights.
    The averaged layer then raises a StaleMaskError; call ``averaged_layer.set_mask(layer.mask)`` before the next
    update.

    Args:
        in_features: the size of each input.
        out_features: the size of each output.
        bias: whether there is a bias.
        mask: a Mask or a bool tensor of the weight's shape, (out_features, in_features); True means keep. Or else
        density: the share of weights that live, chosen at random.
        block: the weights live in blocks of (1, 1), (4, 1) or (16, 16) outputs and inputs; blocks run faster.
        device: where the parameters are.
        dtype: of the parameters.

    Raises:
        ShapeError: the mask has another shape. For one of (in_features, out_features) the hint is ``mask.T``.
        DtypeError: the mask is not bool.
        ArgumentError: not exactly one of mask and density is given, or the mask keeps parts of blocks.
    """

    values: nn.Parameter
    bias: nn.Parameter | None
    row_starts: Tensor
    columns: Tensor
    _starts: Tensor
    _t_starts: Tensor
    _t_columns: Tensor
    _t_order: Tensor
    #: A checksum of the values, made when the buffers are read: copied along, it distinguishes a copy from an average.
    _seal: Tensor
    _layout: SparseLayout | None
    _cached: tuple[Any, Tensor] | None
    #: What the indices were when the values were last moved to them, and the version of ``columns`` that was compared.
    _topology: tuple[int, ...] | None = None
    _compared: tuple[Tensor, int] | None = None
    _is_moving = False
    #: Whether two of each four neighbours along the inputs live, or fewer.
    _is_two_of_four = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mask: MaskLike | None = None,
        density: float | None = None,
        block: Block = (1, 1),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if (mask is None) == (density is None):
            got = "neither" if mask is None else "both"
            raise ArgumentError(say("SparseLinear", "mask", must="be given, or density", got=got, hint="density=0.1"))
        if block not in BLOCKS:
            raise ArgumentError(
                say("SparseLinear", "block", must=f"be one of {BLOCKS}", got=block, hint="block=(1, 1)")
            )
        self.in_features, self.out_features, self.block = in_features, out_features, block
        shape = (out_features, in_features)
        if mask is None:
            assert density is not None
            layout = random_layout("SparseLinear", shape, density, block, torch.empty(0, device=device).device)
        else:
            bits = mask_bits("SparseLinear", mask, shape)
            layout = SparseLayout.from_mask(bits if device is None else bits.to(device), block)
        self._set(layout)
        self.values = nn.Parameter(torch.empty(layout.count, device=layout.device, dtype=dtype))
        made = nn.Parameter(torch.empty(out_features, device=layout.device, dtype=dtype)) if bias else None
        self.register_parameter("bias", made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new values and bias, as torch.nn.Linear does for as many inputs as an output has on average."""
        bound = 1.0 / math.sqrt(max(1.0, self.values.numel() / max(1, self.out_features)))
        with torch.no_grad():
            self.values.uniform_(-bound, bound)
            if not self.layout.is_exact:
                self.values.mul_((self.layout.positions >= 0).to(self.values.dtype))
            if self.bias is not None:
                self.bias.uniform_(-bound, bound)

    # -- from dense and back -------------------------------------------------------------------------------------------
    @classmethod
    def from_linear(cls, linear: nn.Linear, mask: MaskLike | None = None, *, block: Block = (1, 1)) -> SparseLinear:
        """The SparseLinear of a torch.nn.Linear: of the weights that a mask keeps, or of those that are not 0.

        Args:
            linear: a torch.nn.Linear; its parameters are copied.
            mask: a Mask or a bool tensor of the weight's shape; True means keep. By default ``linear.weight != 0``.
            block: as for the layer itself.

        Raises:
            DtypeError: ``linear`` is not a torch.nn.Linear, or the mask is not bool.
            ShapeError: the mask has another shape than the weight.
            ArgumentError: no kernel has this block, the mask keeps a part of one, or the Linear is a lazy one that is
                not initialized.
        """
        check_linear("SparseLinear.from_linear", linear)
        weight = linear.weight.detach()
        bits = weight != 0 if mask is None else mask
        has_bias = linear.bias is not None
        layer = cls(linear.in_features, linear.out_features, has_bias, mask=bits, block=block, dtype=weight.dtype)
        if layer.values.device != weight.device:
            layer.to(weight.device)
        with torch.no_grad():
            layer.values.copy_(layer.layout.gather(weight))
            if layer.bias is not None:
                layer.bias.copy_(linear.bias)
        return layer.train(linear.training)

    def to_linear(self) -> nn.Linear:
        """The dense torch.nn.Linear of the same map."""
        has_bias = self.bias is not None
        values = self.values
        linear = nn.Linear(self.in_features, self.out_features, has_bias, device=values.device, dtype=values.dtype)
        with torch.no_grad():
            linear.weight.copy_(self.to_dense())
            if self.bias is not None:
                linear.bias.copy_(whole(self.bias))
        return linear.train(self.training)

    def to_dense(self) -> Tensor:
        """The dense weight, (out_features, in_features), 0 where nothing lives. It can be differentiated."""
        return self.layout.dense(whole(self.values))

    # -- what lives ----------------------------------------------------------------------------------------------------
    @property
    def layout(self) -> SparseLayout:
        """Where the values are.

        Raises:
            StaleMaskError: something else has written other indices, so that the values belong to other weights.
        """
        self._check_topology()
        return self._unchecked_layout()

    def _unchecked_layout(self) -> SparseLayout:
        if self._layout is None or self._layout.columns is not self.columns:
            shape = (self.out_features, self.in_features)
            self._layout = SparseLayout(shape, self.block, self._starts, self.columns)
        return self._layout

    def _check_topology(self) -> None:
        """Raise if the indices are not those that the values were moved to; compared once for each version of them."""
        if not self._is_consistent():
            must = "be changed by set_mask, drop, regrow or load_state_dict, which move the values along"
            got = "other indices, written in place, as an average does whose model was rewired: values of other weights"
            hint = (
                "averaged_layer.set_mask(layer.mask) before each update_parameters, and now a new AveragedModel(model)"
            )
            raise StaleMaskError(say("SparseLinear", "columns", must=must, got=got, hint=hint))

    def _is_consistent(self) -> bool:
        """Whether indices and values belong together; indices that were copied along with their values are taken."""
        if _has_no_data():
            return True
        columns = self.columns
        version = 0 if columns.is_inference() else columns._version
        compared = self._compared
        # Another tensor in its place, as torch.func.functional_call puts there, comes with values of its own.
        if compared is not None and (compared[0] is not columns or compared[1] == version):
            return True
        found = fingerprint(self.__dict__["_buffers"])
        if found is None:
            return True
        if self._topology is not None and found != self._topology:
            if not self._is_copied():
                return False
            self._layout = self._cached = None
        self._topology, self._compared = found, (columns, version)
        return True

    def _is_copied(self) -> bool:
        """Whether the buffers are a complete copy of another layer's, and the values are those that it had."""
        held: dict[str, Tensor] = self.__dict__["_buffers"]
        found, copied = seal(self.values), held.get("_seal")
        if found is None or copied is None or not torch.equal(found, copied):
            return False
        shape = (self.out_features, self.in_features)
        if layout_problem(self.row_starts, self.columns, shape, self.block) is not None:
            return False
        expected = indices_of(layout_from(self.row_starts, self.columns, shape, self.block))
        return all(torch.equal(held[name], tensor) for name, tensor in expected.items())

    @property
    def _buffers(self) -> dict[str, Tensor | None]:
        """The buffers, as ``buffers()`` and all that copies or averages layers reads them, with a current seal.

        A write through ``.data`` leaves no trace in a tensor's version, so any reader may have written them.
        """
        held: dict[str, Tensor | None] = self.__dict__["_buffers"]
        kept, values = held.get("_seal"), self.__dict__["_parameters"].get("values")
        if kept is None or values is None or self._is_moving or _has_no_data():
            return held
        self._compared = None
        # Never a new seal on what is refused.
        if self._is_consistent():
            found = seal(values)
            if found is not None and not kept.is_meta and found.device == kept.device:
                if kept.is_inference() and not torch.is_inference_mode_enabled():
                    held["_seal"] = found
                else:
                    kept.copy_(found)
        self._cached = self._compared = None
        return held

    @_buffers.setter
    def _buffers(self, buffers: dict[str, Tensor | None]) -> None:
        self.__dict__["_buffers"] = buffers

    @property
    def mask(self) -> Mask:
        """Which weights live: (out_features, in_features)."""
        return Mask(self.layout.to_bool())

    @property
    def density(self) -> float:
        """The share of weights that live; NaN for a layer of none."""
        total = self.in_features * self.out_features
        return self.layout.to_bool().sum().item() / total if total else math.nan

    def set_mask(self, mask: MaskLike, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Replace the mask: weights in both keep value, gradient and optimizer state; new ones start at 0.

        Args:
            mask: a Mask or a bool tensor of the weight's shape, (out_features, in_features); True means keep.
            optimizer: the one that trains this layer. Without it, an optimizer that has state of the values already
                raises at its next step: that state is of other weights.

        Raises:
            DtypeError: the mask is not bool.
            ShapeError: the mask has another shape than the weight.
            ArgumentError: the mask keeps a part of a block, or another number of weights than live while these are
                sharded over ranks; the optimizer does not train this layer, or, at the next step, it was not given.
        """
        bits = mask_bits("SparseLinear.set_mask", mask, (self.out_features, self.in_features))
        self._become(SparseLayout.from_mask(bits.to(self.columns.device), self.block), optimizer, "set_mask")

    @torch.no_grad()
    def drop(self, fraction: float, optimizer: torch.optim.Optimizer | None = None) -> int:
        """Drop this share of what lives, the smallest by magnitude (blocks by the sum of theirs); returns how many.

        Raises:
            ArgumentError: the fraction is not between 0 and 1, the optimizer does not train this layer, or the weights
                are sharded over ranks, which only exchange some, by `RigL` and `SET`.
        """
        if not 0.0 <= fraction <= 1.0:
            must, hint = "be between 0 and 1", "fraction=0.3"
            raise ArgumentError(say("SparseLinear.drop", "fraction", must=must, got=fraction, hint=hint))
        places, count = self._strongest(fraction)
        self._become(self._at(places), optimizer, "drop")
        return count

    @torch.no_grad()
    def regrow(self, count: int, optimizer: torch.optim.Optimizer | None = None, scores: Tensor | None = None) -> int:
        """Add this many weights (or blocks), with value 0; returns how many were added.

        Args:
            count: how many.
            optimizer: the one that trains this layer; the new values get state of 0.
            scores: (out_features, in_features), such as a dense gradient: the largest by magnitude are taken. By
                default they are chosen at random.

        Raises:
            ShapeError: the scores have another shape.
            ArgumentError: the count is negative, or the optimizer does not train this layer.
        """
        op, shape = "SparseLinear.regrow", (self.out_features, self.in_features)
        if count < 0:
            raise ArgumentError(say(op, "count", must="not be negative", got=count, hint="layer.drop(fraction) drops"))
        if scores is not None and tuple(scores.shape) != shape:
            must, hint = (
                f"have the weight's shape {shape}",
                "scores.T" if scores.shape[::-1] == shape else "torch.rand(shape)",
            )
            raise ShapeError(say(op, "scores", must=must, got=tuple(scores.shape), hint=hint))
        places = self._places()
        grown = self._grown(places, count, scores)
        self._become(self._at(grown), optimizer, "regrow")
        return grown.numel() - places.numel()

    @torch.no_grad()
    def _exchange(self, fraction: float, optimizer: torch.optim.Optimizer, scores: Tensor | None, group: Group) -> None:
        """Drop this share of what lives and grow as many, as `RigL` and `SET` do, on all ranks of a group the same."""
        kept, count = self._strongest(fraction)
        grown = self._grown(kept, count, scores)
        # Decided by one rank: an argsort may differ from device to device, and a random choice does.
        both = broadcast(torch.cat([kept, grown]), group)
        kept, grown = both[: kept.numel()], both[kept.numel() :]
        layout = self._at(grown)
        carry(self.values, self.layout, layout, optimizer, "SparseLinear.exchange", kept=self._at(kept))
        self._set(layout)

    # Places of blocks are numbered row by row.
    def _places(self) -> Tensor:
        layout = self.layout
        return layout.rows * max(1, -(-layout.shape[1] // self.block[1])) + layout.columns.long()

    def _at(self, places: Tensor) -> SparseLayout:
        shape, along = (self.out_features, self.in_features), max(1, -(-self.in_features // self.block[1]))
        return SparseLayout.from_coordinates(shape, places // along, places % along, self.block)

    def _strongest(self, fraction: float) -> tuple[Tensor, int]:
        """The places that are left without this share of what lives, sorted, and how many that is."""
        strength = whole(self.values.detach()).abs().reshape(self.columns.numel(), -1).sum(1)
        count = round(fraction * strength.numel())
        kept = strength.argsort(descending=True, stable=True)[: strength.numel() - count].sort().values
        return self._places()[kept], count

    def _grown(self, places: Tensor, count: int, scores: Tensor | None) -> Tensor:
        """These places and so many others: those of the largest scores, or any; sorted."""
        (height, width), shape = self.block, (self.out_features, self.in_features)
        down, along = -(-shape[0] // height), -(-shape[1] // width)
        lives = torch.zeros(down * along, dtype=torch.bool, device=places.device)
        lives[places] = True
        if scores is None:
            strength = torch.rand(down * along, device=places.device)
        else:
            full = nn.functional.pad(scores.detach().abs(), (0, -shape[1] % width, 0, -shape[0] % height))
            strength = full.reshape(down, height, along, width).sum((1, 3)).reshape(-1).to(places.device)
        strength = torch.where(lives, -math.inf, strength.float().nan_to_num(-1.0))
        count = min(count, lives.numel() - places.numel())
        lives[strength.topk(count).indices] = True
        return lives.nonzero().squeeze(1)

    def _become(self, layout: SparseLayout, optimizer: torch.optim.Optimizer | None, method: str) -> None:
        carry(self.values, self.layout, layout, optimizer, f"SparseLinear.{method}")
        self._set(layout)

    def _set(self, layout: SparseLayout) -> None:
        """Take the indices of a layout. Only two are in the state_dict: the others follow from them."""
        persistent = ("row_starts", "columns")
        self._is_moving = True
        for name, tensor in indices_of(layout).items():
            self.register_buffer(name, tensor, persistent=name in persistent)
        self.register_buffer("_seal", torch.zeros(2, dtype=torch.int64, device=layout.device), persistent=False)
        self._is_moving = False
        self._layout, self._cached = layout, None
        # Of gates of 2:4 exactly half lives, which is known without looking at the mask.
        is_half = self.block == (1, 1) and 2 * layout.count == self.in_features * self.out_features > 0
        can_look = is_half and not layout.columns.is_meta and not _has_no_data()
        self._is_two_of_four = can_look and is_two_of_four(layout.to_bool())
        self._topology = self._compared = None
        self._check_topology()

    # -- the product ---------------------------------------------------------------------------------------------------
    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features).

        Raises:
            ShapeError: the input does not end in the layer's features.
            DtypeError: the input is not a tensor, or not of the layer's dtype.
            DeviceError: the input is on another device.
            StaleMaskError: something else has written other indices, so that the values belong to other weights.
        """
        held: Tensor = self.values
        self._check_topology()
        check_features("SparseLinear", input, self.in_features, held)
        values: Tensor = held
        bias: Tensor | None = self.bias
        device, inputs, outputs, block = input.device.type, self.in_features, self.out_features, self.block
        if torch.is_autocast_enabled(device):
            low = torch.get_autocast_dtype(device)
            input, values, bias = input.to(low), values.to(low), None if bias is None else bias.to(low)
        kept = held.numel()
        if is_tracing():
            facts = Facts(_OP, (outputs, inputs), input.dtype, device, traced=True, kept=kept)
            run = dispatch.decide_in_graph(facts._replace(detail=Product(0, inputs, outputs, block)), _ROUTES)
        else:
            # A compressed weight has no gradient, so what else requires one does not matter.
            grad = torch.is_grad_enabled() and (input.requires_grad or held.requires_grad)
            key = (_OP, input.shape, input.dtype, device, outputs, kept, block, input.is_contiguous(),
                   self._is_two_of_four and (grad,), is_transformed(), _is_any_forced() and _forced())  # fmt: skip
            decision: Decision | None = _cached(key)
            if decision is None:
                product = Product(
                    math.prod(input.shape[:-1]), inputs, outputs, block, is_two_of_four=self._is_two_of_four
                )
                facts = Facts(
                    _OP, (outputs, inputs), input.dtype, device, grad=grad, transformed=key[-2], kept=kept,
                    contiguous=key[-4], detail=product,
                )  # fmt: skip
                decision = dispatch.cache[key] = dispatch.decide(facts, _ROUTES)
            if _is_any_observing() and (planned := self._report(decision.plan, input)):
                return planned  # type: ignore[return-value]
            run = decision.run
        out: Tensor = run(self, input, held, values, bias)
        return out

    def _report(self, plan: Plan, input: Tensor) -> Plan | None:
        mask = self.mask
        # Counted, so that the log can say what was skipped.
        mask.count()
        weight = input.new_empty(()).expand(self.out_features, self.in_features)
        return record(plan, weight, mask)

    def _dense(self, held: Tensor, values: Tensor) -> Tensor:
        """The dense weight; cached as long as the values stay what they are and do not require grad."""
        return self._derived(held, values, "dense", lambda: self.layout.dense(values))

    def _derived(self, held: Tensor, values: Tensor, kind: str, derive: Callable[[], Tensor]) -> Tensor:
        needed = values.requires_grad and torch.is_grad_enabled()
        if needed or is_tracing() or is_transformed() or values.is_inference():
            return derive()
        key = (kind, held._version, held.data_ptr(), values.dtype)
        if self._cached is None or self._cached[0] != key:
            self._cached = (key, derive())
        return self._cached[1]

    # -- copies and files ----------------------------------------------------------------------------------------------
    def __getstate__(self) -> dict[str, Any]:
        # What can be computed again is not worth carrying along.
        return {**self.__dict__, "_layout": None, "_cached": None, "_compared": None}

    def _apply(self, fn: Any, recurse: bool = True) -> SparseLinear:
        self._cached = self._compared = None
        # Until all are moved, some are on another device.
        self._is_moving = True
        try:
            moved: SparseLinear = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            self._is_moving = False
        return moved

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Refuse to write values beside indices that they do not belong to."""
        self._check_topology()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take the topology first, which gives the values their size."""
        row_starts, columns = state_dict.get(f"{prefix}row_starts"), state_dict.get(f"{prefix}columns")
        if row_starts is not None and columns is not None:
            shape = (self.out_features, self.in_features)
            problem = layout_problem(row_starts, columns, shape, self.block)
            if problem is not None:
                error_msgs.append(f"{prefix or 'SparseLinear'}: {problem}")
                return
            device = self.columns.device
            layout = layout_from(row_starts.to(device), columns.to(device), shape, self.block)
            if is_sharded(self.values) and self.values.numel() != layout.count:
                error_msgs.append(
                    f"{prefix or 'SparseLinear'}: {self.values.numel()} values are sharded over ranks, and the state "
                    f"has {layout.count}. Load it before fully_shard"
                )
                return
            self._set(layout)
            if self.values.numel() != self.layout.count:
                self.values.grad = None
                self.values.data = self.values.data.new_zeros(self.layout.count)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._compared = None

    def extra_repr(self) -> str:
        """What is printed."""
        more = "" if self.block == (1, 1) else f", block={self.block}"
        total = self.in_features * self.out_features
        # Unchecked: what cannot run can still be printed.
        density = self._unchecked_layout().to_bool().sum().item() / total if total else math.nan
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"density={density:.3g}{more}"
        )


def _run_sparse(
    layer: SparseLinear,
    x: Tensor,
    held: Tensor,
    values: Tensor,
    bias: Tensor | None,
    *,
    is_delegated: bool = False,
) -> Tensor:
    # Straight from where the module keeps them: after a product, which empties the caches, every step shows.
    held_by = layer.__dict__["_buffers"]
    indices = (held_by["_starts"], held_by["columns"], held_by["_t_starts"], held_by["_t_columns"], held_by["_t_order"])
    return multiply(x, values, bias, (indices, layer.out_features, layer.block), is_delegated=is_delegated)


def _run_semi_structured(layer: SparseLinear, x: Tensor, held: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    compressed = layer._derived(held, values, "2:4", lambda: semi_structured(layer.layout.dense(values.detach())))
    return nn.functional.linear(x, compressed, bias)


def _run_plain(layer: SparseLinear, x: Tensor, held: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    return nn.functional.linear(x, layer._dense(held, values), bias)


# What is dropped is not stored, so the sparse product does not read it.
_ROUTES = product_routes(
    _run_sparse,
    _run_plain,
    skips=Skips.READING,
    by_torch=partial(_run_sparse, is_delegated=True),
    semi_structured=_run_semi_structured,
)


def _has_no_data() -> bool:
    """Whether tensors may be without data: in a graph that is traced, a transform of functions, or a dispatch mode."""
    return is_tracing() or is_vmapped_or_functional() or has_dispatch_modes()
