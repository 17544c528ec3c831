"""One class, examined: built small, run padded and unpadded, every output and every gradient compared."""

import copy
import inspect
import pickle
import traceback
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from .batch import PADDINGS, encoder_keep, inputs, keep_of
from .cases import CROSS, class_of
from .configs import small

ATTEMPTS = [(torch.float64, False), (torch.float64, True), (torch.float32, False), (torch.float32, True)]
"""The dtype, and whether an image is given: the first that runs padded."""
TOLERANCE, COARSE_TOLERANCE = 1e-5, 1e-3
"""Of the largest value, in float64 and in what is coarser. Many models compute norms, rotations or routers in float32
whatever their dtype, which was seen to move what is exact by 6e-8; the smallest wrong number that was seen is 7e-4."""


LABELS = {"labels", "start_positions", "end_positions"}


class NotBuiltError(Exception):
    """The class cannot be built small, or does not run padded."""


def exact():
    return {"verdict": "exact"}


def finding(verdict, reason, **more):
    return {"verdict": verdict, "reason": reason, **more}


def short(error):
    """An exception in a line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def where(error):
    """The last lines of ours and of transformers in a traceback."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if "maskwise" in f.filename or "transformers" in f.filename
    ]
    return [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames[-4:]]


def refusal(error):
    """The first reason of those that a refusal lists: that of the model, before those of its parts."""
    lines = str(error).partition("\nHint:")[0].splitlines()
    return lines[1].strip().partition(": ")[2] if len(lines) > 1 else short(error)


def build(case, device="cpu", dtype=torch.float64, seed=0):
    """The model, with weights as transformers draws them."""
    torch.manual_seed(seed)
    model_class = class_of(case)
    more = {"is_decoder": True, "add_cross_attention": True} if case.auto == CROSS else {}
    config = small(case.kind, model_class.config_class, **more)
    with torch.device(device):
        model = model_class(config)
    if hasattr(model, "set_default_language"):
        model.set_default_language(next(iter(config.languages)))
    return model.to(dtype).eval()


def scale_weights(model, seed=1):
    """Weights so large that what one token does to another shows."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            if id(parameter) in embeddings:
                parameter.copy_(noise)
            elif parameter.dim() > 1:
                fan_in = parameter[0].numel() if parameter.dim() < 3 else parameter.shape[-1]
                parameter.copy_(noise * 1.5 / max(fan_in, 1) ** 0.5)
            else:
                parameter.add_(noise * 0.2)
    return model


def flat(value, path=""):
    """Every tensor in an output, by its path."""
    if isinstance(value, Tensor):
        return {path: value}
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (tuple, list)):
        items = enumerate(value)
    else:
        return {}
    found = {}
    for name, each in items:
        if name not in {"past_key_values", "cache_params", "attentions"}:
            found.update(flat(each, f"{path}.{name}" if path else str(name)))
    return found


def kept(name, value, keep):
    """What of an output is compared: kept tokens where it has one row for each token, else all."""
    if name.startswith("encoder_"):
        keep = encoder_keep(keep)
    for dim in range(value.dim() - 1):
        if value.shape[dim : dim + 2] == keep.shape:
            return value.movedim((dim, dim + 1), (0, 1))[keep]
    if value.dim() and value.shape[0] == keep.numel():
        return value[keep.flatten()]
    return value


def compare(expected, found, keep):
    """The first output that differs, with by how much of its largest value, or None; and the largest difference."""
    worst = 0.0
    if missing := sorted(expected.keys() ^ found.keys()):
        return f"{missing[0]} is in one of both outputs only", float("inf")
    for name, padded in expected.items():
        if padded.shape != found[name].shape:
            return f"{name} has shape {tuple(found[name].shape)} instead of {tuple(padded.shape)}", float("inf")
        wanted, other = kept(name, padded, keep), kept(name, found[name], keep)
        if wanted.numel() == 0 or not wanted.is_floating_point():
            if not torch.equal(wanted, other):
                return f"{name} differs", float("inf")
            continue
        difference = distance(wanted, other)
        worst = max(worst, difference)
        if not difference <= tolerance(wanted.dtype):
            return f"{name} differs by {difference:.1e} of its largest value", difference
    return None, worst


def tolerance(dtype):
    """How far apart two equal results may lie."""
    return TOLERANCE if dtype == torch.float64 else COARSE_TOLERANCE


def distance(wanted, found):
    """The largest difference, as a part of the largest value; NaN and infinities must be the same."""
    finite = torch.isfinite(wanted)
    if not torch.equal(finite, torch.isfinite(found)):
        return float("inf")
    if not finite.any():
        return 0.0
    wanted, found = wanted[finite].double(), found[finite].double()
    return float((wanted - found).abs().max() / wanted.abs().max().clamp_min(1e-9))


def objective(output, keep):
    """What gradients are taken of: the loss, or else all kept outputs, each element with a weight of its own."""
    if output.get("loss") is not None and output["loss"].requires_grad:
        return output["loss"].sum()
    total = 0.0
    for name, value in output.items():
        if value.is_floating_point() and value.requires_grad:
            rows = kept(name, value, keep)
            finite = rows[torch.isfinite(rows)]
            total = total + (finite * torch.sin(torch.arange(finite.numel(), dtype=finite.dtype))).sum()
    return total


def call(model, given, **options):
    """Every tensor that comes out; what is drawn at random is drawn alike in every call."""
    torch.manual_seed(0)
    return flat(model(**given, **options))


def with_gradients(model, given, keep, **options):
    """Outputs, and the gradient of each parameter."""
    model.zero_grad()
    output = call(model, given, **options)
    objective(output, keep).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {name: value.detach() for name, value in output.items()}, gradients


def compare_gradients(expected, found):
    """The parameter whose gradient differs most, relative to the largest of all gradients."""
    scale = max((float(each.abs().max()) for each in expected.values()), default=0.0) or 1.0
    worst, name = 0.0, None
    for each in expected.keys() | found.keys():
        mine = found[each] if each in found else torch.zeros_like(expected[each])
        theirs = expected[each] if each in expected else torch.zeros_like(found[each])
        difference = float(torch.nan_to_num((mine - theirs).abs().max(), nan=torch.inf)) / scale
        if difference > worst:
            worst, name = difference, each
    if name is not None and worst > tolerance((expected | found)[name].dtype):
        return f"the gradient of {name} differs by {worst:.1e} of the largest gradient", worst
    return None, worst


class Examination:
    """One case, step by step; `row` is what was found."""

    def __init__(self, case, folder=None):
        self.case, self.folder = case, folder
        self.checks, self.references, self.heard = {}, {}, []
        self.row = {"auto": case.auto, "kind": case.kind, "name": case.name, "checks": self.checks}

    def run(self):
        """The row of the table."""
        try:
            self.prepare()
        except NotBuiltError as error:
            self.row.update(finding("not built", str(error)))
            return self.row
        if self.unpad():
            for padding in PADDINGS:
                self.check(padding, self.padding, padding)
            self.check("plain", self.plain)
            self.check("unlabelled", self.unlabelled)
            if "output_router_logits" in self.parameters:
                self.check("router", self.router)
            self.check("repad", self.repad)
        self.check("loaded", self.loaded, "cpu")
        self.check("meta", self.loaded, "meta")
        self.checks = {name: each for name, each in self.checks.items() if each}
        self.row["checks"] = self.checks
        self.row.update(self.summary())
        return self.row

    def check(self, name, step, *args):
        """One step; an exception is a crash."""
        try:
            self.checks[name] = step(*args)
        except Exception as error:
            self.checks[name] = finding("crash", short(error), at=where(error))

    def prepare(self):
        """Build, scale the weights, and take the padded references, in float64 and from text alone if that works."""
        reasons = [reason for dtype, image in ATTEMPTS if (reason := self.failed(dtype, image))]
        if len(reasons) == len(ATTEMPTS):
            raise NotBuiltError(" / ".join(dict.fromkeys(reasons)))

    def failed(self, dtype, image):
        """Why the references cannot be taken like this, or None where they were, now or before."""
        if self.references.keys() >= set(PADDINGS):
            return None
        try:
            self.attempt(dtype, image)
        except Exception as error:
            self.references.clear()
            return f"{short(error)} {where(error)}"
        return None

    def attempt(self, dtype, image):
        """The references, all in one dtype, with an image or without."""
        self.dtype = dtype
        self.model = scale_weights(build(self.case, dtype=dtype))
        self.parameters = inspect.signature(type(self.model).forward).parameters
        # Models of several parts hand it on to that of text.
        takes = "use_cache" in self.parameters or (
            any(each.kind is each.VAR_KEYWORD for each in self.parameters.values())
            and hasattr(self.model.config.get_text_config(), "use_cache")
        )
        self.options = {"use_cache": False} if takes else {}
        self.options["output_hidden_states"] = True
        self.state = copy.deepcopy(self.model.state_dict())
        self.buffers = {name: each.clone() for name, each in self.model.named_buffers()}
        for padding in PADDINGS:
            keep = keep_of(padding)
            given = inputs(self.model, self.case, keep, image=image)
            self.references[padding] = (given, *with_gradients(self.model, given, keep, **self.options))
        for padding, (_, output, _) in self.references.items():
            if bad := [n for n, each in output.items() if not torch.isfinite(kept(n, each, keep_of(padding))).any()]:
                self.row.setdefault("notes", []).append(f"{bad[0]} is not finite in the padded model")
        if dtype == torch.float64 and any(
            not torch.isfinite(kept(name, value, keep_of(padding))).all()
            for padding, (_, output, _) in self.references.items()
            for name, value in output.items()
            if name.endswith(("hidden_state", "logits"))
        ):
            # A softmax in float32 of a mask in float64 gives NaN for dropped queries, in the padded model itself.
            raise NotBuiltError("values that are not finite")
        self.given_right = self.references["right"][0]
        with torch.no_grad():
            self.bits = call(self.model, self.given_right, **self.options)
            again = call(self.model, self.given_right, **self.options)
        if any(
            value.shape != again[name].shape or distance(value, again[name]) > 0.0 for name, value in self.bits.items()
        ):
            raise NotBuiltError("no two of its outputs are the same, with the same random numbers")
        self.originals = {name: self.original(name, *given) for name, given in self.calls().items()}

    def calls(self):
        """The calls that are compared beside those of each padding: arguments and options by name."""
        left = {name: value for name, value in self.references["left"][0].items() if name not in LABELS}
        few = {name: value for name, value in self.options.items() if name != "output_hidden_states"}
        found = {
            "plain": (self.given_right, {}),
            "pickled": (self.given_right, few),
            "unlabelled": (left, self.options),
        }
        if "output_router_logits" in self.parameters:
            found["router"] = (self.given_right, {**self.options, "output_router_logits": True})
        return found

    def original(self, name, given, options):
        """What the model gives before `mw.unpad` knows of it; None where it raises, as with a cache it cannot fill."""
        try:
            if name == "router":
                return with_gradients(self.model, given, keep_of("right"), **options)
            with torch.no_grad():
                return call(self.model, given, **options), {}
        except Exception:
            return None

    def unpad(self):
        """Whether `mw.unpad` accepts the model."""
        import maskwise as mw

        try:
            with self.listening():
                mw.unpad(self.model)
        except mw.models.UnsupportedModelError as error:
            self.checks["unpad"] = finding("refused", refusal(error))
        except Exception as error:
            self.checks["unpad"] = finding("crash", short(error), at=where(error))
        else:
            return True
        return False

    def padding(self, padding):
        """Every output and every gradient, under one padding."""
        given, expected, gradients = self.references[padding]
        keep = keep_of(padding)
        output, route = self.logged(lambda: with_gradients(self.model, given, keep, **self.options))
        difference, worst = compare(expected, output[0], keep)
        gradient, worst_gradient = compare_gradients(gradients, output[1])
        if difference or gradient:
            return finding("wrong", difference or gradient, by=max(worst, worst_gradient), **route)
        if route["route"] == "padded":
            return finding("padded", route["why"], said=route["said"])
        partly = {"partly": route["why"]} if route["why"] else {}
        return {**exact(), "by": max(worst, worst_gradient), "runs": route["runs"], **partly}

    def logged(self, run):
        """What a call gives, whether it ran packed, why not, and whether it warned."""
        import maskwise as mw

        with self.listening(), mw.explain() as log:
            output = run()
        calls = [each for each in log if each.op.startswith("unpad")]
        routes = {each.route for each in calls}
        why = next((each.reason for each in calls if each.route == "padded"), "")
        if not calls:
            why = "no unpadded part was called"
        runs = "packed" if "packed" in routes else "token-wise" if "tokenwise" in routes else "padded"
        route = "padded" if runs == "padded" else "packed"
        return output, {"route": route, "runs": runs, "why": why, "said": bool(self.heard)}

    @contextmanager
    def listening(self):
        """Record what Maskwise warns of. It warns once for each model and reason, so earlier warnings count."""
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            yield
        self.heard += [str(each.message) for each in found if "unpad" in str(each.message)]

    def plain(self):
        """The call without options: does it run packed, too?"""
        if self.originals["plain"] is None:
            return None
        with torch.no_grad():
            found, route = self.logged(lambda: call(self.model, self.given_right))
        difference, worst = compare(self.originals["plain"][0], found, keep_of("right"))
        if difference:
            return finding("wrong", difference, by=worst)
        return exact() if route["route"] == "packed" else finding("padded", route["why"], said=route["said"])

    def unlabelled(self):
        """Scores alone, padded on the left: some losses make the whole call run padded."""
        given, options = self.calls()["unlabelled"]
        if given.keys() == self.references["left"][0].keys() or self.originals["unlabelled"] is None:
            return None
        with torch.no_grad():
            found, route = self.logged(lambda: call(self.model, given, **options))
        difference, worst = compare(self.originals["unlabelled"][0], found, keep_of("left"))
        if difference:
            return finding("wrong", difference, by=worst)
        return exact() if route["route"] == "packed" else finding("padded", route["why"], said=route["said"])

    def router(self):
        """The routers' logits, and what they add to a loss."""
        keep, expected = keep_of("right"), self.originals["router"]
        if expected is None:
            return None
        given, options = self.calls()["router"]
        found, route = self.logged(lambda: with_gradients(self.model, given, keep, **options))
        difference = compare(expected[0], found[0], keep)[0] or compare_gradients(expected[1], found[1])[0]
        if difference:
            return finding("wrong", difference)
        return exact() if route["route"] == "packed" else finding("padded", route["why"], said=route["said"])

    def pickle(self, model):
        """Pickled here; another process loads it and compares.

        A model that has not yet been called: transformers' own hooks for hidden states cannot be pickled.
        """
        blob = pickle.dumps(model)
        if self.folder is None or self.originals["pickled"] is None:
            return exact()
        _, options = self.calls()["pickled"]
        expected, _ = self.originals["pickled"]
        path = Path(self.folder) / f"{self.case.auto}-{self.case.kind}-{self.case.name}.pickle"
        with path.open("wb") as file:
            pickle.dump({"model": blob, "given": self.given_right, "options": options, "expected": expected}, file)
        return {"verdict": "exact", "pickle": str(path)}

    def repad(self):
        """As before, bit for bit."""
        import maskwise as mw

        mw.models.repad(self.model)
        with torch.no_grad():
            found = call(self.model, self.given_right, **self.options)
        for name, wanted in self.bits.items():
            if not torch.equal(torch.nan_to_num(wanted), torch.nan_to_num(found[name])):
                return finding("wrong", f"{name} is not what it was before unpad")
        return exact()

    def loaded(self, device):
        """A model that is unpadded before its weights are there, on the CPU or on meta."""
        import maskwise as mw

        try:
            model = build(self.case, device, self.dtype, seed=2)
        except Exception as error:
            return None if device == "meta" else finding("crash", short(error), at=where(error))
        try:
            mw.unpad(model)
        except mw.models.UnsupportedModelError as error:
            return finding("refused", refusal(error))
        if device == "meta":
            model.to_empty(device="cpu")
        model.load_state_dict(self.state)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(self.buffers[name])
        if device == "cpu":
            self.check("pickled", self.pickle, model)
        for padding in ("right", "left"):
            given, expected, _ = self.references[padding]
            try:
                with torch.no_grad():
                    found, _ = self.logged(lambda given=given: call(model, given, **self.options))
            except mw.models.UnsupportedModelError as error:
                # Without weights a model cannot be tried before it is called.
                return finding("refused", refusal(error))
            difference, worst = compare(expected, found, keep_of(padding))
            if difference:
                return finding("wrong", f"{padding}: {difference}", by=worst)
        return exact()

    def summary(self):
        """One verdict for the class: the worst of its checks."""
        return summary(self.checks)


def summary(checks):
    """The worst verdict of all checks, with its reason."""
    for verdict in ("crash", "wrong"):
        for name, each in checks.items():
            if each["verdict"] == verdict:
                return finding(verdict, f"{name}: {each['reason']}")
    if "unpad" in checks:
        return finding("refused", checks["unpad"]["reason"])
    late = [name for name in ("loaded", "meta") if checks.get(name, {}).get("verdict") == "refused"]
    if late:
        return finding("wrong", f"{late[0]}: refused with other weights, {checks[late[0]]['reason']}")
    padded = {name: each["reason"] for name, each in checks.items() if each["verdict"] == "padded"}
    silent = [name for name in padded if not checks[name]["said"]]
    if silent:
        return finding("silent", f"{', '.join(silent)}: {padded[silent[0]]}")
    if all(name in padded for name in (*PADDINGS, "unlabelled") if name in checks):
        return finding("padded", padded["right"])
    return exact()
