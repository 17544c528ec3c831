"""Encoder-decoders: both stacks run packed, and cross attention reads packed tokens of the other sequence."""

import copy
import pickle

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="the extra maskwise[transformers] is not installed")

import transformers

import maskwise as mw

T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
BART = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
MODELS = {
    "t5": (transformers.T5ForConditionalGeneration, transformers.T5Config, {**T5, "decoder_start_token_id": 0}),
    "umt5": (transformers.UMT5ForConditionalGeneration, transformers.UMT5Config, {**T5, "decoder_start_token_id": 0}),
    "bart": (transformers.BartForConditionalGeneration, transformers.BartConfig, BART),
    "marian": (transformers.MarianMTModel, transformers.MarianConfig, BART),
    "m2m100": (transformers.M2M100ForConditionalGeneration, transformers.M2M100Config, BART),
}
KEEP = torch.arange(12) < torch.tensor([12, 7, 4])[:, None]
HOLES = KEEP.clone()
HOLES[0, 3:6] = False


def build(name, implementation="sdpa"):
    torch.manual_seed(0)
    kind, config, values = MODELS[name]
    model = kind(config(**values, attn_implementation=implementation)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    return model


def ids(seed):
    return torch.randint(3, 99, (3, 12), generator=torch.Generator().manual_seed(seed))


def batch(encoder, decoder):
    """Two sequences of one length, which keep different tokens of it."""
    return {
        "input_ids": ids(1).masked_fill(~encoder, 0),
        "attention_mask": encoder.long(),
        "decoder_attention_mask": decoder.long(),
        "labels": ids(2).masked_fill(~decoder, -100),
        "use_cache": False,
    }


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def routes(log):
    return [(each.op, each.route) for each in log if each.op.startswith("unpad")]


@pytest.mark.parametrize("encoder", [KEEP.flip(0), KEEP.flip(0).flip(1), HOLES.flip(0)], ids=["right", "left", "holes"])
@pytest.mark.parametrize("name", MODELS)
def test_both_stacks_run_packed_with_the_same_loss_logits_and_gradients(name, encoder):
    model, given = build(name), batch(encoder, KEEP)
    wanted = model(**given)
    wanted_gradients = gradients(model, wanted.loss)
    mw.unpad(model)
    with mw.explain() as log:
        found = model(**given)
    assert [route for _, route in routes(log)] == ["packed", "packed"]
    torch.testing.assert_close(found.loss, wanted.loss)
    torch.testing.assert_close(found.logits[KEEP], wanted.logits[KEEP], rtol=1e-4, atol=1e-4)
    encoded = found.encoder_last_hidden_state, wanted.encoder_last_hidden_state
    torch.testing.assert_close(*(each[encoder] for each in encoded), rtol=1e-4, atol=1e-4)
    for parameter, gradient in gradients(model, found.loss).items():
        torch.testing.assert_close(gradient, wanted_gradients[parameter], rtol=1e-3, atol=1e-4, msg=parameter)


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_that_only_the_config_requests_is_left_out_beside_a_loss(name):
    # Some of these models hand their config's `use_cache` to the decoder, others do not.
    model, given = mw.unpad(build(name)), batch(KEEP.flip(0), KEEP)
    del given["use_cache"]
    with mw.explain() as log:
        assert model(**given).past_key_values is None
    assert [route for _, route in routes(log)] == ["packed", "packed"]


@pytest.mark.filterwarnings("ignore::maskwise.models.PaddedRunWarning")
def test_a_cache_that_the_caller_requests_is_returned_beside_a_loss():
    model, given = mw.unpad(build("m2m100")), batch(KEEP.flip(0), KEEP)
    with mw.explain() as log:
        cache = model(**{**given, "use_cache": True}).past_key_values
    assert cache.get_seq_length() == 12
    assert routes(log)[1] == ("unpad M2M100Decoder", "padded")


def test_layers_multiply_the_kept_tokens_of_their_own_sequence():
    model, given = mw.unpad(build("t5")), batch(torch.arange(12) < torch.tensor([2, 3, 5])[:, None], KEEP)
    rows, plain = {}, nn.functional.linear
    names = {id(layer.weight): name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}

    def count(x, weight, bias=None):
        rows[names.get(id(weight), "")] = x.shape[:-1].numel()
        return plain(x, weight, bias)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(nn.functional, "linear", count)
        model(**given)
    encoder, decoder = 2 + 3 + 5, 12 + 7 + 4
    assert rows["encoder.block.0.layer.1.DenseReluDense.wi"] == encoder
    # In two rows of one width, which has a place to spare.
    assert rows["decoder.block.0.layer.2.DenseReluDense.wi"] == decoder + 1
    assert rows["decoder.block.0.layer.1.EncDecAttention.q"] == decoder + 1
    assert rows["decoder.block.0.layer.1.EncDecAttention.k"] == encoder
    # The head, with the last column, where it is dropped.
    assert rows["lm_head"] == decoder + 2


def test_without_a_mask_of_the_decoder_cross_attention_still_reads_kept_tokens_only():
    model, given = build("bart"), batch(KEEP, KEEP)
    del given["decoder_attention_mask"]
    wanted = model(**given).logits
    mw.unpad(model)
    with mw.explain() as log:
        found = model(**given).logits
    assert routes(log) == [("unpad BartEncoder", "packed"), ("unpad BartDecoder", "packed")]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_the_encoder_drops_reaches_nothing(poison):
    model = mw.unpad(build("bart")).model.decoder
    states = torch.randn(3, 12, 32, generator=torch.Generator().manual_seed(0))
    given = {"input_ids": ids(2), "attention_mask": KEEP.long(), "encoder_attention_mask": KEEP.flip(0).long()}
    dropped = ~KEEP.flip(0)[..., None]
    with torch.no_grad():
        wanted = model(**given, encoder_hidden_states=states, use_cache=False).last_hidden_state
        found = model(**given, encoder_hidden_states=states.masked_fill(dropped, poison), use_cache=False)
    assert torch.equal(found.last_hidden_state, wanted)


def test_a_row_of_which_the_encoder_keeps_nothing_runs_padded_where_its_bias_reads_what_is_dropped():
    empty = KEEP.clone()
    empty[1] = False
    model, given = build("t5"), batch(empty, KEEP)
    wanted = model(**given).logits
    mw.unpad(model)
    with pytest.warns(mw.models.PaddedRunWarning, match="keeps nothing"):
        found = model(**given).logits
    torch.testing.assert_close(found[KEEP], wanted[KEEP], rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::maskwise.models.PaddedRunWarning")  # Generation keeps a cache.
def test_generation_repad_copies_and_pickles_are_what_they_were():
    model, given = build("bart"), batch(KEEP, KEEP)
    prompt = {name: given[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        before, tokens = model(**given).logits, model.generate(**prompt, max_new_tokens=5, do_sample=False)
        mw.unpad(model)
        assert torch.equal(model.generate(**prompt, max_new_tokens=5, do_sample=False), tokens)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            torch.testing.assert_close(twin(**given).logits[KEEP], before[KEEP], rtol=1e-4, atol=1e-4)
        mw.models.repad(model)
        assert torch.equal(model(**given).logits, before)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_a_soft_cap_and_sinks_run_packed(name):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 99,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": "eager",
    }
    if name == "gemma2":
        model = transformers.Gemma2Model(transformers.Gemma2Config(**sizes, attn_logit_softcapping=2.0)).eval()
    else:
        model = transformers.GptOssModel(transformers.GptOssConfig(**sizes, num_local_experts=4)).eval()
        for layer in model.layers:
            nn.init.normal_(layer.self_attn.sinks)
    given = {"input_ids": ids(1), "attention_mask": KEEP.long(), "use_cache": False}
    with torch.no_grad():
        wanted = model(**given).last_hidden_state
        mw.unpad(model)
        with mw.explain() as log:
            found = model(**given).last_hidden_state
    assert [route for _, route in routes(log)] == ["packed"]
    torch.testing.assert_close(found[KEEP], wanted[KEEP], rtol=1e-4, atol=1e-4)
