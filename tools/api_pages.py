"""The pages docs/api/*.md, made from the docstrings of every public name.

``python -m tools.api_pages docs/api`` writes them, which `make docs` does before it builds the site. They are not
committed: a docstring that changes would make them stale.
"""

from __future__ import annotations

import inspect
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

import maskwise as mw
from benchmarks import command as bench
from maskwise import data, errors
from maskwise.cli import app as cli
from maskwise.nn import gates, schedule
from maskwise.plan import dispatch

HEAD = "*Made from the docstrings by `make docs`.*"
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):$", flags=re.M)
TITLES = {"Args": "Arguments", "Attributes": "Attributes", "Returns": "Returns", "Raises": "Raises"}

# The parts of the page on functions, by family of ops; what is not named here goes to the last part.
PARTS: dict[str, str] = {
    "reduce": "Reductions",
    "softmax": "Softmax and normalization",
    "scan": "Scans",
    "order": "Sort, top-k, quantiles",
    "fill": "Fill and losses",
    "loss": "Fill and losses",
    "select": "Compute only what is kept",
    "attention": "Compute only what is kept",
    "conv": "Compute only what is kept",
    "linear": "Weights",
}
#: What has a page of its own, or none.
ELSEWHERE = ("Mask", "MaskwiseError", "Packed", "__version__", "distributed", "models", "nn", "testing")
# The parts of the page on mw.nn, by module; what is not named here goes to the last part.
LAYERS: dict[str, str] = {
    "norm": "Norms and pools",
    "pool": "Norms and pools",
    "linear": "Layers with masked weights",
    "conv": "Layers with masked weights",
    "sparse_linear": "Layers with masked weights",
    "attaching": "Gates on a model",
    "pruning": "Gates on a model",
    "rewire": "Rewiring during training",
}
MORE = "More"
PLANS = ("plan", "explain", "force")
#: The aliases in signatures.
ALIASES = {
    "MaskLike": "a `Mask` or a bool tensor",
    "Dim": "an int, several ints, or None for all dims",
    "Device": "a `torch.device`, its name, or None for the default",
}
WIDTH = 88
"""Signatures that are longer have one parameter per line."""


def entries(owner: Any, prefix: str, names: list[str], level: int = 3) -> list[str]:
    """One entry for each name, under its heading; a class is followed by what it adds to those that it derives from."""
    lines = []
    for name in names:
        lines += entry(f"{prefix}{name}", inspect.getattr_static(owner, name), owner, level)
        value = getattr(owner, name)
        if inspect.isclass(value) and not issubclass(value, Exception) and value not in (mw.Mask, mw.Packed):
            lines += entries(value, f"{name}.", methods(value), level + 1)
    return lines


def methods(owner: type) -> list[str]:
    """What a class adds: not what every torch module has, and not the fields, which its docstring lists."""
    usual = ("forward", "extra_repr", "reset_parameters")
    names = [name for name in public(owner) if name not in usual]
    return [
        name for name in names if inspect.getdoc(inspect.getattr_static(owner, name)) and is_documented(owner, name)
    ]


def is_documented(owner: type, name: str) -> bool:
    """Whether this is a method or a property, and no field with a default value."""
    static = inspect.getattr_static(owner, name)
    return isinstance(static, property | classmethod | staticmethod) or inspect.isfunction(static)


def entry(title: str, static: Any, owner: Any, level: int) -> list[str]:
    """A heading, the signature, and the docstring."""
    value = getattr(owner, title.rpartition(".")[2])
    if isinstance(static, property):
        found = annotation(static.fget.__annotations__.get("return", "")) if static.fget else ""
        call, text = f"{title}: {found}" if found else title, inspect.getdoc(static) or ""
    else:
        bound = inspect.isclass(owner) and not isinstance(static, classmethod | staticmethod)
        call, text = f"{title}{signature(value, bound=bound)}", inspect.getdoc(value) or ""
    return [f"{'#' * level} {title}", "", "```python", call, "```", "", *rendered(text), ""]


class Annotation(str):
    """A type as it is written in the source: the signature prints it without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def signature(value: Any, *, bound: bool) -> str:
    """The parameters with their types, and what is returned; one parameter per line where they are many.

    >>> def scale(x: Tensor, *, by: float = 1.0) -> Tensor: ...
    >>> signature(scale, bound=False)
    '(x: Tensor, *, by: float = 1.0) -> Tensor'
    """
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = [p.replace(annotation=annotation(p.annotation)) for p in found.parameters.values()]
    returned = found.empty if inspect.isclass(value) else annotation(found.return_annotation)
    found = inspect.Signature(parameters[1:] if bound else parameters, return_annotation=returned)
    line = str(found)
    if len(line) <= WIDTH:
        return line
    arrow = f" -> {returned}" if returned is not found.empty else ""
    lines: list[str] = []
    for p in found.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not any(each.startswith("*") for each in lines):
            lines.append("*")
        lines.append(str(p))
    return "(\n" + "".join(f"    {each},\n" for each in lines) + ")" + arrow


def annotation(found: Any) -> Any:
    """An annotation, which `from __future__ import annotations` leaves as a string, to be printed as it is."""
    return Annotation(found.replace("builtins.", "")) if isinstance(found, str) else found


def rendered(text: str) -> list[str]:
    """A docstring as markdown: examples as blocks, sections as lists."""
    pieces = SECTION.split(text)
    lines = prose(pieces[0])
    for title, body in zip(pieces[1::2], pieces[2::2], strict=True):
        # What is indented belongs to the section; what comes after it is prose again.
        inside, outside = [], []
        for line in body.strip("\n").splitlines():
            (outside if outside or (line and not line.startswith(" ")) else inside).append(line)
        lines += ["", f"**{TITLES[title]}**", ""]
        described = inspect.cleandoc("\n" + "\n".join(inside))
        lines += [quiet(described)] if title == "Returns" else items(described)
        if outside:
            lines += ["", *prose("\n".join(outside))]
    return lines


def prose(text: str) -> list[str]:
    """Paragraphs, and doctests as blocks."""
    lines: list[str] = []
    inside = False
    for line in text.strip().splitlines():
        if line.startswith(">>>") and not inside:
            inside = True
            lines += ["```pycon"]
        elif inside and not line.strip():
            inside = False
            lines += ["```"]
        lines.append(line if inside else quiet(line))
    return [*lines, "```"] if inside else lines


def items(text: str) -> list[str]:
    """``name: what it is`` lines as a list."""
    lines = []
    for line in text.splitlines():
        # A continuation line is indented; everything else starts the next item.
        match = None if line.startswith(" ") else re.match(r"([\w*, ]+): (.*)", line)
        lines.append(f"- `{match[1]}`: {quiet(match[2])}" if match else f"  {quiet(line.strip())}".rstrip())
    return lines


def quiet(text: str) -> str:
    """Two backticks are reStructuredText's; a bare asterisk would be emphasis."""
    text = text.replace("``", "`")
    return "`".join(
        part if odd else re.sub(r"(?<!\*)\*(?!\*)", r"\\*", part)
        for odd, part in ((i % 2, part) for i, part in enumerate(text.split("`")))
    )


def public(owner: type) -> list[str]:
    """The public names of a class, in the order in which they are written."""
    return [name for name in vars(owner) if not name.startswith("_")]


def page(title: str, *parts: list[str]) -> str:
    """A page of entries."""
    lines = [f"# {title}", "", HEAD, "", *(line for part in parts for line in part)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def functions() -> dict[str, list[str]]:
    """The functions, by family."""
    groups: dict[str, list[str]] = {}
    for name, home in mw._HOME_OF.items():
        if home.startswith("maskwise.ops.") and name not in ELSEWHERE:
            groups.setdefault(PARTS.get(home.removeprefix("maskwise.ops."), MORE), []).append(name)
    others = [name for name in mw.__all__ if name not in (*mw._HOME_OF, *ELSEWHERE, *PLANS)]
    return {**groups, MORE: groups.get(MORE, []) + others}


def layers() -> dict[str, list[str]]:
    """What mw.nn has, by what it is for."""
    groups: dict[str, list[str]] = {title: [] for title in (*LAYERS.values(), MORE)}
    for name in mw.nn.__all__:
        if name not in ("gates", "schedule"):
            module = getattr(mw.nn, name).__module__.removeprefix("maskwise.nn.").split(".")[0]
            groups[LAYERS.get(module, MORE)].append(name)
    return groups


def parts(owner: Any, prefix: str, groups: dict[str, list[str]]) -> list[list[str]]:
    """A part for each group, with its entries."""
    return [[f"## {title}", "", *entries(owner, prefix, names)] for title, names in groups.items() if names]


def commands() -> list[str]:
    """An entry for each command: what it does, and its options."""
    group: Any = typer.main.get_command(cli.app)
    found = {f"maskwise {name}": each for name, each in group.commands.items()}
    found["maskwise bench"] = typer.main.get_command(bench.app)
    lines = []
    for name, each in found.items():
        shown = [p for p in each.params if not getattr(p, "hidden", False)]
        arguments = "".join(f" {p.name.upper()}" for p in shown if p.param_type_name == "argument")
        lines += [f"### {name}", "", "```sh", f"{name} [OPTIONS]{arguments}", "```", ""]
        lines += [inspect.cleandoc(each.help), ""]
        lines += ["| option | meaning |", "|---|---|"]
        for p in shown:
            if p.param_type_name == "option":
                meaning = re.sub(r"(--[\w-]+)", r"`\1`", p.help)
                lines.append(f"| `{', '.join(p.opts)}` | {meaning} |")
        lines.append("")
    return [*lines, "Exit codes: 0 success, 1 a check failed, 2 wrong usage, 130 interrupted."]


def pages() -> dict[str, str]:
    """Every page by its file name, in the order of the navigation."""
    of_data = [name for name, home in mw._HOME_OF.items() if home.startswith("maskwise.data")]
    outside = [name for name, home in mw._HOME_OF.items() if not home.startswith("maskwise.ops.")]
    of_ranks = [name for name in outside if mw._HOME_OF[name] == "maskwise.distributed"]
    of_models = [name for name in outside if name not in (*of_data, *of_ranks)]
    models = [name for name in mw.models.__all__ if name not in of_models]
    of_sampling = [name for name in data.__all__ if name not in of_data]
    made = {
        "mask.md": page("Mask", entries(mw, "mw.", ["Mask"]), entries(mw.Mask, "Mask.", public(mw.Mask))),
        "functions.md": page("Functions", *parts(mw, "mw.", functions())),
        "packed.md": page("Packed", entries(mw, "mw.", ["Packed"]), entries(mw.Packed, "Packed.", packed_names())),
        "nn.md": page(
            "Layers and gates",
            *parts(mw.nn, "mw.nn.", layers()),
            ["## Gates", "", *entries(gates, "mw.nn.gates.", gates.__all__)],
            ["## Schedules", "", *entries(schedule, "mw.nn.schedule.", schedule.__all__)],
        ),
        "models.md": page(
            "Models",
            entries(mw, "mw.", of_models),
            entries(mw.models, "mw.models.", models),
            ["## Assertions for tests", "", *entries(mw.testing, "mw.testing.", mw.testing.__all__)],
        ),
        "data.md": page("Data", entries(mw, "mw.", of_data), entries(data, "maskwise.data.", of_sampling)),
        "distributed.md": page(
            "Several ranks",
            entries(mw, "mw.", of_ranks),
            entries(mw.distributed, "mw.distributed.", mw.distributed.__all__),
        ),
        "plan.md": page(
            "Plans",
            entries(mw, "mw.", list(PLANS)),
            entries(dispatch, "maskwise.plan.", ["Plan", "Skips"]),
            entries(import_module("maskwise.plan.explain"), "maskwise.plan.explain.", ["Log", "Call"]),
        ),
        "cli.md": page("Command line", commands()),
        "errors.md": page(
            "Errors", entries(errors, "maskwise.errors.", [name for name in errors.__all__ if name != "say"])
        ),
    }
    made["index.md"] = index(made)
    return made


def packed_names() -> list[str]:
    """What is public of Packed besides its fields."""
    return [name for name in public(mw.Packed) if name != "capacity"]


def index(made: dict[str, str]) -> str:
    """The first page: every name with its first sentence, and a link to its entry."""
    aliases = "; ".join(f"`{name}` is {meaning}" for name, meaning in ALIASES.items())
    lines = ["# API", "", HEAD, "", f"In signatures, {aliases}.", ""]
    for file, text in made.items():
        title = text.splitlines()[0].removeprefix("# ")
        lines += [f"## {title}", "", "| name | description |", "|---|---|"]
        for name, first in re.findall(r"^### (.*)\n\n```\w+\n(?:.*\n)*?```\n\n(.*)", text, flags=re.M):
            lines.append(f"| [`{name}`]({file}#{anchor(name)}) | {first.replace('|', chr(92) + '|')} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def anchor(heading: str) -> str:
    """The anchor that markdown gives a heading."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    for file, text in pages().items():
        (folder / file).write_text(text, encoding="utf-8")
