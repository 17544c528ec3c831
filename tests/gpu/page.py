"""The page docs/gpu.md, made from what the launchers would start, the compiled kernels, and traces of the idioms.

``python -m tests.gpu.page docs/gpu.md`` writes it; a test fails when it is stale.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import triton

from maskwise.ops.gpu.launch import bytes_of
from tests.gpu import aot, calls, traffic

LAYOUT = calls.LAYOUTS[0]


def kept(x, m, value=0.0):
    return torch.where(m, x, value)


def target(x):
    return torch.empty_like(x)


def standardized(x, m):
    count = m.sum(-1, keepdim=True)
    apart = kept(x - kept(x, m).sum(-1, keepdim=True) / count, m)
    return apart * (apart.square().sum(-1, keepdim=True) / count + 1e-5).rsqrt()


def mean_loss(fn):
    return lambda x, m: (fn(x, target(x), reduction="none") * m).sum() / m.sum()


def masked(name, *rest):
    return lambda x, m: getattr(torch.masked, name)(x, *rest, mask=m)


#: function -> (the plain idiom, torch.masked or None)
IDIOMS = {
    "sum": (lambda x, m: kept(x, m).sum(-1), masked("sum", -1)),
    "prod": (lambda x, m: kept(x, m, 1.0).prod(-1), masked("prod", -1)),
    "mean": (lambda x, m: kept(x, m).sum(-1) / m.sum(-1), masked("mean", -1)),
    "var": (
        lambda x, m: (
            kept(x - (kept(x, m).sum(-1, keepdim=True) / m.sum(-1, keepdim=True)), m).square().sum(-1) / (m.sum(-1) - 1)
        ),
        masked("var", -1, True),
    ),
    "norm": (lambda x, m: torch.linalg.vector_norm(kept(x, m), 2, -1), masked("norm", 2.0, -1)),
    "amax": (lambda x, m: kept(x, m, -torch.inf).amax(-1), masked("amax", -1)),
    "argmax": (lambda x, m: kept(x, m, -torch.inf).argmax(-1), masked("argmax", -1)),
    "logsumexp": (lambda x, m: kept(x, m, -torch.inf).logsumexp(-1), masked("logsumexp", -1)),
    "any": (lambda x, m: kept(x, m).any(-1), None),
    "softmax": (lambda x, m: kept(x, m, -torch.inf).softmax(-1), masked("softmax", -1)),
    "log_softmax": (lambda x, m: kept(x, m, -torch.inf).log_softmax(-1), masked("log_softmax", -1)),
    "normalize": (lambda x, m: F.normalize(kept(x, m)), masked("normalize", 2.0, -1)),
    "standardize": (standardized, None),
    "cumsum": (lambda x, m: kept(x, m).cumsum(-1), masked("cumsum", -1)),
    "cumprod": (lambda x, m: kept(x, m, 1.0).cumprod(-1), masked("cumprod", -1)),
    "cummax": (lambda x, m: kept(x, m, -torch.inf).cummax(-1).values, None),
    "logcumsumexp": (lambda x, m: kept(x, m, -torch.inf).logcumsumexp(-1), None),
    "fill": (lambda x, m: kept(x, m), None),
    "loss 0 2": (mean_loss(F.mse_loss), None),
    "loss 4 2": (mean_loss(F.binary_cross_entropy_with_logits), None),
}
NAMES = {
    "loss 0 2": "loss(mse_loss)",
    "loss 4 2": "loss(bce with logits)",
    "pack": "pack(capacity)",
    "linear": "linear, 1/4 of 16 x 16 blocks",
}
#: Without an idiom that makes the host wait for nothing and has the same result.
ALONE = ("cross_entropy", "pack", "unpack", "segment sum", "segment softmax", "linear")
NO_GRADIENT = {"any", "argmax", "pack", "unpack", "fill", "linear"}

HEAD = """# On the GPU

*Made by `make gpu-page`; the tests fail when it is stale.*

On CUDA and ROCm every fused function is a [Triton](https://triton-lang.org) kernel: one launch forward, one or two
backward, no waiting for the device. Masks are read as bytes, masks that broadcast by their strides; what is dropped is
not read, wherever 16 bytes in a row are dropped. bfloat16 and float16 are added up in float32. The same laws hold as on
the CPU, and are tested there by Triton's interpreter; the kernels are compiled ahead of time for sm_80, sm_90, sm_100
and gfx942 in the tests. No kernel has been timed by the developers, who have no GPU: `maskwise bench --device cuda`
does it on yours.

- Without Triton (`pip install triton`), and on other devices, plain torch operations serve; `mw.explain()` says so.
- Inside `torch.compile` on a GPU, reductions, softmax, fill and losses are traced as plain torch operations, which
  Inductor fuses with their neighbours; scans, pack and segments stay ops of their own.
- `mw.pack(x, mask, capacity=n)` never asks how many are kept; `mw.pack(x, mask)` does, unless the mask knows. A mask of
  more than 65,536 is counted by a launch of its own.
- Sparse layers of 16 x 16 blocks multiply kept blocks alone; other layouts, and `mw.linear` with a mask, are dense.
- `sort`, `topk`, `median`, `quantile` and `attention` run on plain torch operations.
- A class that does not exist makes a cross entropy on a GPU NaN; on the CPU it raises.
"""

TABLE = """
For x of 4096 x 1024 float32 along its last dim, with a mask of x's shape: launches, and bytes read and written for each
element of x with everything kept, against the fewest there can be (each operand once); registers a thread and bytes of
shared memory of the kernel on sm_80, compiled by Triton {version}, which spills none of them. Beside it the idiom in
plain torch and torch.masked, traced operation by operation: each reads its operands and writes its result once. What
a program reads again from the cache, as a block-sparse product does, is not counted.
"""


def ours(name):
    """Launches, bytes an element, the fewest, registers and shared memory."""
    (call,) = [call for call in calls.CALLS if call.name == name]
    launches = call.launches(LAYOUT, torch.float32)
    elements = LAYOUT.tensors(torch.float32)[0].numel()
    read = {id(t): t for launch in launches for n in launch.reads if (t := launch.arguments[n]) is not None}
    written = {id(t): t for launch in launches for n in launch.writes if (t := launch.arguments[n]) is not None}
    inner = read.keys() & written.keys()
    fewest = sum(bytes_of(t) for i, t in (read | written).items() if i not in inner)
    moved = sum(launch.moved for launch in launches)
    needs = [aot.resources(launch, "sm_80") for launch in launches]
    return (
        str(len(launches)),
        f"{moved / elements:.1f} ({fewest / elements:.1f})",
        " + ".join(str(n.registers) for n in needs),
        " + ".join(str(n.shared) for n in needs),
    )


def theirs(idiom, gradient):
    """Launches and bytes an element."""
    if idiom is None:
        return "–", "–"
    x, mask = LAYOUT.tensors(torch.float32)
    try:
        launches, moved = traffic.of(idiom, x, mask, gradient=gradient)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        # torch.masked looks at data in places, which these tensors do not have.
        return "–", "–"
    return str(launches), f"{moved / x.numel():.1f}"


def table(gradient):
    head = ("function", "launches", "bytes (fewest)", "registers", "shared", "idiom", "bytes", "torch.masked", "bytes")
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name in (*IDIOMS, *ALONE):
        if gradient and name in NO_GRADIENT:
            continue
        idiom, peer = IDIOMS.get(name, (None, None))
        row = (NAMES.get(name, name), *ours(f"{name} backward" if gradient else name))
        lines.append(f"| {' | '.join((*row, *theirs(idiom, gradient), *theirs(peer, gradient)))} |")
    if gradient:
        lines.append(f"| {' | '.join(('linear (weight)', *ours('linear weight gradient'), *'––––'))} |")
    return "\n".join(lines)


def page():
    """The page as markdown."""
    told = TABLE.format(version=triton.__version__)
    return f"{HEAD}\n## Launches, bytes, registers\n{told}\n{table(False)}\n\n### Gradients\n\n{table(True)}\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
