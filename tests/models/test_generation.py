"""``generate`` of unpadded decoders: the same tokens, with a prefill of kept tokens only."""

import copy

import pytest
import torch
from torch import nn

import maskwise as mw
from maskwise.models import PaddedRunWarning
from tests.models.zoo import GPT2, SIZE, config, transformers

LENGTHS = (11, 4, 7, 1)
KEEP = {
    "left": torch.arange(11) >= 11 - torch.tensor(LENGTHS)[:, None],
    "right": torch.arange(11) < torch.tensor(LENGTHS)[:, None],
}
SMALL = {**SIZE, "num_key_value_heads": 2, "pad_token_id": 0}
MODELS = {
    "llama": ("LlamaForCausalLM", "Llama", SMALL),
    "llama-eager": ("LlamaForCausalLM", "Llama", {**SMALL, "attn_implementation": "eager"}),
    "mistral, a window": ("MistralForCausalLM", "Mistral", {**SMALL, "sliding_window": 4}),
    "gpt2": ("GPT2LMHeadModel", "GPT2", GPT2),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3", {**SMALL, "head_dim": 8}),
    "gemma2, a soft cap": ("Gemma2ForCausalLM", "Gemma2", {**SMALL, "head_dim": 8, "sliding_window": 4}),
}
OPTIONS = [{"do_sample": False}, {"do_sample": True}, {"do_sample": False, "num_beams": 3}]


def build(name):
    kind, settings, values = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config(settings, **values)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # So that other tokens are other words, and not the same one whatever the prompt.
            nn.init.normal_(parameter, std=0.2)
    return model


def prompts(side):
    keep = KEEP[side]
    ids = torch.randint(3, 99, keep.shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids.masked_fill(~keep, 0), "attention_mask": keep.long()}


def generate(model, side, **options):
    torch.manual_seed(0)
    with mw.explain() as log:
        tokens = model.generate(**prompts(side), max_new_tokens=6, **options)
    return tokens, [each for each in log if each.op.startswith("unpad")]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_left_padded_prompts_give_the_same_tokens_with_a_packed_prefill(name, options, cache):
    model = build(name)
    options = {**options, "cache_implementation": cache}
    expected, _ = generate(model, "left", **options)
    found, calls = generate(mw.unpad(model), "left", **options)
    assert torch.equal(found, expected)
    if not name.startswith("gemma2"):
        assert [each.route for each in calls] == ["packed", *["padded"] * (len(calls) - 1)]
        assert {each.reason for each in calls[1:]} == {"the call continues from a cache"}


@pytest.mark.filterwarnings("ignore::maskwise.models.PaddedRunWarning")
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_right_padded_prompts_give_the_same_tokens_and_the_reason_to_run_padded(name, options, cache):
    # Generation goes on from the last column, dropped or not.
    model = build(name)
    options = {**options, "cache_implementation": cache}
    expected, _ = generate(model, "right", **options)
    found, calls = generate(mw.unpad(model), "right", **options)
    assert torch.equal(found, expected)
    if not name.startswith("gemma2"):
        # With a static cache the mask is one of pairs, which only the model itself reads.
        assert calls[0].reason == (
            "it returns a cache, and generation goes on from a last token that is dropped"
            if cache == "static"
            else "the logits of dropped tokens are requested"
        )


@pytest.mark.filterwarnings("ignore::maskwise.models.PaddedRunWarning")
@pytest.mark.parametrize("side", KEEP)
def test_generation_without_a_cache_gives_the_same_tokens(side):
    model = build("llama")
    expected, _ = generate(model, side, do_sample=False, use_cache=False)
    found, calls = generate(mw.unpad(model), side, do_sample=False, use_cache=False)
    assert torch.equal(found, expected)
    assert [each.route for each in calls[1:]] == ["packed"] * (len(calls) - 1)


@pytest.mark.parametrize("side", KEEP)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_call_without_options_runs_packed_and_returns_its_cache(name, side):
    model, inputs, keep = build(name), prompts(side), KEEP[side]
    with torch.no_grad():
        wanted = model(**inputs)
        with mw.explain() as log:
            found = mw.unpad(model)(**inputs)
    assert [each.route for each in log if each.op.startswith("unpad")] == ["packed"]
    torch.testing.assert_close(found.logits[keep], wanted.logits[keep], rtol=1e-4, atol=1e-4)
    assert found.past_key_values.get_seq_length() == 11


def test_a_cache_of_the_callers_own_and_a_dropped_last_token_run_padded():
    model, inputs = mw.unpad(build("llama")), prompts("right")
    with pytest.warns(PaddedRunWarning, match="generation goes on from a last token that is dropped"):
        model(**inputs, past_key_values=transformers.DynamicCache(config=model.config))


def test_right_padded_prompts_warn_with_what_to_change():
    model = mw.unpad(build("llama"))
    with pytest.warns(PaddedRunWarning, match="padding on the left"):
        generate(model, "right")


@pytest.mark.parametrize("given", ["no cache", "an empty cache"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral, a window"])
def test_a_prefill_fills_the_cache_of_kept_tokens_and_a_next_call_goes_on_from_it(name, given):
    model, inputs, keep = build(name), prompts("left"), KEEP["left"]
    step = {
        "input_ids": torch.full((4, 1), 5),
        "attention_mask": torch.cat([inputs["attention_mask"], torch.ones(4, 1, dtype=torch.long)], 1),
        "position_ids": torch.tensor(LENGTHS)[:, None],
    }
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    found = []
    for each in (model, mw.unpad(copy.deepcopy(model))):
        cache = transformers.DynamicCache(config=each.config) if given == "an empty cache" else None
        with torch.no_grad():
            out = each(**inputs, past_key_values=cache, use_cache=True)
            assert cache is None or out.past_key_values is cache
            assert type(out.past_key_values) is transformers.DynamicCache
            keys = [layer.keys.transpose(1, 2)[keep[:, -layer.keys.shape[2] :]] for layer in out.past_key_values.layers]
            after = each(**step, past_key_values=out.past_key_values).logits
        found.append((out.logits[keep], *keys, after))
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_what_is_dropped_never_reaches_the_cache_of_a_prefill():
    model, inputs = mw.unpad(build("llama")), prompts("left")
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    with torch.no_grad():
        clean, dirty = (
            model(inputs_embeds=each, attention_mask=inputs["attention_mask"], use_cache=True)
            for each in (embeds, embeds.masked_fill(~KEEP["left"][..., None], torch.nan))
        )
    for one, other in zip(clean.past_key_values.layers, dirty.past_key_values.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)
        assert not one.keys.transpose(1, 2)[~KEEP["left"]].any()
    assert torch.equal(clean.logits, dirty.logits)


@pytest.mark.filterwarnings("ignore::maskwise.models.PaddedRunWarning")
def test_a_mask_of_pairs_that_is_not_made_of_padding_runs_padded():
    model, inputs = build("llama"), prompts("left")
    pairs = (KEEP["left"][:, None, None] & torch.ones(11, 11, dtype=torch.bool).tril()).clone()
    pairs[0, 0, 10, 3] = False
    outputs = []
    for each in (model, mw.unpad(copy.deepcopy(model))):
        cache = transformers.StaticCache(config=each.config, max_cache_len=11)
        with torch.no_grad(), mw.explain() as log:
            outputs.append(each(inputs["input_ids"], attention_mask=pairs, past_key_values=cache).logits)
    assert [call.route for call in log if call.op.startswith("unpad")] == ["padded"]
    assert torch.equal(*outputs)
