"""Mistakes with functions: reductions, softmax, scans, orders, fills, losses, plans."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import maskwise as mw
from maskwise import Mask
from maskwise.errors import ArgumentError, DeviceError, DtypeError, OutOfRangeError, ShapeError
from maskwise.ops.operation import eager_function
from maskwise.plan.cost import Rates
from maskwise.plan.dispatch import Route
from maskwise.plan.explain import Tabular
from tests.errors.row import Row
from tests.laws.functions import FUNCTIONS

X = torch.arange(6.0).reshape(2, 3)
INTS, COMPLEX = X.long(), X.cfloat()
BITS = torch.ones(2, 3, dtype=torch.bool)
UNSIGNED = torch.ones(2, 3, dtype=torch.uint16)
ON_META = BITS.to("meta")
LOGITS, CLASSES = torch.zeros(64, 400), torch.zeros(64, dtype=torch.int64)
KEPT = torch.ones(64, dtype=torch.bool)


def cross_entropy_of_a_class_that_is_not() -> None:
    with mw.force("kernel"):
        mw.loss(F.cross_entropy, LOGITS, torch.full_like(CLASSES, 400), KEPT)


HIDDEN, HEAD, LABELS = torch.zeros(2, 3, 8), torch.zeros(5, 8), torch.zeros(2, 3, dtype=torch.int64)


def head(error: type[Exception], hint: str, **changes: object) -> Row:
    """A wrong call of the loss head."""
    right = {"hidden": HIDDEN, "weight": HEAD, "target": LABELS, "mask": BITS}
    return Row("mw.linear_cross_entropy", lambda: mw.linear_cross_entropy(**{**right, **changes}), error, hint)


def forced(route: str) -> None:
    with mw.force(route):
        pass


def wrong(
    names: tuple[str, ...], *arguments: object, error: type[Exception], hint: str, **options: object
) -> list[Row]:
    """The same mistake with several functions."""
    return [
        Row(f"mw.{name}", lambda name=name: getattr(mw, name)(*arguments, **options), error, hint) for name in names
    ]


#: Those that need x and a mask alone.
REDUCTIONS = tuple(f.name for f in FUNCTIONS.values() if f.kind == "reduction" and f.name != "quantile")
ORDERED = ("amax", "amin", "argmax", "argmin", "median")
ALONG_ONE = ("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
ALL = (*REDUCTIONS, "argmax", "argmin", "sort", "argsort", "normalize", "standardize")
CAST = ("sum", "mean", "prod", "norm", "softmax", "log_softmax", "softmin", "cumsum", "cumprod")
CONVENTIONS = "Mask.from_attention_mask(mask) for 0 and 1, Mask.from_additive(mask) for 0 and -inf"

ROWS = [
    # -- the mask and x, the same for all
    *wrong(ALL, X, None, error=DtypeError, hint="Mask.full(x.shape)"),
    *wrong(ALL, X, [True], error=DtypeError, hint="Mask(torch.as_tensor(mask))"),
    *wrong(ALL, X, X, error=DtypeError, hint=CONVENTIONS),
    *wrong(ALL, [1.0], BITS, error=DtypeError, hint="torch.as_tensor(x)"),
    *wrong(ALL, X, torch.ones(5) > 0, error=ShapeError, hint="sizes line up from the right"),
    *wrong(ALL, X, BITS.T, error=ShapeError, hint="mask.T"),
    *wrong(ALL, X[..., None], BITS, error=ShapeError, hint="mask[..., None]"),
    *wrong(ALL, X, ON_META, error=DeviceError, hint="mask.to(x.device)"),
    *wrong(ALL, X, BITS, dim=4, error=OutOfRangeError, hint="dim=-1 for the last"),
    *wrong(ALL, X, BITS, dim="rows", error=DtypeError, hint="dim=-1"),
    *wrong(REDUCTIONS, X, BITS, dim=(0, -2), error=ArgumentError, hint="dim=(0,)"),
    *wrong(REDUCTIONS, X, BITS, dim=(0, 1.0), error=DtypeError, hint="dim=(0, 1)"),
    *wrong(REDUCTIONS, X, BITS, dim=1.0, error=DtypeError, hint="dim=(0, 1)"),
    *wrong(ALL, X.to_sparse(), BITS, error=ArgumentError, hint="x.to_dense()"),
    *wrong(ALONG_ONE, X.to_sparse(), BITS, 1, error=ArgumentError, hint="x.to_dense()"),
    *wrong(("topk",), X.to_sparse(), BITS, 1, error=ArgumentError, hint="x.to_dense()"),
    *wrong(("quantile",), X, BITS, 0.5, (0, 0), error=ArgumentError, hint="dim=(0,)"),
    *wrong(("quantile",), X, BITS.T, 0.5, error=ShapeError, hint="mask.T"),
    *wrong(("count",), BITS, (0, 0), error=ArgumentError, hint="dim=(0,)"),
    *wrong(("normalize", "standardize"), X, BITS, dim=(0, 0), error=ArgumentError, hint="dim=(0,)"),
    *wrong(ALONG_ONE, X, None, 1, error=DtypeError, hint="Mask.full(x.shape)"),
    *wrong(ALONG_ONE, [1.0], BITS, 1, error=DtypeError, hint="torch.as_tensor(x)"),
    *wrong(ALONG_ONE, X, X, 1, error=DtypeError, hint=CONVENTIONS),
    *wrong(ALONG_ONE, X, BITS.T, 1, error=ShapeError, hint="mask.T"),
    *wrong(ALONG_ONE, X, ON_META, 1, error=DeviceError, hint="mask.to(x.device)"),
    *wrong(ALONG_ONE, X, BITS, 4, error=OutOfRangeError, hint="dim=-1 for the last"),
    *wrong(ALONG_ONE, X, BITS, (0, 1), error=DtypeError, hint="dim=-1"),
    *wrong(("sort", "argsort"), X, BITS, (0, 1), error=DtypeError, hint="dim=-1, or x.flatten() for all"),
    *wrong(("softmax",), torch.ones(2, 4, 3, 3), BITS, -1, error=ShapeError, hint="mask[:, None, None, :]"),
    # -- dtypes
    *wrong(("mean",), INTS, BITS, error=DtypeError, hint="mw.mean(x, "),
    *wrong(("var", "std", "norm"), INTS, BITS, error=DtypeError, hint="float"),
    *wrong(ORDERED, COMPLEX, BITS, error=DtypeError, hint="x.abs() or x.real"),
    *wrong(("argmax", "argmin", "median"), BITS, BITS, error=DtypeError, hint="x.to(torch.uint8)"),
    *wrong(("argmax", "argmin"), X, BITS, (0, 1), error=DtypeError, hint="x.flatten(start, end) first"),
    *wrong(("sort", "argsort"), COMPLEX, BITS, error=DtypeError, hint="x.abs() or x.real"),
    *wrong(("softmax", "log_softmax", "softmin"), INTS, BITS, 1, error=DtypeError, hint="dtype=torch.float32"),
    *wrong(("normalize", "standardize"), INTS, BITS, error=DtypeError, hint="x.float()"),
    *wrong(("cummax", "cummin"), COMPLEX, BITS, 1, error=DtypeError, hint="x.abs() or x.real"),
    *wrong(("logcumsumexp",), INTS, BITS, 1, error=DtypeError, hint="x.float()"),
    *wrong(("norm",), X, BITS, "fro", error=DtypeError, hint="ord=2 is the root of the squares"),
    # -- arguments of their own
    *wrong(CAST, X, BITS, dim=1, dtype="float", error=DtypeError, hint="dtype=torch.float32"),
    *wrong((*REDUCTIONS, "argmax", "argmin"), X, BITS, empty="none", error=DtypeError, hint="empty=0.0"),
    *wrong(("quantile",), X, BITS, 0.5, empty="none", error=DtypeError, hint="empty=0.0"),
    *wrong(("var", "std"), X, BITS, correction="one", error=DtypeError, hint="correction=0.0"),
    *wrong(("loss",), None, X, X, BITS, error=DtypeError, hint="F.mse_loss"),
    *wrong(("normalize",), X, BITS, "2", error=DtypeError, hint="float(p)"),
    *wrong(("normalize",), X, BITS, eps=None, error=DtypeError, hint="float(eps)"),
    *wrong(("standardize",), X, BITS, correction="1", error=DtypeError, hint="float(correction)"),
    *wrong(("standardize",), X, BITS, eps=-1, error=ArgumentError, hint="eps=1e-5"),
    *wrong(("count",), X, error=DtypeError, hint=CONVENTIONS),
    *wrong(("count",), None, error=DtypeError, hint="Mask.full(x.shape)"),
    *wrong(("count",), BITS, 4, error=OutOfRangeError, hint="dim=-1 for the last"),
    *wrong(("count",), Mask(BITS), 4, error=OutOfRangeError, hint="dim=-1"),
    *wrong(("topk",), X, BITS, 2.0, error=DtypeError, hint="k=int(k)"),
    *wrong(("topk",), X, BITS, 4, error=OutOfRangeError, hint="k=min(k, 3)"),
    *wrong(("topk",), X, BITS, 4, 4, error=OutOfRangeError, hint="dim=-1 for the last"),
    *wrong(("topk",), X, BITS.T, 1, error=ShapeError, hint="mask.T"),
    *wrong(("topk",), X, ON_META, 1, error=DeviceError, hint="mask.to(x.device)"),
    *wrong(("topk",), BITS, BITS, 1, error=DtypeError, hint="x.to(torch.uint8)"),
    *wrong(("quantile",), INTS, BITS, 0.5, error=DtypeError, hint="x.float() or mw.median"),
    *wrong(("quantile",), X, BITS, 0.5, interpolation="cubic", error=ArgumentError, hint='interpolation="linear"'),
    *wrong(("quantile",), X, BITS, "half", error=DtypeError, hint="q=0.5, or q=[0.25, 0.75]"),
    *wrong(("quantile",), X, BITS, 50, error=ArgumentError, hint="q=percent / 100"),
    *wrong(("quantile",), X, BITS, torch.tensor([50.0]), error=ArgumentError, hint="q=percent / 100"),
    *wrong(("quantile",), X, BITS, torch.tensor([1]), error=DtypeError, hint="q.float()"),
    *wrong(("quantile",), X, BITS, torch.ones(1, 1), error=ShapeError, hint="q.flatten()"),
    *wrong(("quantile",), X, BITS, torch.ones(1, device="meta"), error=DeviceError, hint="q.to(x.device)"),
    *wrong(("quantile",), X, BITS, torch.ones(1, requires_grad=True), error=ArgumentError, hint="q.detach()"),
    *wrong(("quantile",), X, BITS, 0.5, 4, error=OutOfRangeError, hint="dim=-1 for the last"),
    # -- fill
    *wrong(("fill",), X, BITS, "0", error=DtypeError, hint="0.0"),
    *wrong(("fill",), X, None, 0.0, error=DtypeError, hint="Mask.full(x.shape)"),
    *wrong(("fill",), X, BITS.T, 0.0, error=ShapeError, hint="mask.T"),
    *wrong(("fill",), X, ON_META, 0.0, error=DeviceError, hint="mask.to(x.device)"),
    *wrong(("fill",), X, BITS, torch.zeros(2), error=ShapeError, hint="sizes line up from the right"),
    *wrong(("fill",), X, BITS, X.to("meta"), error=DeviceError, hint="value.to(x.device)"),
    *wrong(("fill",), INTS, BITS, X, error=DtypeError, hint="value.to(torch.int64)"),
    *wrong(("fill",), X.half(), BITS, 1e30, error=ArgumentError, hint="a value in the range of torch.float16"),
    *wrong(
        ("fill",), INTS.to(torch.uint8), BITS, -(2**40), error=ArgumentError, hint="a value in the range of torch.uint8"
    ),
    # -- other names of the same
    *wrong(("mul",), X, None, error=DtypeError, hint="Mask.full(x.shape)"),
    *wrong(("mul",), X, BITS.T, error=ShapeError, hint="mask.T"),
    *wrong(("mul",), X, ON_META, error=DeviceError, hint="mask.to(x.device)"),
    *wrong(("mul",), X.to_sparse(), BITS, error=ArgumentError, hint="x.to_dense()"),
    *wrong(("where",), None, X, 0.0, error=DtypeError, hint="Mask.full(x.shape)"),
    *wrong(("where",), X, X, 0.0, error=DtypeError, hint=CONVENTIONS),
    *wrong(("where",), X, 0.0, X, error=DtypeError, hint=CONVENTIONS),
    *wrong(("where",), BITS, X, "0", error=DtypeError, hint="torch.as_tensor(other)"),
    *wrong(("where",), BITS, 1.0, 0.0, error=DtypeError, hint="torch.full(mask.shape, 1.0)"),
    *wrong(("where",), BITS.T, X, 0.0, error=ShapeError, hint="mask[..., None] adds a dim"),
    *wrong(("where",), BITS, X, X.to("meta"), error=DeviceError, hint="other.to(x.device)"),
    *wrong(("where",), ON_META, X, 0.0, error=DeviceError, hint="mask.to(x.device)"),
    *wrong(("where",), BITS, X.half(), 1e30, error=ArgumentError, hint="a value in the range of torch.float16"),
    *wrong(("max", "min"), X, BITS, (0, 1), error=DtypeError, hint="(x, mask, (0, 1)), whose result has no indices"),
    *wrong(("max", "min"), X, BITS.T, 1, error=ShapeError, hint="mask.T"),
    *wrong(("max", "min"), X, ON_META, 1, error=DeviceError, hint="mask.to(x.device)"),
    *wrong(("max", "min"), X, BITS, 4, error=OutOfRangeError, hint="dim=-1 for the last"),
    *wrong(("max", "min"), X.to_sparse(), BITS, error=ArgumentError, hint="x.to_dense()"),
    *wrong(("max", "min"), BITS, BITS, 1, error=DtypeError, hint="x.to(torch.uint8)"),
    *wrong(("max", "min"), X, BITS, 1, empty="none", error=DtypeError, hint="empty=0.0"),
    # -- losses
    *wrong(("loss",), F.mse_loss, [1.0], X, BITS, error=DtypeError, hint="torch.as_tensor(input)"),
    *wrong(("loss",), F.mse_loss, X, [1.0], BITS, error=DtypeError, hint="torch.as_tensor(target)"),
    *wrong(("loss",), F.mse_loss, X, X, None, error=DtypeError, hint="Mask.full(target.shape)"),
    *wrong(("loss",), F.mse_loss, X, X, X, error=DtypeError, hint=CONVENTIONS),
    *wrong(("loss",), F.mse_loss, X, X, BITS, "average", error=ArgumentError, hint='reduction="mean"'),
    *wrong(("loss",), F.mse_loss, X, X, BITS, reduce=True, error=ArgumentError, hint='reduction="mean", "sum"'),
    *wrong(("loss",), F.ctc_loss, X, INTS, BITS, error=ArgumentError, hint="F.ctc_loss(log_probs[:, keep]"),
    *wrong(("loss",), torch.nn.MSELoss(), X, X, BITS, error=DtypeError, hint="F.cross_entropy instead of nn."),
    *wrong(("loss",), F.mse_loss, X, torch.ones(4), BITS, error=ShapeError, hint="target.view_as(input)"),
    *wrong(("loss",), F.mse_loss, X, X, BITS.T, error=ShapeError, hint="mask.T"),
    *wrong(("loss",), F.mse_loss, X, X, ON_META, error=DeviceError, hint="mask.to(input.device)"),
    *wrong(("loss",), lambda a, b: a, X, X, BITS, error=DtypeError, hint="def fn(input, target, reduction="),
    *wrong(("loss",), lambda a, b, reduction: (a,), X, X, BITS, error=DtypeError, hint="fn(*args, **kwargs)[0]"),
    *wrong(("sort", "median", "amax", "argmin"), UNSIGNED, BITS, error=DtypeError, hint="x.long()"),
    *wrong(("topk", "cummax"), UNSIGNED, BITS, 1, error=DtypeError, hint="x.long()"),
    Row("mw.loss", lambda: mw.loss(F.margin_ranking_loss, X, X, BITS), ArgumentError, "(input1, input2), target, mask"),
    Row("mw.loss", lambda: mw.loss(F.mse_loss, (X, X), X, BITS), ArgumentError, "mw.loss(F.mse_loss, input, target"),
    Row("mw.loss", lambda: mw.loss(F.cosine_embedding_loss, X, X, X, BITS), ArgumentError, "(input1, input2), target"),
    Row("mw.loss", lambda: mw.loss(F.mse_loss, X, X.to("meta"), BITS), DeviceError, "target.to(input.device)"),
    Row("mw.loss", lambda: mw.loss(F.mse_loss, X.to_sparse(), X, BITS), ArgumentError, "input.to_dense()"),
    Row("mw.linear", lambda: mw.linear(X.to_sparse(), X, BITS), ArgumentError, "x.to_dense()"),
    head(DtypeError, "torch.as_tensor(hidden)", hidden=[1.0]),
    head(DtypeError, "torch.as_tensor(target)", target=None),
    head(DtypeError, "hidden.float()", hidden=HIDDEN.long()),
    head(DtypeError, "mw.loss(F.cross_entropy, logits, target, mask)", target=LABELS.float()),
    head(DtypeError, "weight.to(hidden.dtype), or torch.autocast", weight=HEAD.double()),
    head(DtypeError, CONVENTIONS, mask=BITS.long()),
    head(DtypeError, "label_smoothing=0.1", label_smoothing="0.1"),
    head(DtypeError, "ignore_index=-100", ignore_index=None),
    head(DtypeError, "denominator=mask.sum()", denominator="8"),
    head(ShapeError, "weight[None]", weight=HEAD[0]),
    head(ShapeError, "weight.T", weight=HEAD.T),
    head(ShapeError, "hidden.movedim(1, -1)", hidden=HIDDEN.mT),
    head(ShapeError, "hidden[:, :-1] and target[:, 1:]", target=LABELS[:, 1:]),
    head(ShapeError, "bias.flatten()", bias=torch.zeros(5, 1)),
    head(ShapeError, "torch.zeros(5)", class_weight=torch.zeros(4)),
    head(ShapeError, "mask.T", mask=BITS.T),
    head(ShapeError, "denominator.sum()", denominator=torch.ones(2)),
    head(DeviceError, "weight.to(hidden.device)", weight=HEAD.to("meta")),
    head(DeviceError, "mask.to(target.device)", mask=ON_META),
    head(ArgumentError, "label_smoothing=0.1", label_smoothing=1.5),
    head(ArgumentError, "z_loss=1e-4", z_loss=-1.0),
    head(ArgumentError, "softcap=None", softcap=0.0),
    head(ArgumentError, 'reduction="mean"', reduction="average"),
    head(ArgumentError, 'reduction="mean", which is the sum / denominator', reduction="sum", denominator=8),
    head(ArgumentError, "denominator=mask.sum()", denominator=-1),
    head(ArgumentError, "class_weight.detach()", class_weight=torch.ones(5, requires_grad=True)),
    head(ArgumentError, "hidden.to_dense()", hidden=HIDDEN.to_sparse()),
    head(OutOfRangeError, "mask & (target >= 0) & (target < 5)", target=LABELS + 5),
    Row("mw.loss", cross_entropy_of_a_class_that_is_not, OutOfRangeError, "mask & (target >= 0) & (target < 400)"),
    # -- plans
    *wrong(("plan",), F.relu, X, error=DtypeError, hint="with mw.explain() as log"),
    *wrong(("plan",), mw.nn.MaskedMeanPool, error=ArgumentError, hint="mw.plan(mw.softmax, x, mask, dim=-1)"),
    Row("mw.force", lambda: forced("fast"), ArgumentError, 'mw.force("dense")'),
    # -- what those who extend the package may get wrong
    Row("Tabular", lambda: Tabular().table(), NotImplementedError, "return rich.table.Table(...)"),
    Row("Rates", lambda: Rates(flops=-1.0), ValueError, "maskwise calibrate"),
    Row("Route", lambda: Route("no such route", torch.sum), ValueError, "ROUTES"),
    Row(
        "eager_function",
        lambda: eager_function("f", "(int dim, Tensor x)", torch.sum, None, torch.sum),
        ValueError,
        "(Tensor x, int dim)",
    ),
]
