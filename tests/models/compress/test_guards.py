"""Units that another path through the model reads: removed where none can, and an error where one does."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import maskwise as mw
from maskwise.models import FoldedLayerError, load_compressed, save_compressed
from maskwise.models.compress import folding
from maskwise.models.compress.candidates import Times
from maskwise.models.compress.chains import is_straight_line
from maskwise.models.compress.surgery import has_hooks
from tests.models.compress.networks import FeedForward, drop

# Sums of a few float32 numbers near 1 in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
SCALE = 2.0


@pytest.fixture(autouse=True)
def _dense_wins(prefer):
    # What is folded is then a smaller dense layer, and equal times let it be folded.
    prefer()


def dead(layer, count=24):
    with torch.no_grad():
        layer.weight[:count] = 0
    return layer


class Sliced(nn.Module):
    """A classifier that can return its features."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(dead(nn.Linear(16, 32)), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x, features=None):
        if features == "slice":
            return self.body[:2](x)
        if features == "call":
            return self.body[1](self.body[0](x))
        if features == "forward":
            return self.body[0].forward(x)
        if features == "both":
            hidden = self.body[0](x)
            return self.body(x), hidden
        if features == "weight":
            return nn.functional.linear(x, self.body[0].weight)
        if features == "second":
            return self.body[2](nn.functional.pad(x, (0, 16)))
        return self.body(x)


class Nested(Sliced):
    """The same where the first layer is in a Sequential of its own."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Sequential(dead(nn.Linear(16, 32)), nn.ReLU()), nn.Linear(32, 4))

    def forward(self, x, features=None):
        return self.body[0](x) if features else self.body(x)


class Blocks(Sliced):
    """The same around a block whose forward is traced."""

    def __init__(self):
        super().__init__()
        self.body = FeedForward()
        dead(self.body.up)

    def forward(self, x, features=None):
        return self.body.up(x) if features else self.body(x)


class Encoded(Sliced):
    """The same around torch's encoder layer."""

    def __init__(self):
        super().__init__()
        self.body = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        dead(self.body.linear1)

    def forward(self, x, features=None):
        return self.body.linear1(x) if features else self.body(x[:, None])


class Decoded(Sliced):
    """The same around torch's decoder layer."""

    def __init__(self):
        super().__init__()
        self.body = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)
        dead(self.body.linear1)

    def forward(self, x, features=None):
        return self.body.linear1(x) if features else self.body(x[:, None], x[:, None])


KINDS = {"sequential": Sliced, "nested": Nested, "traced": Blocks, "encoder": Encoded, "decoder": Decoded}


def compressed(kind):
    model, x = KINDS[kind]().eval(), torch.randn(5, 16)
    found, _ = mw.compress(model, x)
    assert sum(p.numel() for p in found.parameters()) < sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(found(x), model(x), **CLOSE)
    return found, x


@pytest.mark.parametrize("features", ["slice", "call", "forward", "both", "weight", "second"])
def test_a_flag_that_the_example_did_not_use_raises_instead_of_returning_fewer_units(features):
    model, x = compressed("sequential")
    for _ in range(2):
        with pytest.raises(FoldedLayerError, match=r"outside of the module that joins it .* Hint: mw\.compress\(model"):
            model(x, features)
    model(x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copied", ["itself", "deepcopy", "pickle", "file"])
def test_every_kind_of_owner_has_a_guard_and_so_have_its_copies_and_files(kind, copied, tmp_path):
    model, x = compressed(kind)
    expected = model(x)
    if copied == "file":
        pytest.importorskip("safetensors", reason="files of compressed models are safetensors")
        save_compressed(model, tmp_path / "model")
        other = load_compressed(tmp_path / "model", into=KINDS[kind]())
        again = load_compressed(tmp_path / "model", into=copy.deepcopy(model))
        assert torch.equal(again(x), expected)
    else:
        other = {"itself": lambda m: m, "deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}[
            copied
        ](model)
    assert torch.equal(other(x), expected)
    with pytest.raises(FoldedLayerError):
        other(x, features="call")
    assert torch.equal(other(x), expected)
    # An error within does not leave the chain open.
    with pytest.raises((RuntimeError, AssertionError)):
        other(x[:, :3])
    with pytest.raises(FoldedLayerError):
        other(x, features="call")


@pytest.mark.parametrize("kind", KINDS)
def test_an_example_of_the_other_call_leaves_the_layers_whole(kind):
    model, x = KINDS[kind]().eval(), torch.randn(5, 16)
    found, _ = mw.compress(model, (x, "call"))
    with torch.no_grad():
        torch.testing.assert_close(found(x, "call"), model(x, "call"), **CLOSE)
        torch.testing.assert_close(found(x), model(x), **CLOSE)


def test_another_thread_does_not_open_the_chain():
    model, x = compressed("sequential")
    inside, done, caught = threading.Event(), threading.Event(), []

    def wait(module, args, out):
        inside.set()
        done.wait(10)

    def other():
        inside.wait(10)
        try:
            model.body[0](x)
        except FoldedLayerError as error:
            caught.append(error)
        done.set()

    model.body[1].register_forward_hook(wait)
    thread = threading.Thread(target=other)
    thread.start()
    model(x)
    thread.join()
    assert len(caught) == 1


@pytest.mark.parametrize("kind", ["sequential", "traced"])
def test_a_folded_model_compiles_into_one_graph_and_is_guarded_there_too(kind):
    model, x = compressed(kind)
    with torch.no_grad():
        run = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(run(x), model(x), **CLOSE)
        with pytest.raises(Exception, match=r"FoldedLayerError|Observed exception"):
            run(x, "call")


@pytest.mark.parametrize("kind", KINDS)
def test_where_folding_does_not_pay_nothing_of_a_guard_is_left(kind, monkeypatch):
    slow = {"before": Times(1.0, 1.0), "after": Times(2.0, 2.0), "dense": Times(1.0, 1.0)}
    monkeypatch.setattr(
        "maskwise.models.compress.api.time_calls", lambda calls, _: {name: slow[name] for name in calls}
    )
    monkeypatch.setattr(
        "maskwise.models.compress.api._fast_enough", lambda times, answers=[False, True]: answers.pop(0)
    )
    model, x = KINDS[kind]().eval(), torch.randn(5, 16)
    prefer_smaller(monkeypatch)
    found, report = mw.compress(model, x)
    assert any("was faster, but the whole model is slower with it" in row.reason for row in report)
    assert [type(module) for module in found.modules()] == [type(module) for module in model.modules()]
    assert not any(map(has_hooks, found.modules()))
    with torch.no_grad():
        for features in (None, "call"):
            torch.testing.assert_close(found(x, features), model(x, features), **CLOSE)


def prefer_smaller(monkeypatch):
    """Let smaller layers be the faster ones."""
    monkeypatch.setattr(folding, "_total", lambda choices: len([c for c in choices.values() if c.kind == "dense"]))


class Flagged(FeedForward):
    returns = False

    def forward(self, x):
        hidden = torch.relu(self.up(x))
        if self.returns:
            return hidden
        return self.down(hidden)


class Summed(FeedForward):
    weight = 0.0

    def forward(self, x):
        hidden = torch.relu(self.up(x))
        return self.down(hidden) + self.weight * hidden.sum()


class Scaled(FeedForward):
    def forward(self, x):
        return self.down(torch.relu(self.up(x))) * SCALE


class Helped(FeedForward):
    def forward(self, x):
        return helper(self.up(x), self.down)


class Read(FeedForward):
    def forward(self, x):
        return self.down(torch.relu(self.up(x))) + self.up.weight.sum()


class Chosen(FeedForward):
    def forward(self, x):
        hidden = torch.relu(self.up(x))
        return (self.down(hidden), hidden)[int(torch.is_grad_enabled())]


def helper(x, layer):
    return layer(torch.relu(x))


@pytest.mark.parametrize("kind", [Flagged, Summed, Scaled, Helped, Read, Chosen])
def test_a_forward_that_could_do_something_else_is_not_folded(kind):
    block = kind()
    dead(block.up)
    assert not is_straight_line(block)
    with torch.no_grad():
        found, _ = mw.compress(block.eval(), torch.randn(5, 16))
    assert type(found.up) is nn.Linear
    assert found.up.out_features == 32


def test_a_forward_of_calls_alone_is_straight_line_code():
    class Residual(FeedForward):
        def forward(self, x):
            """Text is no code."""
            left = self.up(x)
            left = nn.functional.gelu(left)
            y: torch.Tensor = self.down(left)
            return x + y * 0.5

    assert is_straight_line(FeedForward())
    # In a function that has no cell of its own.
    assert is_straight_line(Residual())


# -- torch's encoder with nested tensors -------------------------------------------------------------------------------
def encoder(**kwargs):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16), **kwargs).eval()
    for each in model.layers:
        dead(each.linear1)
    return model


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("order", [(), ("sparse", "live units")])
def test_a_default_encoder_is_compressed_with_padding_in_the_example(order, prefer):
    prefer(*order)
    model, x = encoder(), torch.randn(3, 7, 16)
    padding = mw.Mask.from_lengths([7, 4, 2]).to_key_padding()
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        found, _ = mw.compress(model, {"src": x, "src_key_padding_mask": padding})
        torch.testing.assert_close(found(x, src_key_padding_mask=padding), expected, **CLOSE)
        torch.testing.assert_close(found(x), model(x), **CLOSE)
    assert found.use_nested_tensor
    if not order:
        assert found.layers[0].linear1.out_features == found.layers[1].linear2.in_features == 8
    else:
        # Some weights are dropped, and only dense layers output 0 at padding.
        drop(model.layers[1].linear2, 0.5)
        with torch.no_grad():
            expected = model(x, src_key_padding_mask=padding)
            found, report = mw.compress(model, {"src": x, "src_key_padding_mask": padding})
            torch.testing.assert_close(found(x, src_key_padding_mask=padding), expected, **CLOSE)
        assert "enable_nested_tensor=False" in report["layers.1.linear2"].reason


def test_a_compressed_encoder_can_be_unpadded():
    model, x = encoder(enable_nested_tensor=False), torch.randn(3, 7, 16)
    padding = mw.Mask.from_lengths([7, 4, 2]).to_key_padding()
    found, _ = mw.compress(model, {"src": x, "src_key_padding_mask": padding})
    assert found.layers[0].linear1.out_features == 8
    with torch.no_grad():
        expected = mw.unpad(copy.deepcopy(model))(x, src_key_padding_mask=padding)
        torch.testing.assert_close(mw.unpad(found)(x, src_key_padding_mask=padding), expected, **CLOSE)
    with pytest.raises(FoldedLayerError):
        found.layers[0].linear1(x)


@pytest.mark.parametrize("kind", KINDS)
def test_a_compressed_model_can_be_compressed_again(kind):
    model, x = compressed(kind)
    again, _ = mw.compress(model, x)
    with torch.no_grad():
        torch.testing.assert_close(again(x), model(x), **CLOSE)
    with pytest.raises(FoldedLayerError):
        again(x, features="call")
