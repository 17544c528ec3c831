"""Quantized models and ``mw.unpad``, in either order."""

import copy

import pytest
import torch
from torch import nn

import maskwise as mw
from maskwise.models import PaddedRunWarning, UnsupportedModelError
from maskwise.models.quantized import is_quantized
from tests.models.zoo import BERT, GPT2, SIZE, config, transformers

TOKENS = torch.randint(3, 99, (4, 11), generator=torch.Generator().manual_seed(0))
KEEP = torch.tensor([[1] * 11, [1] * 4 + [0] * 7, [1] * 7 + [0] * 4, [1] + [0] * 10]).bool()
GIVEN = {"input_ids": TOKENS, "attention_mask": KEEP.long()}


class Int8Linear(nn.Module):
    """int8 weights with a range per channel, and int8 inputs with a range per token or one for the whole batch."""

    def __init__(self, layer, dims):
        super().__init__()
        self.dims = dims
        self.in_features, self.out_features = layer.in_features, layer.out_features
        scale = layer.weight.detach().abs().amax(1) / 127
        self.register_buffer("weight", (layer.weight.detach() / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())

    def forward(self, x):
        size = x.abs().amax() if self.dims == "batch" else x.abs().amax(-1, keepdim=True)
        step = size.clamp_min(1e-12) / 127
        out = nn.functional.linear((x / step).round(), self.weight.float()) * step * self.scale
        return out if self.bias is None else out + self.bias


def quantize(model, dims):
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, Int8Linear(child, dims))
    return model


def dynamic(model):
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)


def torchao(model):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    return model


PER_TOKEN = {"a module": lambda model: quantize(model, "token"), "torchao": torchao}
PER_BATCH = {"a module": lambda model: quantize(model, "batch"), "torch.ao": dynamic}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4}
MODELS = {
    "bert": lambda: transformers.BertModel(config("Bert", **BERT)),
    "classifier": lambda: transformers.BertForSequenceClassification(config("Bert", **BERT)),
    "llama": lambda: transformers.LlamaModel(config("Llama", **SIZE, use_cache=False)),
    "t5 encoder": lambda: transformers.T5EncoderModel(config("T5", **T5)),
    "bert in a module": lambda: nn.ModuleDict({"inner": transformers.BertModel(config("Bert", **BERT))}),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def build(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return model


def call(model):
    model = model["inner"] if isinstance(model, nn.ModuleDict) else model
    with torch.no_grad():
        out = model(**GIVEN)[0]
    return out[KEEP] if out.shape[:2] == KEEP.shape else out


def alone(model):
    """Every sequence by itself, which has no padding."""
    model = model["inner"] if isinstance(model, nn.ModuleDict) else model
    with torch.no_grad():
        rows = [model(input_ids=row[keep][None])[0] for row, keep in zip(TOKENS, KEEP, strict=True)]
    return torch.cat([row[0] if row.dim() == 3 else row for row in rows])


def cosine(a, b):
    return float(nn.functional.cosine_similarity(a, b, dim=-1).min())


@pytest.mark.parametrize("order", ["quantize, unpad", "unpad, quantize"])
@pytest.mark.parametrize("kind", PER_TOKEN)
@pytest.mark.parametrize("name", MODELS)
def test_a_range_per_token_is_accepted_in_either_order_and_gives_what_each_sequence_gives_alone(name, kind, order):
    reference, model = build(name), build(name)
    quantized = PER_TOKEN[kind](copy.deepcopy(reference))
    assert any(is_quantized(each) for each in quantized.modules())
    steps = (PER_TOKEN[kind], mw.unpad) if order == "quantize, unpad" else (mw.unpad, PER_TOKEN[kind])
    for step in steps:
        model = step(model)
    with mw.explain() as log:
        found = call(model)
    assert {each.route for each in log} <= {"packed", "tokenwise"}
    # Differences of rounding move single int8 steps, so that values differ; they are no further from each
    # other than each is from float32.
    wanted = alone(quantized)
    assert cosine(found, wanted) > 0.999
    assert (found - wanted).abs().max() <= (wanted - alone(reference)).abs().max()


@pytest.mark.parametrize("kind", PER_BATCH)
@pytest.mark.parametrize("name", MODELS)
def test_one_range_for_a_batch_is_refused_with_that_reason(name, kind):
    with pytest.raises(UnsupportedModelError, match="one range for the whole batch"):
        mw.unpad(PER_BATCH[kind](build(name)))


@pytest.mark.parametrize("kind", PER_BATCH)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_quantized_by_batch_after_unpad_runs_padded_from_its_first_call_and_warns(name, kind):
    expected = call(PER_BATCH[kind](build(name)))
    model = mw.unpad(build(name))
    call(model)
    model = PER_BATCH[kind](model)
    with pytest.warns(PaddedRunWarning, match="one range for the whole batch"):
        found = call(model)
    assert torch.equal(found, expected)
    assert torch.equal(call(model), expected)


def test_a_quantized_head_alone_is_found():
    model = build("classifier")
    model.classifier = Int8Linear(model.classifier, "batch")
    with pytest.raises(UnsupportedModelError, match="classifier, a Int8Linear, quantizes"):
        mw.unpad(model)


def test_a_quantized_model_whose_other_parts_mix_tokens_is_refused_for_that():
    model = quantize(build("bert"), "token")
    model.encoder.layer[0].output.LayerNorm = MeanShift(model.encoder.layer[0].output.LayerNorm)
    with pytest.raises(UnsupportedModelError, match="something other than attention reads more than one token"):
        mw.unpad(model)


class MeanShift(nn.Module):
    """Adds a thousandth of what another token is: less than int8's own rounding."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        out = self.norm(x)
        return out + 1e-3 * out.roll(1, 1)


def test_a_gpt2_whose_layers_are_no_linear_ones_stays_packed():
    model = mw.unpad(transformers.GPT2Model(config("GPT2", **GPT2)).eval())
    with mw.explain() as log:
        model(**GIVEN, use_cache=False)
    assert [each.route for each in log] == ["packed"]


def test_copies_and_pickles_of_an_unpadded_model_notice_that_they_are_quantized():
    model = mw.unpad(build("bert"))
    twin = quantize(copy.deepcopy(model), "batch")
    with pytest.warns(PaddedRunWarning, match="one range for the whole batch"):
        call(twin)
    with mw.explain() as log:
        call(model)
    assert [each.route for each in log] == ["packed"]
