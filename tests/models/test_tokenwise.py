"""Models that carry their own attention: their linear layers compute kept tokens only, and nothing else changes."""

import copy
import pickle

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="the extra maskwise[transformers] is not installed")

import transformers

import maskwise as mw
from maskwise.models.hugging_face import tokens, tokenwise

GPTJ = {
    "vocab_size": 99,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "rotary_dim": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def gptj(seed=0):
    torch.manual_seed(seed)
    return transformers.GPTJForCausalLM(transformers.GPTJConfig(**GPTJ)).eval()


KEEP = torch.arange(12) < torch.tensor([12, 7, 4])[:, None]


def ids(length, seed=1):
    return torch.randint(3, 99, (3, length), generator=torch.Generator().manual_seed(seed))


def rows_of(model, given):
    """How many rows each linear layer multiplies."""
    found, plain = {}, nn.functional.linear
    names = {id(layer.weight): name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}

    def count(x, weight, bias=None):
        found[names.get(id(weight), "")] = x.shape[:-1].numel()
        return plain(x, weight, bias)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(nn.functional, "linear", count)
        model(**given)
    return found


def test_a_decoder_with_its_own_attention_runs_token_wise():
    model, given = mw.unpad(gptj()), {"input_ids": ids(12), "attention_mask": KEEP.long()}
    with mw.explain() as log, torch.no_grad():
        model(**given)
    (call,) = (each for each in log if each.op.startswith("unpad"))
    assert (call.route, call.reason) == ("tokenwise", tokenwise.REASON)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e30])
def test_what_is_dropped_is_not_read_by_linear_layers(poison):
    layer = nn.Linear(4, 4)
    vars(layer)[tokens.SEQUENCE] = tokens.Reads(tokens.INPUT)
    tokens.bind(layer, "forward", tokens.linear_forward)

    def run(value):
        x = torch.randn(3, 12, 4, generator=torch.Generator().manual_seed(0))
        x = x.masked_fill(~KEEP[..., None], value).requires_grad_()
        with tokens.computing(tokens.Tokens({tokens.INPUT: tokens.Packing.of(KEEP)})):
            out = layer(x)
        return out, *torch.autograd.grad(out.square().sum(), (x, layer.weight, layer.bias))

    for found, wanted in zip(run(poison), run(0.0), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_decoder_gives_the_same_scores_and_generates_the_same_tokens(side):
    model, keep = gptj(), KEEP if side == "right" else KEEP.flip(1)
    given = {"input_ids": ids(12), "attention_mask": keep.long()}
    with torch.no_grad():
        wanted = model(**given).logits
        tokens = [
            model.generate(**given, max_new_tokens=5, do_sample=False, num_beams=n, pad_token_id=0) for n in (1, 3)
        ]
        mw.unpad(model)
        torch.testing.assert_close(model(**given).logits[keep], wanted[keep], rtol=1e-4, atol=1e-5)
        for beams, each in zip((1, 3), tokens, strict=True):
            found = model.generate(**given, max_new_tokens=5, do_sample=False, num_beams=beams, pad_token_id=0)
            assert torch.equal(found, each)


SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
OTHERS = {
    # Its layers read (L, B, D), and of more columns than there are tokens: whole windows.
    "longformer": lambda: transformers.LongformerModel(
        transformers.LongformerConfig(**SMALL, attention_window=8, pad_token_id=0)
    ),
    # Its layers are convolutions of one token, of (B, D, L).
    "squeezebert": lambda: transformers.SqueezeBertModel(
        transformers.SqueezeBertConfig(**SMALL, embedding_size=32, pad_token_id=0)
    ),
    # It reads nothing without boxes.
    "bros": lambda: transformers.BrosModel(transformers.BrosConfig(**SMALL, dim_bbox=4, pad_token_id=0)),
}
KEPT = 12 + 7 + 4
ROWS = {
    # The first and the last column are computed, too; those that the model adds are not.
    "longformer": ("encoder.layer.0.attention.self.query", KEPT + 2),
    "squeezebert": ("encoder.layers.0.intermediate.conv1d", KEPT + 2),
    "bros": ("encoder.layer.0.intermediate.dense", KEPT + 2),
}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", OTHERS)
def test_layers_of_any_layout_compute_kept_tokens_with_the_same_gradients(name, side):
    torch.manual_seed(0)
    model, keep = OTHERS[name]().eval(), KEEP if side == "right" else KEEP.flip(1)
    given = {"input_ids": ids(12).masked_fill(~keep, 0), "attention_mask": keep.long()}
    if name == "bros":
        given["bbox"] = torch.randint(8, (3, 12, 4), generator=torch.Generator().manual_seed(0)).sort(-1).values.float()
    if name == "longformer":
        given["global_attention_mask"] = torch.zeros_like(given["input_ids"]).index_fill_(1, torch.tensor([5]), 1)

    def run():
        model.zero_grad()
        out = model(**given)
        rows = out.last_hidden_state[keep]
        (rows.sin().sum() + out.pooler_output.sum()).backward()
        return rows, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    wanted, gradients = run()
    layer, computed = ROWS[name]
    rows = []
    mw.unpad(model)
    plain = {each: getattr(nn.functional, each) for each in ("linear", "conv1d")}
    weight = model.get_submodule(layer).weight
    with pytest.MonkeyPatch.context() as patch:
        for each, function in plain.items():

            def count(x, of, *args, function=function, **kwargs):
                if of is weight:
                    rows.append(x.shape[-1] if of.dim() == 3 else x.shape[:-1].numel())
                return function(x, of, *args, **kwargs)

            patch.setattr(nn.functional, each, count)
        found, others = run()
    assert rows == [computed]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    scale = max(float(each.abs().max()) for each in gradients.values())
    for path, each in gradients.items():
        torch.testing.assert_close(others[path] / scale, each / scale, rtol=1e-3, atol=1e-5, msg=path)


def test_a_refusal_says_why_neither_layers_nor_tokens_can_be_packed():
    sizes = {"vocab_size": 99, "embedding_size": 32, **{k: v for k, v in SMALL.items() if k != "vocab_size"}}
    with pytest.raises(mw.models.UnsupportedModelError) as refusal:
        mw.unpad(transformers.ConvBertModel(transformers.ConvBertConfig(**sizes)))
    assert "a convolution reads neighbouring tokens" in str(refusal.value)
    assert "what it returns depends on its padding" in str(refusal.value)
    with pytest.raises(mw.models.UnsupportedModelError, match="nothing says which of its tokens are padding"):
        mw.unpad(transformers.FNetModel(transformers.FNetConfig(**SMALL)))
    with pytest.raises(mw.models.UnsupportedModelError, match="what it returns depends on its padding"):
        mw.unpad(transformers.CanineModel(transformers.CanineConfig(**SMALL, local_transformer_stride=8)))


def test_labels_of_dropped_tokens_run_padded_with_a_warning():
    model, given = mw.unpad(gptj()), {"input_ids": ids(12), "attention_mask": KEEP.flip(1).long()}
    given["labels"] = given["input_ids"].masked_fill(~KEEP.flip(1), -100)
    with pytest.warns(mw.models.PaddedRunWarning, match="labels count predictions of dropped tokens"):
        found = model(**given).loss
    torch.testing.assert_close(found, gptj()(**given).loss)


def test_repad_copies_and_pickles_are_what_they_were():
    model, given = gptj(), {"input_ids": ids(12), "attention_mask": KEEP.long()}
    with torch.no_grad():
        before = model(**given).logits
        mw.unpad(model)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            torch.testing.assert_close(twin(**given).logits[KEEP], before[KEEP], rtol=1e-4, atol=1e-5)
            assert rows_of(twin, given)["transformer.h.0.mlp.fc_in"] == 23 + 2
        mw.models.repad(model)
        assert torch.equal(model(**given).logits, before)
    assert not any(tokens.SEQUENCE in vars(each) for each in model.modules())


def test_a_model_that_reads_what_is_dropped_is_refused():
    class Mean(transformers.GPTJModel):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.last_hidden_state = out.last_hidden_state + out.last_hidden_state.mean(1, keepdim=True)
            return out

    with pytest.raises(mw.models.UnsupportedModelError):
        mw.unpad(Mean(transformers.GPTJConfig(**GPTJ)))


def test_experts_with_a_capacity_are_refused_since_dropped_tokens_take_a_part_of_it():
    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "num_experts": 2}
    config = transformers.SwitchTransformersConfig(
        num_layers=2, num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, **sizes
    )
    with pytest.raises(mw.models.UnsupportedModelError, match="gives experts a capacity"):
        mw.unpad(transformers.SwitchTransformersForConditionalGeneration(config))
