"""Every place in the package that raises an error."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from tests.errors.row import HOME

#: What is raised and is no error: how typer ends a command, and how a plan is asked for without running it.
NO_ERRORS = ("typer.Exit", "_Planned")


@dataclass(frozen=True)
class Site:
    """A raise statement."""

    file: str
    function: str
    first: int
    last: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.first} in {self.function}: {self.text}"


def sites() -> list[Site]:
    """All of them, but for those that hand on what was caught."""
    found = []
    for path in sorted(HOME.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for function, node in _raises(ast.parse(source), ""):
            if node.exc is None or ast.unparse(node.exc).startswith(NO_ERRORS):
                continue
            file = path.relative_to(HOME).as_posix()
            found.append(Site(file, function, node.lineno, node.end_lineno or node.lineno, ast.unparse(node.exc)))
    return found


def _raises(node: ast.AST, inside: str) -> Iterator[tuple[str, ast.Raise]]:
    for child in ast.iter_child_nodes(node):
        name = inside
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{inside}.{child.name}".lstrip(".")
        if isinstance(child, ast.Raise):
            yield name, child
        yield from _raises(child, name)
