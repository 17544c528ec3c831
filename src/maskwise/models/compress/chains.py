"""Which layers provably feed one another and nothing else: in nn.Sequential, in torch's encoder layers, in a trace."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

from maskwise.models.compress.example import CallRecord
from maskwise.models.compress.surgery import has_hooks, parents

__all__ = ["Link", "UnitwiseOp", "is_straight_line", "links"]

_ACTIVATIONS = (
    *(nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU),
    *(nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink),
    *(nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Threshold),
)
_DROPOUTS = (nn.AlphaDropout, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.FeatureAlphaDropout)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
#: They map a constant channel to a constant channel, since they do not read their padding.
_POOLS = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.MaxPool2d)
_FUNCTIONS: frozenset[Any] = frozenset(
    {
        *(F.celu, F.elu, F.gelu, F.hardsigmoid, F.hardswish, F.hardtanh, F.leaky_relu, F.logsigmoid, F.mish, F.relu),
        *(F.relu6, F.selu, F.sigmoid, F.silu, F.softplus, F.softsign, F.tanh),
        *(torch.relu, torch.sigmoid, torch.tanh),
    }
)


@dataclass(frozen=True, eq=False)
class UnitwiseOp:
    """An op between two layers that treats each unit by itself, and its module, if it is one."""

    run: Callable[[Tensor], Tensor]
    module: nn.Module | None = None


@dataclass(frozen=True, eq=False)
class Link:
    """A layer whose outputs go through unitwise ops into another layer, and nowhere else."""

    first: nn.Linear | nn.Conv2d
    ops: tuple[UnitwiseOp, ...]
    second: nn.Linear | nn.Conv2d
    #: The module whose forward calls all of them, in this order, in every call.
    owner: nn.Module


def links(model: nn.Module, records: Mapping[nn.Module, CallRecord]) -> list[Link]:
    """All links of a model in evaluation, in order.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).eval()
    >>> records = {module: CallRecord(1, torch.ones(4, 2)) for module in model.modules()}
    >>> [(link.first, link.second) == (model[0], model[2]) for link in links(model, records)]
    [True]
    """
    found: list[Link] = []
    for link in _possible_links(model):
        layers = [link.first, link.second]
        modules = [*layers, *(op.module for op in link.ops if op.module is not None)]
        calls = records[link.owner].calls
        # Called as often as their owner: nothing else calls them.
        called_once = calls > 0 and all(records[layer].calls == calls for layer in layers)
        held_once = all(len(parents(model, layer)) == 1 for layer in layers)
        if called_once and held_once and not any(map(has_hooks, modules)) and _fits(link, records[link.first].x):
            found.append(link)
    return found


def _fits(link: Link, x: Tensor | None) -> bool:
    """Whether the sizes match, and the ops take the dim of the units for that of the units."""
    if x is None or link.first.weight.shape[0] != link.second.weight.shape[1]:
        return False
    kinds = {type(op.module) for op in link.ops}
    if isinstance(link.first, nn.Linear):
        # In three dims, the units of a batch norm are dim 1, those of a linear layer the last dim.
        return (x.dim() == 2 or nn.BatchNorm1d not in kinds) and kinds.isdisjoint((nn.BatchNorm2d, *_POOLS))
    return x.dim() == 4 and nn.BatchNorm1d not in kinds


def _possible_links(model: nn.Module) -> Iterator[Link]:
    inner = {child for module in model.modules() if _is_sequential(module) for child in module.children()}
    for module in model.modules():
        if _is_sequential(module):
            # The leaves of an inner nn.Sequential are among those of the outer one.
            if module not in inner or has_hooks(module):
                yield from _sequential_links(module)
        elif type(module) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
            first, second, act = module.linear1, module.linear2, module.activation
            op = _module_op(act) if isinstance(act, nn.Module) else _function_op(act, (), {})
            is_overridden = {"forward", "_ff_block"} & vars(module).keys()
            if not is_overridden and type(first) is nn.Linear and type(second) is nn.Linear and op is not None:
                yield Link(first, (op,), second, module)
        else:
            yield from _traced_links(module)


def _is_sequential(module: nn.Module) -> bool:
    if not isinstance(module, nn.Sequential) or "forward" in vars(module):
        return False
    return type(module).forward is nn.Sequential.forward and type(module).__iter__ is nn.Sequential.__iter__


def _leaves(sequential: nn.Module) -> Iterator[nn.Module]:
    for child in sequential.children():
        if _is_sequential(child) and not has_hooks(child):
            yield from _leaves(child)
        else:
            yield child


def _sequential_links(sequential: nn.Module) -> Iterator[Link]:
    last: nn.Linear | nn.Conv2d | None = None
    ops: list[UnitwiseOp] = []
    for leaf in _leaves(sequential):
        if type(leaf) is nn.Linear or (type(leaf) is nn.Conv2d and leaf.groups == 1):
            if last is not None and type(last) is type(leaf) and last is not leaf:
                yield Link(last, tuple(ops), leaf, sequential)
            last, ops = leaf, []
        elif (op := _module_op(leaf)) is not None:
            ops.append(op)
        else:
            last = None


class _Tracer(torch.fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _traced_links(module: nn.Module) -> Iterator[Link]:
    """The links of a module's own forward, if that can be traced and is the same in every call."""
    layers = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
    if len(layers) < 2 or len(inspect.signature(module.forward).parameters) != 1 or not is_straight_line(module):
        return
    try:
        graph = _Tracer().trace(module)
    except Exception:
        # What cannot be traced is not proven to be a chain.
        return
    called = [node.target for node in graph.nodes if node.op == "call_module"]
    layers = {name: layer for name, layer in layers.items() if called.count(name) == 1}
    for node in graph.nodes:
        if node.op != "call_module" or node.target not in layers:
            continue
        ops: list[UnitwiseOp] = []
        user = node
        while len(user.users) == 1:
            (user,) = user.users
            if not user.args or not isinstance(user.args[0], torch.fx.Node):
                break
            op = None
            if user.op == "call_module" and user.target in layers and not user.kwargs:
                yield Link(layers[node.target], tuple(ops), layers[user.target], module)
            elif user.op == "call_module" and len(user.args) == 1:
                op = _module_op(module.get_submodule(str(user.target)))
            elif user.op == "call_function":
                op = _function_op(user.target, user.args[1:], dict(user.kwargs))
            if op is None:
                break
            ops.append(op)


# -- unitwise ops ------------------------------------------------------------------------------------------------------
def _module_op(module: nn.Module) -> UnitwiseOp | None:
    """What a module does in evaluation, or None if that is no unitwise op.

    >>> _module_op(nn.LayerNorm(3)) is None, _module_op(nn.ReLU()).run(torch.tensor([-1.0, 1.0]))
    (True, tensor([0., 1.]))
    """
    kind = type(module)
    if kind in _DROPOUTS or kind in _POOLS:
        return UnitwiseOp(lambda x: x, module)
    # Without running statistics, a batch norm computes those of the batch in evaluation too.
    if kind in _ACTIVATIONS or (kind in _NORMS and module.running_mean is not None):
        return UnitwiseOp(module, module)
    return None


def _function_op(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UnitwiseOp | None:
    """What a function of x, args and kwargs does, or None if that is no unitwise op."""
    if function not in _FUNCTIONS:
        return None
    if not all(isinstance(value, bool | int | float | str) for value in (*args, *kwargs.values())):
        return None
    kwargs.pop("inplace", None)
    return UnitwiseOp(lambda x: function(x, *args, **kwargs))


# -- straight-line code ------------------------------------------------------------------------------------------------
#: Expressions that cannot branch, and make no function that could.
_BRANCHLESS = (
    *(ast.Attribute, ast.BinOp, ast.Constant, ast.Dict, ast.List, ast.Slice, ast.Starred, ast.Tuple, ast.UnaryOp),
    *(ast.operator, ast.unaryop, ast.expr_context),
)
_CONSTANT = (ast.Constant, ast.Slice, ast.Tuple, ast.UnaryOp, ast.unaryop, ast.expr_context)


def is_straight_line(module: nn.Module) -> bool:
    """Whether forward is straight-line code: calls of the module's children and of torch's functions, nothing else.

    Then a trace is valid for every call: forward reads no flag, neither of the module nor a global, calls no foreign
    function, and uses its children only to call them. Source that is missing, or is not that of the code, proves
    nothing.

    >>> is_straight_line(nn.Identity()), is_straight_line(nn.MultiheadAttention(2, 1))
    (True, False)
    """
    function = type(module).forward
    if not isinstance(function, types.FunctionType) or "forward" in vars(module) or hasattr(function, "__wrapped__"):
        return False
    definition = _definition(function)
    if definition is None or function.__closure__:
        return False
    return all(map(_Forward(module, function).is_statement, definition.body))


def _definition(function: types.FunctionType) -> ast.FunctionDef | None:
    """The syntax tree of a function, if its source is that of its code."""
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
    """The scope of a forward, in which names are resolved."""

    def __init__(self, module: nn.Module, function: types.FunctionType) -> None:
        self._children = module._modules
        self._globals = function.__globals__
        self._locals = function.__code__.co_varnames
        self._self = self._locals[0] if self._locals else ""

    def is_statement(self, statement: ast.stmt) -> bool:
        """Whether it assigns to locals, evaluates or returns an expression that cannot branch."""
        if isinstance(statement, ast.Assign):
            return all(map(self._is_target, statement.targets)) and self._is_expression(statement.value)
        if isinstance(statement, ast.AnnAssign | ast.AugAssign) and not self._is_target(statement.target):
            return False
        if isinstance(statement, ast.AnnAssign | ast.AugAssign | ast.Expr | ast.Return):
            return statement.value is None or self._is_expression(statement.value)
        return False

    def _is_target(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Tuple):
            return all(map(self._is_target, node.elts))
        return isinstance(node, ast.Name) and node.id != self._self

    def _is_expression(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            # A local, or torch. Any other global may change, and so may attributes of the module itself.
            if node.id in self._locals:
                return node.id != self._self
            return node.id in self._globals and _is_torchs(self._globals[node.id])
        if isinstance(node, ast.Call):
            return (self._is_child(node.func) or self._is_expression(node.func)) and all(
                self._is_expression(each.value if isinstance(each, ast.keyword) else each)
                for each in (*node.args, *node.keywords)
            )
        if isinstance(node, ast.Subscript):
            # A computed index could select between two results.
            return self._is_expression(node.value) and all(isinstance(each, _CONSTANT) for each in ast.walk(node.slice))
        return isinstance(node, _BRANCHLESS) and all(map(self._is_expression, ast.iter_child_nodes(node)))

    def _is_child(self, node: ast.AST) -> bool:
        is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self._self
        return is_own and isinstance(node, ast.Attribute) and node.attr in self._children


def _is_torchs(value: Any) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return isinstance(name, str) and name.partition(".")[0] == "torch"
