"""``mw.unpad(model)``, ``mw.models.repad`` and ``mw.models.report``: serve what an adapter can, undo it, list it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from maskwise.errors import ArgumentError, say
from maskwise.models.adapter import (
    MARK,
    Adapter,
    MixesTokens,
    QuantizesBatch,
    ReadsDroppedError,
    UnsupportedModelError,
    adapters,
)
from maskwise.models.routes import Padded, clear_warnings, warn_once, warnings_of
from maskwise.nn.arguments import check_module
from maskwise.plan.explain import Tabular

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["UnpadReport", "UnpadRow", "repad", "report", "unpad"]

Model = TypeVar("Model", bound=nn.Module)
REFUSED = "_maskwise_refused"
"""The attribute that holds why no adapter serves a part of an unpadded model."""


def unpad(model: Model) -> Model:
    """Make an existing model run on kept tokens only: same inputs, same outputs, in training and in evaluation.

    >>> import torch, maskwise as mw
    >>> from torch import nn
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    >>> x, padding = torch.randn(2, 5, 8), mw.Mask.from_lengths([5, 2]).to_key_padding()
    >>> padded = model(x, src_key_padding_mask=padding)
    >>> unpadded = mw.unpad(model)(x, src_key_padding_mask=padding)
    >>> torch.allclose(padded[~padding], unpadded[~padding], atol=1e-5), unpadded[1, 2:].abs().max().item()
    (True, 0.0)

    The model is patched in place, with all supported submodules: ``nn.TransformerEncoder``,
    ``nn.TransformerEncoderLayer``, ``nn.MultiheadAttention``, and Hugging Face models with an ``attention_mask`` (also
    inside a SentenceTransformer). Parameters, ``state_dict`` and signatures do not change. A call that cannot run
    packed (no mask, a cache, requested attention weights) runs padded, as before. ``mw.explain()`` reports such calls;
    if the caller can avoid it, the first one warns with a `maskwise.models.PaddedRunWarning`.
    ``mw.models.report(model)`` lists which submodules are adapted and which are not, with the reasons.

    Outputs at kept positions are equal up to rounding. At padded positions, where the output of a padded model is
    undefined, they are 0.

    Args:
        model: the module, or one that holds such modules.

    Returns:
        The same object.

    Raises:
        DtypeError: ``model`` is not a module.
        UnsupportedModelError: no adapter serves it or a part of it; the message has the reasons.
    """
    check_module("unpad", model)
    refused: dict[str, str] = {}
    # Where nothing at all is served, what serves less of a model is tried.
    if not _install(model, "", refused):
        others: dict[str, str] = {}
        served = _install(model, "", others, is_fallback=True)
        refused = others if served else _joined(refused, others)
    if not any(hasattr(each, MARK) for each in model.modules()):
        raise UnsupportedModelError(_refusal(model, refused))
    for path, reason in refused.items():
        part = model.get_submodule(path)
        setattr(part, REFUSED, str(reason))
        if _takes_padding(part) and not any(hasattr(each, MARK) for each in part.modules()):
            warn_once(part, reason, "help(maskwise.models.Adapter) shows how to support it")
    return model


def repad(model: Model) -> Model:
    """Undo `unpad`: the model runs as it did before.

    >>> import maskwise as mw
    >>> from torch import nn
    >>> attention = nn.MultiheadAttention(8, 2, batch_first=True)
    >>> mw.models.repad(mw.unpad(attention)) is attention
    True

    Args:
        model: what `unpad` was given, or returned.

    Returns:
        The same object.

    Raises:
        DtypeError: ``model`` is not a module.
        ArgumentError: nothing in it is unpadded.
    """
    check_module("repad", model)
    if not _undo(model):
        raise ArgumentError(say("repad", "model", must="be unpadded", got=type(model).__name__, hint="mw.unpad(model)"))
    return model


def _install(module: nn.Module, path: str, refused: dict[str, str], *, is_fallback: bool = False) -> int:
    """Serve the module, or else its children, and return how many were served."""
    if hasattr(module, MARK):
        return 1
    adapter = _adapter_of(module, path, refused, is_fallback)
    if adapter is not None:
        try:
            adapter.install(module)
        except UnsupportedModelError as error:
            # A model that reads what is dropped would read it of its parts, too.
            kind = error.kind if is_fallback and isinstance(error, ReadsDroppedError) else str
            refused[path] = kind(f"{adapter.name}: {error.reason}")
        else:
            setattr(module, MARK, adapter.name)
            return 1
    if isinstance(refused.get(path), MixesTokens):
        return 0
    served = sum(
        _install(child, f"{path}.{name}" if path else name, refused, is_fallback=is_fallback)
        for name, child in module.named_children()
    )
    if is_fallback:
        return served
    return served if served and _enclose(module, path, refused) else 0


def _joined(refused: dict[str, str], others: dict[str, str]) -> dict[str, str]:
    """The reasons of both kinds of adapters: the one that serves more first, then the one that serves what it does not.

    What holds for any adapter stands alone.
    """
    found = {**others, **refused}
    for path in refused.keys() & others.keys():
        first, second = refused[path], others[path]
        if isinstance(second, QuantizesBatch):
            found[path] = second
        elif first.partition(": ")[2] != second.partition(": ")[2]:
            found[path] = f"{first}; {second}"
    return found


def _takes_padding(module: nn.Module) -> bool:
    """Whether a module is called with tokens and a mask of their padding."""
    names = set(inspect.signature(module.forward).parameters)
    return bool(names & {"input_ids", "src", "query"}) and any("mask" in name for name in names)


def _enclose(module: nn.Module, path: str, refused: dict[str, str]) -> bool:
    """Let adapters know of a module that holds served ones; where one objects, the served ones are undone."""
    for adapter in adapters().values():
        enclose = getattr(adapter, "enclose", None)
        try:
            if enclose is not None and enclose(module):
                setattr(module, MARK, adapter.name)
        except UnsupportedModelError as error:
            refused[path] = f"{adapter.name}: {error.reason}"
            _undo(module)
            return False
    return True


def _undo(model: nn.Module) -> int:
    """Undo every served module, the outer ones first, and return how many there were."""
    served = [module for module in model.modules() if hasattr(module, MARK)]
    for module in served:
        # What serves an outer module may undo those in it along with it.
        if (name := vars(module).pop(MARK, None)) is not None:
            adapters()[name].undo(module)
    for module in model.modules():
        clear_warnings(module)
        vars(module).pop(REFUSED, None)
    return len(served)


def _adapter_of(module: nn.Module, path: str, refused: dict[str, str], is_fallback: bool) -> Adapter | None:
    for adapter in adapters().values():
        if getattr(adapter, "is_fallback", False) != is_fallback:
            continue
        served, reason = adapter.serves(module)
        if served:
            return adapter
        # An adapter that does not know the module at all has nothing to say of it.
        if reason:
            refused[path] = type(reason)(f"{adapter.name}: {reason}")
    return None


def _refusal(model: nn.Module, refused: dict[str, str]) -> str:
    kind = type(model).__name__
    # By where they stand in the model, not by when each was found: its own reason first, then those of its parts, and
    # last those of parts that read no tokens, such as a model of images.
    places = {path: (place, part) for place, (path, part) in enumerate(model.named_modules(remove_duplicate=False))}
    ordered = sorted(refused, key=lambda path: (path != "" and not _takes_padding(places[path][1]), places[path][0]))
    found = [f"  {path or kind}: {refused[path]}" for path in ordered[:8]]
    listed = "\n".join(found) if found else f"  no adapter knows a part of it; there are {'; '.join(adapters())}"
    return (
        f"unpad: no adapter serves this {kind}.\n{listed}\n"
        "Hint: write an adapter (help(maskwise.models.Adapter) shows one) and maskwise.models.register(it)."
    )


# -- the report --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class UnpadRow:
    """One part of an unpadded model.

    Attributes:
        name: its path in the model; empty for the model itself.
        kind: its class.
        adapter: what serves it, or None where it runs on every position.
        reason: why it is not served; empty where it is.
        padded: why calls of it ran padded so far, each with what to change.
    """

    name: str
    kind: str
    adapter: str | None
    reason: str = ""
    padded: tuple[Padded, ...] = ()


@dataclass(frozen=True)
class UnpadReport(Tabular):
    """What `mw.unpad` adapted, and what not. Print it for a table, iterate it, or take ``to_json()``.

    Attributes:
        rows: the parts, in the order of ``model.named_modules()``.
    """

    rows: tuple[UnpadRow, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[UnpadRow]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> UnpadRow:
        """The row of a part, by its name."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"UnpadReport: no part is named {name!r}. Hint: [row.name for row in report].")

    @property
    def adapted(self) -> int:
        """How many parts run on kept tokens only."""
        return sum(row.adapter is not None for row in self.rows)

    def to_json(self) -> str:
        """The rows as a JSON array of objects."""
        return json.dumps([{**asdict(row), "padded": [each._asdict() for each in row.padded]} for row in self.rows])

    def table(self) -> Table:
        """The rows as a rich table."""
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=f"unpadded: {self.adapted} of {len(self)} parts run on kept tokens only")
        for heading in ("part", "class", "runs", "why", "calls that ran padded"):
            table.add_column(heading, overflow="fold")
        for row in self.rows:
            runs = "padded" if row.adapter is None else "packed"
            calls = "; ".join(f"{each.reason} ({each.change})" for each in row.padded)
            why = row.reason or f"served by {row.adapter}"
            table.add_row(*map(escape, (row.name or "the model", row.kind, runs, why, calls)))
        return table


def report(model: nn.Module) -> UnpadReport:
    """List what `mw.unpad` adapted in a model and what it did not, with the reasons.

    >>> import maskwise as mw
    >>> from torch import nn
    >>> encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> model = mw.unpad(nn.Sequential(nn.Embedding(10, 8), encoder, nn.Linear(8, 2)))
    >>> report = mw.models.report(model)
    >>> [(row.name, row.kind, row.adapter) for row in report]
    [('0', 'Embedding', None), ('1', 'TransformerEncoderLayer', 'nn.TransformerEncoderLayer'), ('2', 'Linear', None)]
    >>> report["0"].reason
    'no adapter knows a module of this kind'

    A row is a module with an adapter, including its submodules; a module that an adapter rejected; or a module with
    parameters for which there is no adapter. Each row lists the reasons why its calls have run padded so far, if the
    caller can avoid them: the messages of `maskwise.models.PaddedRunWarning`.

    Args:
        model: what `mw.unpad` was given, or returned.

    Returns:
        An UnpadReport: print it for a table; a notebook shows it as one.

    Raises:
        DtypeError: ``model`` is not a module.
        ArgumentError: nothing in it is unpadded.
    """
    check_module("report", model)
    rows = tuple(_rows_of(model, ""))
    if not any(row.adapter for row in rows):
        hint = "mw.unpad(model)"
        raise ArgumentError(say("report", "model", must="be unpadded", got=type(model).__name__, hint=hint))
    return UnpadReport(rows)


def _rows_of(module: nn.Module, path: str) -> Iterator[UnpadRow]:
    kind = type(module).__name__
    adapter, reason = vars(module).get(MARK), vars(module).get(REFUSED, "")
    # Where nothing serves it, `unpad` itself has warned.
    padded = tuple(each for each in warnings_of(module) if each.reason != reason)
    if adapter is not None or reason:
        yield UnpadRow(path, kind, adapter, "" if adapter else reason, padded)
    elif not _has_rows(module):
        if next(module.parameters(), None) is not None:
            yield UnpadRow(path, kind, None, "no adapter knows a module of this kind", padded)
        return
    for name, child in module.named_children():
        # What is in a module that has a row shares it, unless it has one of its own.
        if not (adapter or reason) or _has_rows(child):
            yield from _rows_of(child, f"{path}.{name}" if path else name)


def _has_rows(module: nn.Module) -> bool:
    return any(hasattr(each, MARK) or hasattr(each, REFUSED) for each in module.modules())
