"""The layout of packed tokens in the arguments and outputs of a Hugging Face model: rows, folded from one sequence."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

from maskwise.models.packing import Packing
from maskwise.models.routes import Padded
from maskwise.ops.torch_private import is_tracing, is_transformed

__all__ = [
    "BY_TOKEN",
    "CROSS",
    "OTHER",
    "Layout",
    "arguments",
    "flat",
    "folded",
    "keys_of",
    "kind_of",
    "leaves",
    "mask_of",
    "not_taken",
    "pack_arguments",
    "padded_reason",
    "padding_aware_embeddings",
    "takes",
    "tokens_of",
    "unpacked",
]


@dataclass(frozen=True, eq=False)
class Layout:
    """The kept tokens of a (B, L) batch as (rows, width), so that no row is longer than what the model takes.

    A row of the layout is not a sequence: a sequence may end in the next row. What follows the last token repeats the
    first one, and is dropped from every output.

    >>> import torch
    >>> layout = Layout.of(Packing.of(torch.tensor([[True, True, True], [True, False, True]])), limit=3)
    >>> layout.rows, layout.width
    (2, 3)
    >>> layout.fold(torch.arange(6).reshape(2, 3))
    tensor([[0, 1, 2],
            [3, 5, 0]])
    """

    packing: Packing
    rows: int
    width: int
    keys: Packing | None = None
    """The kept tokens of the sequences that cross attention reads; None without such."""

    @classmethod
    def of(cls, packing: Packing, *, limit: int | None, spare: int = 0, keys: Packing | None = None) -> Layout:
        """One row where the model takes it, else rows that are no longer than the padded batch is.

        Args:
            packing: which tokens are computed.
            limit: how many positions the model has; None where the config has no limit.
            spare: how many places to leave at the end at the least.
            keys: which tokens of other sequences cross attention reads.
        """
        length, tokens = packing.keep.shape[1], packing.tokens + spare
        rows = 1 if tokens <= max(length, limit or 0) else -(-tokens // length)
        return cls(packing, rows, -(-tokens // rows), keys)

    @property
    def tokens(self) -> int:
        """How many tokens are computed."""
        return self.packing.tokens

    @cached_property
    def size(self) -> int:
        """How many places there are, the spare ones included."""
        return self.rows * self.width

    @cached_property
    def key_mask(self) -> Tensor:
        """The mask of packed keys, all True: by it a mask function knows that of cross attention."""
        assert self.keys is not None
        width = -(-self.keys.tokens // self.rows)
        return torch.ones((self.rows, width), dtype=torch.bool, device=self.packing.keep.device)

    def fold_keys(self, x: Tensor) -> Tensor:
        """What cross attention reads, (B, Lk, D), to as many rows as tokens are in."""
        assert self.keys is not None
        return folded(self.keys.pack(x), *self.key_mask.shape)

    def fold(self, x: Tensor, spare: Tensor | None = None) -> Tensor:
        """(B, L, *rest) to (rows, width, *rest), the places at the end filled with ``spare`` or the first token."""
        return folded(self.packing.pack(x), self.rows, self.width, spare)

    def unfold(self, x: Tensor) -> Tensor:
        """(rows, width, *rest) to (B, L, *rest), with 0 where nothing was computed."""
        return self.packing.unpack(flat(x, self.tokens))

    def holds(self, x: Tensor) -> bool:
        """Whether a tensor has this layout, by its shape."""
        return x.dim() >= 2 and x.shape[:2] == (self.rows, self.width)


def flat(
    x: Tensor,  # (rows, width, *rest)
    tokens: int,
) -> Tensor:
    """The tokens one after the other, (N, *rest)."""
    return x.flatten(0, 1)[:tokens]


def folded(
    x: Tensor,  # (N, *rest)
    rows: int,
    width: int,
    spare: Tensor | None = None,  # (*rest), what the places after the last token hold; by default the first token
) -> Tensor:
    """The tokens in rows, (rows, width, *rest)."""
    missing = rows * width - x.shape[0]
    if missing:
        last = x[:1] if spare is None else spare[None]
        x = torch.cat([x, last.expand(missing, *x.shape[1:])])
    return x.reshape(rows, width, *x.shape[1:])


# -- arguments ---------------------------------------------------------------------------------------------------------
BY_TOKEN = {
    "input_ids": 2,
    "inputs_embeds": 3,
    "position_ids": 2,
    "token_type_ids": 2,
    "task_type_ids": 2,
    "input_shape_ids": 2,
    "input_pronunciation_ids": 2,
    "langs": 2,
    "bbox": 3,
    "xpath_tags_seq": 3,
    "xpath_subs_seq": 3,
}
"""The arguments that have an entry for each token, and how many dims each has. By name: a tensor of the same sizes may
belong to another sequence, as the encoder's output that a decoder attends to."""


@cache
def _signature(kind: Any) -> inspect.Signature:
    """The signature of a class's forward; of the class it extends, where it hands everything on."""
    for each in kind.__mro__:
        if "forward" in vars(each):
            signature = inspect.signature(each.forward)
            kinds = {parameter.kind for parameter in list(signature.parameters.values())[1:]}
            if kinds - {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
                return signature
    return inspect.signature(kind.forward)


@cache
def _names(kind: Any) -> frozenset[str]:
    """The arguments that a class's forward takes by name, with those that it hands on to the class it extends."""
    names: set[str] = set()
    for each in kind.__mro__:
        if "forward" in vars(each):
            parameters = inspect.signature(each.forward).parameters
            names |= set(parameters)
            if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
                break
    return frozenset(names)


def _kind(module: nn.Module) -> Any:
    # Typed so that it counts as hashable.
    return type(module)


def arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    bound = _signature(_kind(module)).bind_partial(module, *args, **kwargs)
    named: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return named


def takes(module: nn.Module, name: str) -> bool:
    """Whether the module's forward has an argument of this name."""
    return name in _names(_kind(module))


def not_taken(module: nn.Module, name: str) -> str:
    """The reason not to serve a module that has no such argument."""
    why = ", so that nothing says which of its tokens are padding" if name == "attention_mask" else ""
    return f"{type(module).__name__}.forward takes no {name}{why}"


def tokens_of(named: dict[str, Any]) -> Any:
    """The argument that has the tokens, as ids or embedded."""
    tokens = named.get("input_ids")
    return tokens if tokens is not None else named.get("inputs_embeds")


CROSS = ("encoder_hidden_states", "encoder_attention_mask")
"""What cross attention reads, (B, Lk, D), and which of it is kept, (B, Lk)."""


def mask_of(named: dict[str, Any]) -> Any:
    """The mask of a call's tokens; where only cross attention has one, all of them."""
    mask, tokens = named.get("attention_mask"), tokens_of(named)
    if mask is None and isinstance(tokens, Tensor) and named.get(CROSS[1]) is not None:
        return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    return mask


def keys_of(named: dict[str, Any]) -> Packing | None:
    """Which tokens of other sequences a call reads, or None."""
    states, mask = (named.get(name) for name in CROSS)
    if states is None:
        return None
    return Packing.of(states.new_ones(states.shape[:2], dtype=torch.bool) if mask is None else mask != 0)


def padded_reason(module: Any, named: dict[str, Any], *, cross: bool = False) -> Padded | None:
    """Why this call must run padded, or None where it can run packed.

    Args:
        module: the base model.
        named: its arguments.
        cross: whether its cross attention can read packed tokens.
    """
    mask, tokens = mask_of(named), tokens_of(named)
    if is_tracing():
        return Padded("a graph that is being traced has no sizes that depend on data", "trace mw.models.repad(model)")
    if is_transformed():
        return Padded("a torch.func transform is active", "torch.autograd.grad, or mw.models.repad(model)")
    if (cache := named.get("past_key_values")) is not None and (
        not hasattr(cache, "get_seq_length") or cache.get_seq_length()
    ):
        return Padded("the call continues from a cache")
    if mask is None:
        return Padded("no attention_mask was given")
    if not isinstance(mask, Tensor) or not isinstance(tokens, Tensor) or mask.shape != tokens.shape[:2]:
        return Padded(
            "attention_mask is not one flag for each token of the input", "an attention_mask of (batch, length)"
        )
    if named.get("output_attentions") or (named.get("output_attentions") is None and module.config.output_attentions):
        return Padded("the attention weights are requested", "output_attentions=False")
    if named.get("labels") is not None:
        return Padded("it computes its loss inside of the packed part", "a loss of the logits outside of the model")
    for name, value in named.items():
        if cross and name in CROSS and _fits_keys(named, mask):
            continue
        if name != "attention_mask" and not _fits(name, value, mask):
            return Padded(
                f"{name} is not known to have an entry for each token",
                f"a call without {name}, or mw.models.repad(model)",
            )
    others = named.get(CROSS[1])
    if bool(mask.all()) and (others is None or bool(others.all())):
        return Padded("nothing is dropped")
    if not bool(mask.any()):
        return Padded("nothing is kept")
    return None


def _fits_keys(named: dict[str, Any], mask: Tensor) -> bool:
    """Whether what cross attention reads is of as many sequences, with a flag for each of their tokens."""
    states, keep = (named.get(name) for name in CROSS)
    if not isinstance(states, Tensor) or states.dim() != 3 or states.shape[0] != mask.shape[0]:
        return states is None
    return keep is None or (isinstance(keep, Tensor) and keep.shape == states.shape[:2])


def _fits(name: str, value: Any, mask: Tensor) -> bool:
    """Whether an argument has an entry for each token, or none for any."""
    if isinstance(value, (list, tuple)):
        return False
    if not isinstance(value, Tensor) or value.numel() == 1:
        return True
    if name == "position_ids" and value.dim() == 3:
        # Several axes, as text beside images has them: (axes, B, L).
        return value.shape[1:] == mask.shape
    sizes = (mask.shape, torch.Size((1, mask.shape[1])))
    return value.dim() == BY_TOKEN.get(name) and value.shape[:2] in sizes


def pack_arguments(module: nn.Module, named: dict[str, Any], layout: Layout, embeddings: str | None) -> dict[str, Any]:
    """The arguments of the packed call: all kept tokens, each with the position that it had."""
    shape = layout.packing.keep.shape
    # A mask, if only of ones, so that the model does not make one of its own.
    named = {**named, "attention_mask": mask_of(named)}
    if named.get("position_ids") is None and takes(module, "position_ids"):
        named = {**named, "position_ids": _positions(module, named, layout, embeddings)}
    packed = {}
    for name, value in named.items():
        if name == "attention_mask":
            # All ones, not None: without a mask transformers looks for packed sequences in the position ids.
            packed[name] = value.new_ones((layout.rows, layout.width))
        elif name == "past_key_values":
            packed[name] = None
        elif layout.keys is not None and name in CROSS:
            packed[name] = layout.key_mask if name == CROSS[1] else layout.fold_keys(value)
        elif not isinstance(value, Tensor) or value.numel() == 1:
            packed[name] = value
        elif name == "position_ids":
            # The spare places have the last position of the padded batch: frequencies may depend on it.
            axes = value[None] if value.dim() == 2 else value
            folds = torch.stack([layout.fold(axis.expand(shape), axis.max()) for axis in axes])
            packed[name] = folds[0] if value.dim() == 2 else folds
        else:
            packed[name] = layout.fold(value.expand(*shape, *value.shape[2:]))
    if layout.keys is not None:
        packed[CROSS[1]] = layout.key_mask
    if takes(module, "use_cache"):
        packed["use_cache"] = False
    return packed


def padding_aware_embeddings(module: nn.Module) -> str | None:
    """The path of the embeddings that number only tokens which are not padding, as RoBERTa's; None without such."""
    for path, child in module.named_modules():
        if hasattr(child, "position_embeddings") and hasattr(child, "padding_idx") and _numbering(child):
            return str(path)
    return None


def _numbering(embeddings: nn.Module) -> Any:
    name = "create_position_ids_from_input_ids"
    own = getattr(embeddings, name, None)
    homes = (sys.modules[kind.__module__] for kind in type(embeddings).__mro__)
    return own or next((found for home in homes if (found := getattr(home, name, None)) is not None), None)


def _positions(module: nn.Module, named: dict[str, Any], layout: Layout, path: str | None) -> Tensor:
    """The position ids that the padded model would make, (B, L)."""
    keep = layout.packing.keep
    columns = torch.arange(keep.shape[1], device=keep.device).expand(keep.shape)
    if any(kind.__name__ == "OPTDecoder" for kind in type(module).__mro__):
        # Only tokens that the mask keeps are counted.
        counted: Tensor = mask_of(named).ne(0).long().cumsum(1) - 1
        return counted
    if path is None:
        return columns
    embeddings = module.get_submodule(path)
    padding: int = embeddings.padding_idx  # type: ignore[assignment]
    if named.get("input_ids") is None:
        return columns + padding + 1
    positions: Tensor = _numbering(embeddings)(named["input_ids"], padding)
    return positions


# -- outputs -----------------------------------------------------------------------------------------------------------
TOKENS, FLAT, OTHER = "tokens", "flat", "other"
"""(rows, width, ...), which becomes (B, L, ...); (rows * width, ...), which becomes (B * L, ...); and the others."""


def leaves(output: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of an output with its path, such as ``hidden_states.2``."""
    if isinstance(output, Tensor):
        yield path, output
    elif isinstance(output, (dict, tuple, list)):
        for name, value in output.items() if isinstance(output, dict) else enumerate(output):
            yield from leaves(value, f"{path}.{name}" if path else str(name))


def _map(output: Any, function: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """The output with a function of every tensor in its place."""
    if isinstance(output, Tensor):
        return function(path, output)
    if isinstance(output, dict):
        for name in list(output):
            output[name] = _map(output[name], function, f"{path}.{name}" if path else str(name))
        return output
    if isinstance(output, (tuple, list)):
        found = [_map(each, function, f"{path}.{index}" if path else str(index)) for index, each in enumerate(output)]
        # Fields of a named tuple are arguments of their own.
        return type(output)(*found) if hasattr(output, "_fields") else type(output)(found)
    return output


def kind_of(padded: Tensor, packed: Tensor, layout: Layout) -> str | None:
    """The layout of an output, from its shapes padded and packed; None if that cannot be unpacked."""
    batch, length = layout.packing.keep.shape
    if padded.dim() >= 2 and padded.shape[:2] == (batch, length) and layout.holds(packed):
        return TOKENS
    if padded.dim() >= 2 and padded.shape[0] == batch * length and packed.shape[:1] == (layout.size,):
        return FLAT
    return OTHER if padded.shape == packed.shape else None


def unpacked(output: Any, layout: Layout, kinds: dict[str, str]) -> Any:
    """The output in the padded layout.

    Args:
        output: what the packed call gave.
        layout: the positions of its tokens.
        kinds: the layout of each tensor, by its path; one that is not named counts as by token if it looks so.
    """

    def unpack(path: str, value: Tensor) -> Tensor:
        kind = kinds.get(path)
        if kind == FLAT:
            return layout.packing.unpack(value[: layout.tokens]).flatten(0, 1)
        by_token = kind == TOKENS or (kind is None and value.dim() == 3)
        return layout.unfold(value) if by_token and layout.holds(value) else value

    return _map(output, unpack)
