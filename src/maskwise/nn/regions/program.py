"""A model as steps on maps: each reads the windows of one map, and all that follows position by position."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from maskwise.errors import ArgumentError, say
from maskwise.nn.conv import MaskedConv2d, RegionConv2d
from maskwise.nn.norm import MaskedBatchNorm2d
from maskwise.nn.regions.pool import RegionAvgPool2d, RegionMaxPool2d
from maskwise.nn.regions.rules import Local, Pointwise, Rule, part_of_channels, relu, rule_of

__all__ = [
    "DIFFERS_IN_TRAINING",
    "Program",
    "Step",
    "map_nodes",
    "plan_steps",
    "run_tail",
    "run_whole",
    "trace",
    "versions_of",
]

#: Names of functions and methods whose results differ from call to call.
_RANDOM = frozenset(
    (
        "rand",
        "randn",
        "randint",
        "rand_like",
        "randn_like",
        "bernoulli",
        "multinomial",
        "normal",
        "randperm",
        "poisson",
        "fractional_max_pool2d",
        "gumbel_softmax",
    )
)
#: Layers whose results differ from call to call, in evaluation too.
_RANDOM_MODULES = (nn.FractionalMaxPool2d,)
#: Layers that do something else in training.
DIFFERS_IN_TRAINING = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd, nn.RNNBase, nn.RReLU)
#: Results of these kinds of layers are no view of their input.
_OWN_MEMORY = ("convolution", "max", "average")


@dataclass
class Step:
    """Nodes that run together on tiles: a layer that reads windows, if there is one, and what follows pointwise.

    Attributes:
        out: the node whose value the step gives.
        head: the layer that reads windows of ``source``.
        source: the node whose value the head reads.
        tail: pointwise nodes, with what each runs.
        operands: further nodes that the tail reads, at the positions of the result.
        reason: why the step runs on whole maps, where it does.
    """

    out: fx.Node
    head: Local | None = None
    source: fx.Node | None = None
    tail: list[tuple[fx.Node, Pointwise]] = field(default_factory=list)
    operands: list[fx.Node] = field(default_factory=list)
    reason: str | None = None
    head_node: fx.Node | None = None

    @property
    def name(self) -> str:
        """The name of the layer that does most of it."""
        node = self.head_node or self.out
        return str(node.target) if node.op == "call_module" else node.name

    @property
    def reads(self) -> list[fx.Node]:
        """The nodes whose values it reads."""
        return [*([] if self.source is None else [self.source]), *self.operands]


@dataclass
class Program:
    """A traced model for inputs of certain shapes: its steps in order, and the shapes of all values."""

    inputs: list[fx.Node]
    steps: list[Step]
    output: Any
    shapes: dict[fx.Node, Any]
    constants: dict[fx.Node, Any]
    #: The names of the classes of called modules.
    modules: dict[str, str]
    #: Of the parameters and buffers, see `versions_of`.
    versions: tuple[Any, ...]
    #: Maps that hold zeros but where tiles were written, by shape, with what was: buffers of calls on regions.
    buffers: dict[Any, list[tuple[Tensor, Any]]] = field(default_factory=dict)

    @property
    def reasons(self) -> list[str]:
        """Why steps on maps run as a whole, one line each."""
        return [f"{step.name}: {step.reason}" for step in self.steps if step.reason]


#: Layers of Maskwise that are torch's where they are called without a mask.
_OUR_LAYERS = (MaskedConv2d, RegionConv2d, MaskedBatchNorm2d, RegionMaxPool2d, RegionAvgPool2d)


class _Tracer(fx.Tracer):
    """Torch's tracer, which does not look into layers of Maskwise that are torch's layers."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in _OUR_LAYERS or super().is_leaf_module(m, module_qualified_name)


def trace(op: str, model: nn.Module, *, is_random_allowed: bool = False) -> fx.GraphModule:
    """The graph of a model, or raise with the reason why it cannot be followed.

    Args:
        op: who traces it.
        model: the model.
        is_random_allowed: whether it may be in training mode, and give other results in every call.
    """
    try:
        graph = _Tracer().trace(model)
    except Exception as error:
        # Whatever a model does with a proxy: its control flow depends on values, or it calls what knows no proxies.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        must, hint = "be a model that torch.fx can trace", f"{op}(model.backbone), without the part that it cannot"
        raise ArgumentError(say(op, "model", must=must, got=f"one where that fails: {reason}", hint=hint)) from error
    traced = fx.GraphModule(model, graph)
    for node in list(graph.nodes):
        _check(op, node, traced, is_random_allowed)
        if _is_in_place(node, traced):
            _see_results(node)
        elif _is_identity(node, traced):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        else:
            _split_channels(node)
    return traced


def _split_channels(node: fx.Node) -> None:
    """Make each part of a chunk or a split of the channels a node of its own, pointwise."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op not in ("call_function", "call_method") or name not in ("chunk", "split"):
        return
    given = {**dict(zip(("source", "sizes", "dim"), node.args, strict=False)), **node.kwargs}
    source = given.get("source", given.get("input", given.get("tensor")))
    sizes = next(
        (given[each] for each in ("sizes", "chunks", "split_size", "split_size_or_sections") if each in given), 1
    )
    parts = list(node.users)
    if given.get("dim") not in (1, -3) or not all(
        part.target is operator.getitem and isinstance(part.args[1], int) for part in parts
    ):
        return
    for part in parts:
        with node.graph.inserting_before(part):
            made = node.graph.call_function(part_of_channels, (source, name, sizes, part.args[1]))
        part.replace_all_uses_with(made)
        node.graph.erase_node(part)
    node.graph.erase_node(node)


def _is_identity(node: fx.Node, traced: fx.GraphModule) -> bool:
    """Whether a node gives its input, as the shortcut of a residual block does."""
    is_module = node.op == "call_module" and isinstance(traced.get_submodule(str(node.target)), nn.Identity)
    return is_module and len(node.args) == 1 and isinstance(node.args[0], fx.Node) and not node.kwargs


def _check(op: str, node: fx.Node, traced: fx.GraphModule, is_random_allowed: bool) -> None:
    hint = "model.eval()"
    if node.op == "call_module":
        module = traced.get_submodule(str(node.target))
        differs = any(isinstance(m, DIFFERS_IN_TRAINING) and m.training for m in module.modules())
        if differs and not is_random_allowed:
            got = f"{type(module).__name__} {node.target!r} in training mode"
            raise ArgumentError(say(op, "model", must="be in evaluation mode", got=got, hint=hint))
        if isinstance(module, _RANDOM_MODULES) and not is_random_allowed:
            must, got = "give the same result for the same input", f"{type(module).__name__} {node.target!r}"
            raise ArgumentError(say(op, "model", must=must, got=got, hint="nn.MaxPool2d"))
        return
    if node.op not in ("call_function", "call_method"):
        return
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_dropout = "dropout" in name and (node.kwargs.get("training", True) or node.kwargs.get("train"))
    if (name in _RANDOM or is_dropout) and not is_random_allowed:
        must = "give the same result for the same input"
        raise ArgumentError(say(op, "model", must=must, got=f"one that calls `{name}`", hint=hint))
    if name == "setitem" or (name.endswith("_") and not name.endswith("__") and not _is_known_in_place(name)):
        must, hint = "compute without writing into its tensors", "torch.where, or a copy"
        raise ArgumentError(say(op, "model", must=must, got=f"one that calls `{name}`", hint=hint))


def _is_known_in_place(name: str) -> bool:
    return name in ("relu_", "add_", "sub_", "mul_", "div_", "clamp_", "sigmoid_", "tanh_", "leaky_relu_", "elu_",
                    "hardtanh_", "relu6_")  # fmt: skip


def _is_in_place(node: fx.Node, traced: fx.GraphModule) -> bool:
    if node.op == "call_module":
        return bool(getattr(traced.get_submodule(str(node.target)), "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow)
    return node.target in in_place or _is_known_in_place(name) or bool(node.kwargs.get("inplace"))


def _see_results(node: fx.Node) -> None:
    """Let what follows a node that overwrites its input read the result: there is no overwriting here."""
    source = node.args[0] if node.args else node.kwargs.get("input")
    if isinstance(source, fx.Node):
        order = {each: at for at, each in enumerate(node.graph.nodes)}
        source.replace_all_uses_with(node, delete_user_cb=lambda user: order[user] > order[node])


# -- steps -------------------------------------------------------------------------------------------------------------
def plan_steps(op: str, traced: fx.GraphModule, inputs: Sequence[Any]) -> Program:
    """The steps of a traced model for inputs of certain shapes.

    Raises:
        ArgumentError: the model does not take these inputs.
    """
    shapes = _shapes(op, traced, inputs)
    constants = {node: _attribute(traced, str(node.target)) for node in traced.graph.nodes if node.op == "get_attr"}
    output = next(node for node in traced.graph.nodes if node.op == "output")
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    steps: dict[fx.Node, Step] = {}
    for node in traced.graph.nodes:
        if node.op not in ("call_module", "call_function", "call_method"):
            continue
        target = traced.get_submodule(str(node.target)) if node.op == "call_module" else node.target
        rule = rule_of(node, target, shapes, constants.get)
        step = _joined(node, rule, steps, shapes) or _started(node, rule, shapes)
        steps[node] = step
        step.out = node
    order = {node: at for at, node in enumerate(traced.graph.nodes)}
    unique = {id(step): step for step in steps.values()}
    ordered = sorted(unique.values(), key=lambda step: order[step.out])
    for step in ordered:
        _fold(step)
    modules = {
        str(node.target): type(traced.get_submodule(str(node.target))).__name__
        for node in traced.graph.nodes
        if node.op == "call_module"
    }
    return Program(placeholders, ordered, output.args[0], shapes, constants, modules, versions_of(traced))


def versions_of(model: nn.Module) -> tuple[Any, ...]:
    """What changes with the parameters and buffers of a model."""
    # Faster than `parameters` and `buffers`, which look for names and for duplicates.
    return tuple(
        (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
        for module in model.modules()
        for each in (module._parameters, module._buffers)
        for tensor in each.values()
        if tensor is not None
    )


def _started(node: fx.Node, rule: Rule, shapes: dict[fx.Node, Any]) -> Step:
    if isinstance(rule, Local):
        source = node.args[0] if node.args else node.kwargs["input"]
        assert isinstance(source, fx.Node)
        return Step(node, rule, source, head_node=node)
    if isinstance(rule, Pointwise):
        return Step(node, tail=[(node, rule)], operands=list(node.all_input_nodes))
    return Step(node, operands=list(node.all_input_nodes), reason=rule.reason)


def _joined(node: fx.Node, rule: Rule, steps: dict[fx.Node, Step], shapes: dict[fx.Node, Any]) -> Step | None:
    """The step that a pointwise node continues: that of an operand that nothing else reads."""
    if not isinstance(rule, Pointwise):
        return None
    # Rather that of a layer than that of another sum: what it gives is not written and read again.
    operands = node.all_input_nodes[::-1]
    operands.sort(key=lambda each: each not in steps or not steps[each].head)
    for operand in operands:
        step = steps.get(operand)
        own = shapes.get(operand)
        if (
            step is None
            or own is None
            or step.reason
            or step.out is not operand
            or len(operand.users) != 1
            or tuple(own[2:]) != tuple(shapes[node][2:])
            or own[0] != shapes[node][0]
        ):
            continue
        step.tail.append((node, rule))
        step.operands += [each for each in node.all_input_nodes if each is not operand and each not in step.operands]
        return step
    return None


def _fold(step: Step) -> None:
    """Make a batch norm that follows a convolution a part of it."""
    if step.head is None or step.head.fold is None or not step.tail:
        return
    node, rule = step.tail[0]
    if rule.affine is None or node.args[:1] != (step.head_node,):
        return
    step.head = step.head.fold(*rule.affine)
    step.tail[0] = (node, Pointwise(lambda x, *_, **__: x))


def _attribute(traced: fx.GraphModule, path: str) -> Any:
    value: Any = traced
    for part in path.split("."):
        value = getattr(value, part)
    return value


class _Shapes(fx.Interpreter):
    """Runs a graph and keeps the shape of every value."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.shapes: dict[fx.Node, Any] = {}

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        # Its gate reads values.
        if isinstance(module, MaskedConv2d):
            return nn.Conv2d.forward(module, *args, **kwargs)
        return super().call_module(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.shapes[n] = tuple(value.shape) if isinstance(value, Tensor) else None
        return value


class _OnMeta(nn.Module):
    """A module whose call is the call of an interpreter, so that its parameters can be replaced for one call."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__()
        self.traced = traced
        self.found: dict[fx.Node, Any] = {}

    def forward(self, *inputs: Any) -> None:
        run = _Shapes(self.traced)
        run.run(*inputs)
        self.found = run.shapes


def _shapes(op: str, traced: fx.GraphModule, inputs: Sequence[Any]) -> dict[fx.Node, Any]:
    """The shapes of all values, without computing one."""
    wrapper = _OnMeta(traced)
    named = {**dict(wrapper.named_parameters()), **dict(wrapper.named_buffers())}
    meta = {name: tensor.detach().to("meta") for name, tensor in named.items()}
    on_meta = [each.to("meta") if isinstance(each, Tensor) else each for each in inputs]
    with torch.no_grad():
        try:
            torch.func.functional_call(wrapper, meta, tuple(on_meta))
        except (RuntimeError, NotImplementedError):
            # A shape that depends on values, or a layer without a meta kernel.
            try:
                wrapper(*inputs)
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[0]
                given = [f"{each.dtype} {tuple(each.shape)}" for each in inputs if isinstance(each, Tensor)]
                got, hint = f"{', '.join(given)}: {reason}", "model(x) shows what the model takes"
                raise ArgumentError(say(op, "inputs", must="be what the model takes", got=got, hint=hint)) from error
    return wrapper.found


def map_nodes(value: Any, read: Callable[[fx.Node], Any]) -> Any:
    """Arguments with the values of the nodes in them."""
    return fx.node.map_arg(value, read)


# -- values ------------------------------------------------------------------------------------------------------------
def run_tail(step: Step, value: Tensor | None, read: Callable[[fx.Node], Any]) -> Any:
    """Run the pointwise nodes of a step on maps or on batches of tiles.

    Args:
        step: a step.
        value: what its head gave.
        read: the value of another node, at the positions of the result.
    """
    found: dict[fx.Node, Any] = {}
    if step.head_node is not None:
        found[step.head_node] = value
    is_own = step.head is not None and step.head.kind in _OWN_MEMORY

    def lookup(node: fx.Node) -> Any:
        return found[node] if node in found else read(node)

    for node, rule in step.tail:
        args, kwargs = map_nodes((node.args, node.kwargs), lookup)
        if is_own and rule.run is relu and node.args[0] in found:
            value = torch.relu_(args[0])
        elif is_own and rule.run in (operator.add, torch.add) and node.args[0] in found and _fits_in(args, kwargs):
            value = args[0].add_(args[1])
        else:
            value = rule.run(*args, **kwargs)
        found[node] = value
    return value


def _fits_in(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a sum of two tensors has the shape and the dtype of the first."""
    if kwargs or len(args) != 2 or not isinstance(args[1], Tensor):
        return False
    return bool(args[0].shape == args[1].shape and args[0].dtype == args[1].dtype)


def run_whole(step: Step, traced: fx.GraphModule, read: Callable[[fx.Node], Any]) -> Any:
    """Run a node on whole values."""
    node = step.out
    args, kwargs = map_nodes((node.args, node.kwargs), read)
    if node.op == "call_module":
        return traced.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)
