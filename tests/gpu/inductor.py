"""The Triton kernels that Inductor would make of an idiom for a GPU that is not here, and figures of machine code.

Inductor lowers a graph of fake CUDA tensors for the properties of an H100, and prints the kernels that it would start;
those are compiled ahead of time, as ours are. Of the configurations that it would try on the device, the one with the
fewest instructions for an element is taken.
"""

from __future__ import annotations

import importlib.util
import re
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.compiler import ASTSource

from tests.gpu import aot, machine_code
from tests.gpu.guard import cuda_without_cuda

TARGET = "sm_90"
#: Of an H100.
PROCESSORS, REGISTERS, THREADS = 132, 65536, 2048


@dataclass(frozen=True)
class Started:
    """A kernel that would be started: its machine code and resources, programs, warps, and bytes read and written."""

    binary: object
    programs: int
    warps: int
    moved: int


@dataclass(frozen=True)
class Figures:
    """What the kernels of a call would do, of which the one that moves the most is told in detail."""

    launches: int
    programs: int
    warps: int
    moved: int
    #: Bytes of loads that all threads of a processor have in flight, as far as its registers allow.
    in_flight: int
    #: Of the innermost loop that loads, or of all code where there is none: instructions, for each element loaded.
    instructions: float
    #: In loops that load.
    barriers: int
    registers: int


def figures(started, bytes_per_element):
    """The figures of the kernels of a call, in which so many bytes are loaded for an element."""
    most = max(started, key=lambda each: each.moved)
    found = machine_code.loops(most.binary)
    # The loop that loads the most, of equal ones the shorter: tiles at the ends of a range have a longer one. Without
    # a loop, everything.
    code = max(found, key=lambda each: (sum(each.loads), -len(each.body))) if found else machine_code.whole(most.binary)
    bytes_loaded = sum(code.loads)
    used = machine_code.resources(most.binary).registers
    resident = min(THREADS, REGISTERS // (used * 32 * most.warps) * 32 * most.warps)
    resident = min(resident, ceil(most.programs / PROCESSORS) * 32 * most.warps)
    return Figures(
        len(started),
        most.programs,
        most.warps,
        sum(each.moved for each in started),
        # What a thread has loaded is in its registers.
        min(bytes_loaded, 4 * used) * resident,
        len(code.body) / max(bytes_loaded / bytes_per_element, 1e-9),
        sum(loop.barriers for loop in found),
        used,
    )


def ours(launches):
    """What our launchers would start."""
    return [Started(aot.compiled(each, TARGET), each.programs, each.warps, each.moved) for each in launches]


# -- Inductor ----------------------------------------------------------------------------------------------------------
def code_of(idiom, *operands):
    """The program that Inductor makes of an idiom for fake CUDA tensors like the operands."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    with _pretending(), cuda_without_cuda(), FakeTensorMode() as mode:
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in operands]
        module = make_fx(idiom, decomposition_table=select_decomp_table())(*fakes)
        graph = GraphLowering(module, example_inputs=fakes, shape_env=None, is_inference=True)
        with V.set_graph_handler(graph), V.set_fake_mode(mode), DebugContext():
            graph.run(*fakes)
            out = graph.codegen()[0]
    return getattr(out, "value", out)


def compiled_graph(call, *operands):
    """The graph that AOTAutograd makes of a call on fake CUDA tensors like the operands, and Inductor's program."""
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.post_grad import decompose_triton_kernel_wrapper_functional
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    found = []

    def compiler(graph, inputs):
        found.append((graph, inputs))
        return graph

    driver = triton.runtime.driver
    target = SimpleNamespace(get_current_target=lambda: aot.TARGETS[TARGET], get_current_device=lambda: 0)
    before = driver._active
    driver.set_active(target)
    try:
        with cuda_without_cuda(), FakeTensorMode() as mode, torch.no_grad():
            fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in operands]
            aot_function(call, fw_compiler=compiler, decompositions=select_decomp_table())(*fakes)
        ((module, inputs),) = found
        text = str(module.code)
        with _pretending(), cuda_without_cuda(), mode:
            decompose_triton_kernel_wrapper_functional(module.graph)
            module.recompile()
            graph = GraphLowering(module, example_inputs=inputs, shape_env=None, is_inference=True)
            with V.set_graph_handler(graph), V.set_fake_mode(mode), DebugContext():
                graph.run(*inputs)
                out = graph.codegen()[0]
    finally:
        driver._active = before
    return text, getattr(out, "value", out)


def _pretending():
    """Patches by which Inductor takes this machine for one with an H100."""
    from torch._inductor import config
    from torch._inductor.runtime.hints import DeviceProperties

    facts = {
        "multi_processor_count": PROCESSORS, "major": 9, "regs_per_multiprocessor": REGISTERS,
        "max_threads_per_multi_processor": THREADS, "warp_size": 32, "max_threads_per_block": 1024,
    }  # fmt: skip
    known = {name: value for name, value in facts.items() if name in DeviceProperties._fields}
    made = DeviceProperties(type="cuda", index=0, cc=90, **known)
    device = SimpleNamespace(
        minor=0, name="H100", total_memory=80 << 30, L2_cache_size=50 << 20, gcnArchName="", **facts
    )
    device.shared_memory_per_block_optin, device.shared_memory_per_block = 232448, 49152
    stack = ExitStack()
    for patch in (
        mock.patch.object(DeviceProperties, "create", classmethod(lambda cls, device: made)),
        mock.patch("torch._dynamo.device_interface.CudaInterface.Worker.get_device_properties", return_value=device),
        mock.patch("torch.cuda.get_device_properties", return_value=device),
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
        mock.patch("torch.cuda.current_device", return_value=0),
        mock.patch("torch.cuda.device_count", return_value=1),
        mock.patch("torch.cuda.is_available", return_value=True),
        # Cached where another test has found no driver.
        mock.patch("torch._inductor.scheduler.has_triton", return_value=True),
        mock.patch("torch.utils._triton.triton_hash_with_backend", return_value=""),
        mock.patch("torch._inductor.runtime.triton_helpers.set_driver_to_gpu", return_value=None),
        config.patch(fx_graph_cache=False),
    ):
        stack.enter_context(patch)
    return stack


def theirs(idiom, bytes_per_element, *operands):
    """The kernels that Inductor would start for an idiom; None where it calls something else than Triton kernels."""
    code = code_of(idiom, *operands)
    if "extern_kernels" in re.sub(r"^.*import.*$|^extern_kernels = .*$", "", code, flags=re.M):
        return None
    sources = dict(re.findall(r"async_compile\.triton\('(\w+)', '''\n(.*?)''', device_str", code, flags=re.S))
    sizes = _sizes(code, operands)
    # In the order of `run`, which the parameters have without constants.
    found = []
    for name, given in _runs(code):
        tried = _tried(name, sources[name], given.split(", "), sizes)
        found.append(min(tried, key=lambda each: figures([each], bytes_per_element).instructions))
    return found


def _runs(code):
    return re.findall(r"^\s+(\w+)\.run\((.*?), stream=", code, flags=re.M)


def _sizes(code, operands):
    """Bytes by the name of a buffer."""
    (names,) = re.findall(r"^\s+([\w, ]+?),? = args$", code, flags=re.M)[:1]
    found = {name: x.numel() * x.element_size() for name, x in zip(names.split(", "), operands, strict=True)}
    for name, size, dtype in re.findall(r"(\w+) = empty_strided_cuda\(\((.*?)\), \(.*?\), torch\.(\w+)\)", code):
        elements = 1
        for each in re.findall(r"\d+", size):
            elements *= int(each)
        found[name] = elements * getattr(torch, dtype).itemsize
    for new, old in re.findall(r"(\w+) = (\w+); del \w+  # reuse", code):
        found[new] = found.get(old, 0)
    for new, old in re.findall(r"(\w+) = reinterpret_tensor\((\w+),.*?# reuse", code):
        found[new] = found.get(old, 0)
    return found


def _tried(name, source, given, sizes):
    """A kernel in each of its configurations."""
    kernel = _loaded(name, source)
    return [_started(kernel, config, source, given, sizes) for config in kernel.configs]


def _started(kernel, config, source, given, sizes):
    meta = kernel.triton_meta
    constants = {**meta["constants"], **config.kwargs}
    signature = {n: "constexpr" if n in constants else kind for n, kind in meta["signature"].items()}
    places = {n: i for i, n in enumerate(kernel.fn.arg_names)}
    constants = {(places[n],): value for n, value in constants.items() if n in places}
    attributes = dict(meta["configs"][0]) if meta.get("configs") else {}
    binary = triton.compile(
        ASTSource(kernel.fn, signature, constants, attributes),
        target=aot.TARGETS[TARGET],
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )
    passed = dict(zip((n for n, kind in meta["signature"].items() if kind != "constexpr"), given, strict=False))
    programs = 1
    for axis in "xyz":
        if f"{axis}numel" in passed:
            programs *= ceil(int(passed[f"{axis}numel"]) / config.kwargs.get(f"{axis.upper()}BLOCK", 1))
    moved = 0
    for parameter, buffer in passed.items():
        if "ptr" in parameter:
            times = len(re.findall(rf"tl\.load\({parameter}\b", source)) + len(
                re.findall(rf"tl\.store\({parameter}\b", source)
            )
            moved += max(times, 1) * sizes.get(buffer, 0)
    return Started(binary, programs, config.num_warps, moved)


def _loaded(name, source):
    """The kernel with Inductor's configurations for it."""
    folder = Path(tempfile.mkdtemp())
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    with _pretending():
        spec.loader.exec_module(module)
    return getattr(module, name)
