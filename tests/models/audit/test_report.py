"""How people meet an audit: text of 80 columns, JSON, a page, the command, assertions, callbacks, FLOP counters."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import typer
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import maskwise as mw
from maskwise.cli import audit as command
from maskwise.cli.app import app
from maskwise.errors import DtypeError
from tests.models.audit.cases import LEAKS, ConformerBlock, Pooled, floats, keep_mask, tokens

TARGET = "tests/models/audit/targets.py"


@pytest.fixture(scope="module")
def report():
    torch.manual_seed(0)
    labels = torch.randint(3, (4, 12)).masked_fill(~keep_mask(), -100)
    batch = {"x": floats(), "mask": keep_mask(), "labels": labels}
    return mw.audit(
        ConformerBlock(False), batch, loss=lambda out, b: F.cross_entropy(out.flatten(0, 1), b["labels"].flatten())
    )


# -- text, JSON, page --------------------------------------------------------------------------------------------------
def test_the_text_has_a_line_for_each_finding_then_details_in_80_columns(report):
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("audit of ConformerBlock: ")
    assert lines[4] == "  leak   depthwise: convolution over padding"
    assert lines[5].startswith("  loss   depends on the split into micro-batches")
    assert any(line.startswith("  waste  ") for line in lines)
    text = " ".join(" ".join(lines).split())
    assert "repair: mw.conv1d(x, model.depthwise.weight, model.depthwise.bias, padding=2, groups=8, mask=mask)" in text
    assert "where: depthwise (Conv1d), in `conv1d` at cases.py" in text


def test_the_json_has_everything(report):
    found = json.loads(report.to_json())
    assert found["leaks"][0]["module"] == "depthwise"
    assert found["masks"] == [{"source": "mask", "shape": [4, 12], "kept": 29}]
    assert found["denominator"]["invariant"] is False
    assert {each["path"] for each in found["modules"]} == {"", "before", "depthwise", "after"}


class Outline(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen, self.loaded = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_needs_nothing_else(report, tmp_path):
    path = report.to_html(tmp_path / "audit.html")
    text = path.read_text(encoding="utf-8")
    outline = Outline()
    outline.feed(text)
    assert outline.open == []
    assert outline.loaded == []
    assert not re.findall(r"https?://", text)
    assert "prefers-color-scheme: dark" in text
    assert outline.seen.count("details") == len(list(report.findings()))
    # Four rows of one run each, and what is behind them.
    assert text.count("<rect") == 5
    assert text.count("<tr>") == 1 + len(report.profile.modules)


def test_a_notebook_shows_the_page_without_its_script(report):
    shown = report._repr_html_()
    assert "<script" not in shown
    assert "convolution over padding" in shown


def test_what_is_named_by_users_is_escaped(tmp_path):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("<script>", nn.Linear(8, 8))

        def forward(self, x, mask):
            return next(self.children())(x).mean(1)

    shown = mw.audit(Named(), (floats(), keep_mask()))._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown


# -- the command -------------------------------------------------------------------------------------------------------
def call(*arguments):
    try:
        app(["audit", *arguments], standalone_mode=False)
    except (SystemExit, typer.Exit) as stop:
        return getattr(stop, "exit_code", getattr(stop, "code", 0))
    return 0


@pytest.mark.parametrize(
    ("name", "fail_on", "code"),
    [
        ("leaky", "leak", 1),
        ("leaky", "none", 0),
        ("leaky", "denominator", 0),
        ("clean", "leak", 0),
        ("clean", "waste>99%", 0),
        ("padded", "leak,waste>5%", 1),
    ],
)
def test_the_exit_code_says_whether_a_check_failed(name, fail_on, code, capsys):
    given = command.Options(f"{TARGET}:{name}", json=True, fail_on=fail_on)
    assert command.run(given) == code
    shown = capsys.readouterr()
    assert json.loads(shown.out)["model"]
    assert ("failed:" in shown.err) == bool(code)


def test_the_command_runs_from_a_shell(tmp_path):
    page = tmp_path / "audit.html"
    arguments = ["audit", f"{TARGET}:leaky", "--loss", f"{TARGET}:loss", "--html", str(page)]
    done = subprocess.run([sys.executable, "-m", "maskwise", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "leak   the model itself: mean without mask" in done.stdout
    assert max(map(len, done.stdout.splitlines()[:-1])) <= 80
    assert page.exists()


def test_an_exception_of_the_users_code_is_no_failed_check(capsys):
    assert command.run(command.Options(f"{TARGET}:raises")) == 2
    shown = capsys.readouterr().err
    assert "ValueError: of the user's own" in shown
    assert f"error: {TARGET}:raises raised before the audit ended: nothing was checked" in shown


@pytest.mark.parametrize("name", ["nothing", "no_model", "not_a_function"])
def test_wrong_usage_has_an_exit_code_of_its_own(name):
    done = subprocess.run(
        [sys.executable, "-m", "maskwise", "audit", f"{TARGET}:{name}"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr


def test_a_module_is_loaded_by_its_name():
    assert command.run(command.Options("tests.models.audit.targets:clean", json=True)) == 0


# -- assertions --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", LEAKS)
def test_assert_no_leak_raises_for_a_leak_and_for_nothing_else(name):
    build, batch, module, cause, repair, _ = LEAKS[name]
    mw.testing.assert_no_leak(build(True), batch())
    with pytest.raises(AssertionError, match=re.escape(f"{module or 'the model itself'}: {cause}")) as caught:
        mw.testing.assert_no_leak(build(False), batch())
    assert repair in str(caught.value)


def test_assert_no_leak_for_nan_is_opt_in():
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    batch = {"src": floats(), "src_key_padding_mask": ~keep_mask()}
    mw.testing.assert_no_leak(encoder, batch)
    with pytest.raises(AssertionError, match="0 times NaN"):
        mw.testing.assert_no_leak(encoder, batch, nan=True)


def test_assert_split_invariant_compares_gradients():
    weight = torch.randn(8, requires_grad=True)
    x, keep = floats(), keep_mask()

    def step(micro_batches, by_window):
        weight.grad = None

        def loss(x, keep, **named):
            return mw.loss(F.l1_loss, x @ weight, torch.zeros(x.shape[:2]), keep, **named)

        with mw.accumulate([keep for _, keep in micro_batches]) as window:
            total = sum(loss(x, keep, denominator=window) for x, keep in micro_batches)
        if not by_window:
            # The value is right, and its gradient is not.
            mean = sum(loss(x, keep) for x, keep in micro_batches) / len(micro_batches)
            total = total.detach() + mean - mean.detach()
        total.backward()
        return total, weight.grad

    mw.testing.assert_split_invariant(lambda parts: step(parts, True), (x, keep))
    with pytest.raises(AssertionError, match="2 micro-batches"):
        mw.testing.assert_split_invariant(lambda parts: step(parts, False), (x, keep))


# -- callbacks ---------------------------------------------------------------------------------------------------------
def test_the_callback_of_the_trainer_logs_tokens_and_the_first_leak():
    model, callback = Pooled(False).train(), mw.models.TrainerAudit()
    control, batch = SimpleNamespace(), tokens()
    callback.on_init_end(None, None, control)
    callback.on_train_begin(None, None, control, model=model)
    for _ in range(3):
        model(**batch)
    logs = {"loss": 1.0}
    callback.on_log(None, None, control, logs=logs)
    assert logs["maskwise/padding"] == pytest.approx(1 - 29 / 48)
    assert logs["maskwise/useful_tokens_per_second"] == pytest.approx(29 / 48 * logs["maskwise/tokens_per_second"])
    assert logs["maskwise/leaks"] == 1.0
    assert callback.leak.cause == "mean without mask"
    callback.on_train_end(None, None, control)
    assert not model._forward_pre_hooks
    assert model.training


def test_the_callback_of_lightning_logs_through_the_module():
    model, logged = Pooled(True).train(), {}
    module = SimpleNamespace(net=model, log=logged.__setitem__)
    callback = mw.models.LightningAudit(lambda module: module.net, every=2)
    callback.setup(None, module, stage="fit")
    callback.on_train_start(None, module)
    for index in range(2):
        model(**tokens())
        callback.on_train_batch_end(None, module, None, None, index)
    assert logged["maskwise/leaks"] == 0.0
    assert logged["maskwise/padding"] == pytest.approx(1 - 29 / 48)
    callback.on_train_end(None, module)
    assert (callback.state_key, callback.state_dict()) == ("maskwise.LightningAudit", {})
    # What Lightning reads when it resumes.
    assert callback._legacy_state_key is mw.models.LightningAudit
    with pytest.raises(AttributeError, match="there is no attribute 'leeks'"):
        callback.leeks


def test_the_trainer_takes_the_callback():
    transformers = pytest.importorskip("transformers")
    from transformers.trainer_callback import CallbackHandler

    callback, model = mw.models.TrainerAudit(), Pooled(False).train()
    handler = CallbackHandler([callback], model, None, None, None)
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    handler.on_train_begin(None, state, control)
    model(**tokens())
    logs = {}
    state.log_history.append({"step": 1})
    handler.on_log(None, state, control, logs)
    assert logs["maskwise/leaks"] == 1.0
    assert state.log_history == [{"step": 1, **logs}]


def test_a_callback_that_is_attached_runs_before_the_reporters():
    transformers = pytest.importorskip("transformers")
    from transformers.trainer_callback import CallbackHandler

    class Reporter(transformers.TrainerCallback):
        reported = None

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.reported = dict(logs)

    reporter, model = Reporter(), Pooled(False).train()
    handler = CallbackHandler([reporter], model, None, None, None)
    trainer = SimpleNamespace(callback_handler=handler)
    callback = mw.models.TrainerAudit().attach(trainer)
    assert callback.attach(trainer) is callback
    assert handler.callbacks == [callback, reporter]
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    handler.on_train_begin(None, state, control)
    model(**tokens())
    handler.on_log(None, state, control, {})
    assert reporter.reported["maskwise/leaks"] == 1.0


@pytest.mark.filterwarnings("default")
def test_lightning_trains_and_resumes_with_the_callback(tmp_path):
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Pooled(False)

        def training_step(self, batch, index):
            return self.net(**batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    def fit(epochs, checkpoint=None):
        callback = mw.models.LightningAudit(lambda module: module.net, every=2)
        trainer = lightning.Trainer(
            max_epochs=epochs, accelerator="cpu", callbacks=[callback], logger=False, enable_progress_bar=False,
            default_root_dir=tmp_path,
        )  # fmt: skip
        data = torch.utils.data.DataLoader([tokens() for _ in range(4)], batch_size=None)
        trainer.fit(Module(), data, ckpt_path=checkpoint)
        return trainer, callback

    trainer, callback = fit(1)
    assert callback.leak.cause == "mean without mask"
    assert float(trainer.callback_metrics["maskwise/padding"]) == pytest.approx(1 - 29 / 48)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    again, _ = fit(2, tmp_path / "saved.ckpt")
    assert again.global_step == 8


# -- FLOPs -------------------------------------------------------------------------------------------------------------
def test_torchs_counter_counts_what_our_ops_compute():
    q, keep = torch.randn(2, 2, 64, 16), mw.Mask.from_lengths([64, 16])
    layer = mw.nn.SparseLinear.from_linear(nn.Linear(512, 512), torch.rand(512, 512) < 0.1)
    x = torch.randn(32, 512, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        mw.attention(q, q, q, keep[:, None, None, :])
    assert counter.get_total_flops() == 2 * 2 * 64 * (64 + 16) * 32
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    # Forward, the gradient of x and that of the values.
    assert counter.get_total_flops() == 3 * 2 * 32 * layer.values.numel()


def test_flop_counter_counts_neither_kept_nor_skipped_elements_of_a_sum():
    with mw.FlopCounter() as counter:
        mw.sum(torch.ones(8, 64), mw.Mask.from_lengths([64, 8, 8, 8, 8, 8, 8, 8]), dim=1)
    assert (counter.kept, counter.dense) == (0, 0)


def test_flop_counter_counts_what_apply_leaves_out():
    layer, x = nn.Linear(32, 16), torch.randn(8, 64, 32)
    with mw.FlopCounter() as counter:
        mw.apply(layer, x, mask=mw.Mask.from_lengths([64, 8, 8, 8, 8, 8, 8, 8]))
    assert (counter.kept, counter.dense) == (2 * 120 * 32 * 16, 2 * 512 * 32 * 16)
    with mw.FlopCounter() as counter:
        layer(x)
    assert (counter.kept, counter.dense) == (2 * 512 * 32 * 16,) * 2


def test_flop_counter_has_the_padded_model_beside_the_unpadded_one():
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2).eval()
    x, padding = torch.randn(4, 64, 32), mw.Mask.from_lengths([64, 8, 8, 8]).to_key_padding()
    # A layer at a time: a counter sees nothing of torch's fused encoder layer.
    with torch.no_grad(), mw.FlopCounter() as padded:
        for layer in layers.layers:
            layer.train()
        layers(x, src_key_padding_mask=padding)
    with torch.no_grad(), mw.FlopCounter() as packed:
        mw.unpad(layers.eval())(x, src_key_padding_mask=padding)
    assert packed.dense == padded.dense
    # Of products 88 of 256 tokens are kept, of attention fewer pairs.
    assert 0.2 < packed.kept / packed.dense < 88 / 256


def test_flop_counter_has_dense_work_beside_kept_work():
    q, keep = torch.randn(2, 2, 64, 16), mw.Mask.from_lengths([64, 16])
    with mw.FlopCounter() as counter:
        mw.attention(q, q, q, keep[:, None, None, :])
    assert counter.kept == 2 * 2 * 64 * (64 + 16) * 32
    assert counter.dense == 2 * 2 * 2 * 64 * 64 * 32
    hidden, weight = torch.randn(64, 16, requires_grad=True), torch.randn(100, 16, requires_grad=True)
    rows = torch.arange(64) < 8
    with mw.FlopCounter() as counter:
        mw.linear_cross_entropy(hidden, weight, torch.zeros(64, dtype=torch.long), rows).backward()
    assert counter.kept == 3 * 2 * 8 * 16 * 100
    assert counter.dense == 3 * 2 * 64 * 16 * 100
    assert repr(counter) == f"FlopCounter(kept={counter.kept:,}, dense={counter.dense:,}: 12%)"


ORDERS = [
    "import maskwise as mw; mw.sum; from torch.utils import flop_counter",
    "from torch.utils import flop_counter; import maskwise as mw; mw.sum",
]


@pytest.mark.parametrize("first", ORDERS, ids=["maskwise first", "torch's counter first"])
def test_formulas_are_registered_in_either_order(first):
    program = f"{first}; import torch; print(torch.ops.maskwise.linear_product in flop_counter.flop_registry)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: mw.audit(nn.Linear(3, 2), 3), "audit"),
        (lambda: mw.optimize(nn.Linear(3, 2), 3), "optimize"),
        (lambda: mw.optimize(nn.Linear(3, 2), torch.randn(4, 3), mask=torch.randn(4, 3)), "optimize"),
        (lambda: mw.testing.assert_no_leak(nn.Linear(3, 2), 3), "assert_no_leak"),
        (lambda: mw.testing.assert_split_invariant(len, 3), "assert_split_invariant"),
    ],
)
def test_an_error_about_the_batch_begins_with_the_function_that_was_called(call, name):
    with pytest.raises(DtypeError, match=f"^{name}: "):
        call()
