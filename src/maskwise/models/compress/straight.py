"""Whether a module's forward does the same whatever its attributes and its surroundings are: no branch is hidden."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from typing import Any

from torch import nn

__all__ = ["is_straight"]

#: Expressions that cannot branch, and make no function that could.
_PLAIN = (ast.Attribute, ast.BinOp, ast.Constant, ast.Dict, ast.List, ast.Slice, ast.Starred, ast.Tuple, ast.UnaryOp)
_FIXED = (ast.Constant, ast.Slice, ast.Tuple, ast.UnaryOp, ast.unaryop, ast.expr_context)


def is_straight(module: nn.Module) -> bool:
    """Whether forward is one line of calls, of the module's children and of torch's functions, and nothing else.

    Then what a trace has seen is all that it ever does: it reads no flag, neither of the module nor of a global, calls
    no function of somebody else, and does not look at its children but to call them. Source that cannot be read, or is
    not that of the code, proves nothing.

    >>> is_straight(nn.Identity()), is_straight(nn.MultiheadAttention(2, 1))
    (True, False)
    """
    function = type(module).forward
    if not isinstance(function, types.FunctionType) or "forward" in vars(module) or hasattr(function, "__wrapped__"):
        return False
    definition = _definition(function)
    if definition is None or function.__closure__:
        return False
    return _Forward(module, function).is_straight(definition)


def _definition(function: types.FunctionType) -> ast.FunctionDef | None:
    """The source of a function as a tree, if it is the source of this very code."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        compiled = compile(tree, "forward", "exec", dont_inherit=True)
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    definition = tree.body[0] if len(tree.body) == 1 else None
    codes = [each for each in compiled.co_consts if isinstance(each, types.CodeType) and each.co_name == "forward"]
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list or len(codes) != 1:
        return None
    theirs, ours = codes[0], function.__code__
    same = all(getattr(theirs, name) == getattr(ours, name) for name in ("co_code", "co_names", "co_varnames"))
    return definition if same else None


class _Forward:
    """What the names in a forward stand for."""

    def __init__(self, module: nn.Module, function: types.FunctionType) -> None:
        self._children = module._modules
        self._globals = function.__globals__
        self._locals = function.__code__.co_varnames
        self._self = self._locals[0] if self._locals else ""

    def is_straight(self, definition: ast.FunctionDef) -> bool:
        return all(self._is_statement(each) for each in definition.body)

    def _is_statement(self, statement: ast.stmt) -> bool:
        if isinstance(statement, ast.Assign):
            return all(map(self._is_target, statement.targets)) and self._is_expression(statement.value)
        if isinstance(statement, ast.AnnAssign | ast.AugAssign):
            return self._is_target(statement.target) and (
                statement.value is None or self._is_expression(statement.value)
            )
        if isinstance(statement, ast.Expr | ast.Return):
            return statement.value is None or self._is_expression(statement.value)
        return False

    def _is_target(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Tuple):
            return all(map(self._is_target, node.elts))
        return isinstance(node, ast.Name) and node.id != self._self

    def _is_expression(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            # A local, or torch. Whatever else is global may change, and so may attributes of the module itself.
            if node.id in self._locals:
                return node.id != self._self
            return node.id in self._globals and _is_torchs(self._globals[node.id])
        if isinstance(node, ast.Call):
            return (self._is_child(node.func) or self._is_expression(node.func)) and all(
                self._is_expression(each.value if isinstance(each, ast.keyword) else each)
                for each in (*node.args, *node.keywords)
            )
        if isinstance(node, ast.Subscript):
            # An index that is computed could choose between two results.
            return self._is_expression(node.value) and all(isinstance(each, _FIXED) for each in ast.walk(node.slice))
        if isinstance(node, _PLAIN):
            return all(map(self._is_expression, ast.iter_child_nodes(node)))
        return isinstance(node, ast.operator | ast.unaryop | ast.expr_context)

    def _is_child(self, node: ast.AST) -> bool:
        is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self._self
        return is_own and isinstance(node, ast.Attribute) and node.attr in self._children


def _is_torchs(value: Any) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return isinstance(name, str) and name.partition(".")[0] == "torch"
