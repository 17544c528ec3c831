"""What an audit found: findings, worst first, one line each, then details. Text for 80 columns, JSON, and HTML."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from maskwise.models.audit.denominator import Denominator
from maskwise.models.audit.leaks import Leak
from maskwise.models.audit.rewrites import Rewrite
from maskwise.models.audit.waste import CAUSES, Profile
from maskwise.plan.measure import in_words

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["Audit", "Waste"]

WIDTH = 80
#: How many modules the details list.
LISTED = 5


@dataclass(frozen=True)
class Waste:
    """Time that goes into what is not there.

    Attributes:
        cause: ``"padding"``, ``"attention"``, ``"labels"``, ``"weights"`` or ``"activations"``.
        share: of the time of a forward pass.
        flops: the share of its FLOPs.
        modules: the modules that spend it, worst first.
        rewrites: what saves it, as measured on a copy.
    """

    cause: str
    share: float
    flops: float
    modules: tuple[str, ...]
    rewrites: tuple[Rewrite, ...] = ()

    @property
    def rewrite(self) -> Rewrite | None:
        """The rewrite that gains most; None where none pays."""
        paying = [each for each in self.rewrites if each.pays]
        return max(paying, key=lambda each: each.speedup or 0.0, default=None)


@dataclass(frozen=True)
class Audit:
    """What `mw.audit` found. Print it, take ``to_json()``, or write a page by ``to_html(path)``.

    Attributes:
        model: the class of the model.
        leaks: what depends on dropped positions, those of finite values first.
        waste: where time goes into what is not there, worst first.
        denominator: what happens to the loss when the batch is split; None without a loss.
        profile: time, FLOPs and bytes of every module.
        masks: of each mask of the batch its source, and (B, L) bool.
        notes: what could not be tested, and why.
    """

    model: str
    leaks: tuple[Leak, ...]
    waste: tuple[Waste, ...]
    denominator: Denominator | None
    profile: Profile
    masks: tuple[tuple[str, Tensor], ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing leaks but NaN, nothing is wasted but on zero activations, and the loss is split-invariant."""
        leaks = any(not leak.only_nan for leak in self.leaks)
        waste = any(each.cause != "activations" for each in self.waste)
        return not leaks and not waste and (self.denominator is None or self.denominator.invariant)

    @property
    def wasted(self) -> float:
        """The share of the time that is spent on what is not there."""
        return self.profile.wasted

    @property
    def tokens_per_second(self) -> float:
        """Positions of the batch per second of a forward pass."""
        return self.profile.tokens / self.profile.seconds if self.profile.seconds else 0.0

    @property
    def useful_tokens_per_second(self) -> float:
        """Kept positions per second."""
        return self.profile.kept / self.profile.seconds if self.profile.seconds else 0.0

    def to_json(self) -> str:
        """All of it as a JSON object, the masks as counts."""
        found = {
            "model": self.model,
            "ok": self.ok,
            "leaks": [{**asdict(leak), "only_nan": leak.only_nan} for leak in self.leaks],
            "waste": [{**asdict(each), "rewrites": [r.to_dict() for r in each.rewrites]} for each in self.waste],
            "denominator": None if self.denominator is None else asdict(self.denominator),
            "wasted": self.wasted,
            "seconds": self.profile.seconds,
            "flops": self.profile.flops,
            "tokens_per_second": self.tokens_per_second,
            "useful_tokens_per_second": self.useful_tokens_per_second,
            "masks": [
                {"source": name, "shape": list(keep.shape), "kept": int(keep.sum())} for name, keep in self.masks
            ],
            "modules": [{**asdict(each), "useful": each.useful} for each in self.profile.modules],
            "notes": list(self.notes),
        }
        # Strict JSON has no infinity, which is what NaN in an output makes of a difference.
        return json.dumps(_finite(found))

    def to_html(self, path: str | Path) -> Path:
        """Write a page that needs nothing else: findings, the batch, and the modules as bars of useful and wasted time.

        Args:
            path: the file.

        Returns:
            The path.
        """
        from maskwise.models.audit.page import page

        file = Path(path)
        file.write_text(page(self), encoding="utf-8")
        return file

    def _repr_html_(self) -> str:
        from maskwise.models.audit.page import fragment

        return fragment(self)

    def __str__(self) -> str:
        return "\n".join(line for _, line in self._lines())

    def __rich__(self) -> Text:
        from rich.text import Text

        styles = {"head": "bold", "bad": "bold red", "warn": "yellow", "good": "green", "": ""}
        return Text("\n").join(Text(line, style=styles[style]) for style, line in self._lines())

    # -- text ----------------------------------------------------------------------------------------------------------
    def _lines(self) -> Iterator[tuple[str, str]]:
        """Lines, each with its style."""
        found = list(self.findings())
        number = len(found)
        yield "head", _cut(f"audit of {self.model}: {number or 'no'} finding{'' if number == 1 else 's'}")
        for name, keep in self.masks:
            kept = float(keep.float().mean())
            yield "", f"  batch {tuple(keep.shape)}, {kept:.0%} kept by {name}"
        useful = f", {_count(self.useful_tokens_per_second)} of them useful" if self.masks else ""
        speed = f"{_count(self.tokens_per_second)} tokens/s{useful}" if self.masks else "no mask was found in the batch"
        yield "", f"  forward {in_words(self.profile.seconds)}, {_count(self.profile.flops)}FLOPs, {speed}"
        if found:
            yield "", ""
        for style, line, _ in found:
            yield style, _cut(line)
        for _, line, details in found:
            yield "", ""
            yield "head", _cut(line.split(None, 1)[1] if " " in line else line)
            for detail in details:
                yield from (("", each) for each in _wrapped(detail))
        slow = sorted(self.profile.modules, key=lambda each: -each.own_seconds)[:LISTED]
        if slow:
            yield "", ""
            yield "head", "  time by module (its own)          time   share   useful     FLOPs"
        total = sum(each.own_seconds for each in self.profile.modules) or 1.0
        for each in slow:
            name = _cut(f"{each.path or 'the model itself'}", 28)
            share, useful = f"{each.own_seconds / total:.0%}", f"{each.useful:.0%}"
            time = in_words(each.own_seconds)
            yield "", f"    {name:<28} {time:>9} {share:>7} {useful:>8} {_count(each.own_flops):>9}"
        for note in self.notes:
            yield "", ""
            yield from (("", each) for each in _wrapped(f"note: {note}"))

    def findings(self) -> Iterator[tuple[str, str, list[str]]]:
        """Style, line and details of each finding, worst first."""
        for leak in self.leaks:
            if not leak.only_nan:
                yield "bad", f"  leak   {leak.summary}", _leak_details(leak)
        if self.denominator is not None and not self.denominator.invariant:
            found = self.denominator
            line = f"  loss   depends on the split into micro-batches: error {found.error:.1%}"
            weighting = {"labels": "labels that count", "tokens": "kept tokens", "sum": "nothing: it is a sum"}
            details = [
                f"weighting: the whole batch is weighted by {weighting.get(found.weighting, found.weighting)}, "
                "a mean over micro-batches weighs each the same",
                f"error: {found.error:.2%} of the loss, {found.gradient:.2%} of the largest gradient, in splits by "
                f"{', '.join(map(str, found.splits))}",
                f"fix: {found.fix}",
            ]
            yield "bad", line, details
        for waste in self.waste:
            yield "warn", f"  waste  {_waste_line(waste)}", _waste_details(waste)
        for leak in self.leaks:
            if leak.only_nan:
                yield "warn", f"  nan    {leak.summary}", _leak_details(leak)


def _leak_details(leak: Leak) -> list[str]:
    where = f"{leak.module or 'the model itself'} ({leak.kind})"
    at = f", in `{leak.operation}`" if leak.operation else ""
    line = f" at {leak.line}" if leak.line else ""
    changes = [f"kept outputs by {_percent(leak.output)}"] if leak.output else []
    if leak.loss:
        changes.append(f"the loss by {_percent(leak.loss)}")
    if leak.gradient:
        changes.append(f"the gradient of {leak.parameter} by {_percent(leak.gradient)}")
    found = [f"where: {where}{at}{line}", f"why: {leak.reason}", f"shown by: {leak.shown_by}"]
    if changes:
        found.append(f"changes: {', '.join(changes)}")
    found.append(f"repair: {leak.repair}")
    if len(leak.path) > 1:
        found.append(
            f"path: {' > '.join(each or 'output' for each in leak.path[:LISTED])}"
            + (" > ..." if len(leak.path) > LISTED else "")
        )
    return found


def _waste_line(waste: Waste) -> str:
    rewrite = waste.rewrite
    gain = f": {rewrite.name} is {rewrite.speedup:.1f} x as fast" if rewrite is not None else ""
    return f"{waste.share:.0%} of the time on {CAUSES[waste.cause]}{gain}"


def _waste_details(waste: Waste) -> list[str]:
    found = [f"share: {waste.share:.0%} of the time, {waste.flops:.0%} of the FLOPs"]
    if waste.modules:
        found.append(f"where: {', '.join(each or 'the model itself' for each in waste.modules[:3])}")
    for rewrite in waste.rewrites:
        if rewrite.before is None or rewrite.after is None:
            found += [f"{rewrite.name}: not applied: {rewrite.note}", f"rewrite: {rewrite.line}"]
            continue
        verdict = "" if rewrite.pays else " (does not pay here)" if rewrite.agrees else " (results differ: not applied)"
        found.append(
            f"{rewrite.name}: {in_words(rewrite.before)} -> {in_words(rewrite.after)} in {rewrite.mode}, "
            f"largest difference {rewrite.difference:.0e}{verdict}"
        )
        found += [f"rewrite: {rewrite.line}"] if rewrite.pays else [f"note: {rewrite.note}"] if rewrite.note else []
    if waste.cause == "activations":
        found.append("rewrite: none; the next product multiplies by these zeros")
    return found


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="      ", break_on_hyphens=False)


def _cut(text: str, width: int = WIDTH) -> str:
    if len(text) <= width:
        return text
    # The end of a path names the module.
    return text[: width - 1] + "…" if width == WIDTH else "…" + text[1 - width :]


def _percent(share: float) -> str:
    if share == float("inf"):
        return "NaN"
    return f"{share:.2%}" if share < 10 else f"{share:.0f} x"


def _count(number: float) -> str:
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number:.0f} "


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
