"""What a packed call of a Hugging Face model is given, and what comes back: the cases in which shapes mislead."""

import pytest
import torch
from torch import nn

import maskwise as mw
from maskwise.models import Packing, PaddedRunWarning, UnsupportedModelError
from maskwise.models.hugging_face.layout import Layout

from .contract import TOLERANCE, assert_equal_gradients, gradients, routes
from .zoo import BERT, IDS, MODERN, SIZE, config, transformers

KEEP = torch.arange(12) < torch.tensor([12, 7, 4])[:, None]
GENERATOR = torch.Generator().manual_seed(0)
TOKENS = torch.randint(5, 90, (3, 12), generator=GENERATOR)
SIDES = {"right": KEEP, "left": KEEP.flip(1)}


def larger(model, seed=0):
    """Weights of a size at which tokens that mix show: the models' own start at 0.02."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        with torch.no_grad():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.3 * noise if parameter.dim() > 1 else parameter + 0.1 * noise)
    return model.eval()


def run(model, **given):
    with mw.explain() as log:
        out = model(**given)
    return out, routes(log)


def assert_close_where(keep, found, expected):
    torch.testing.assert_close(found[keep], expected[keep], rtol=1e-4, atol=TOLERANCE * expected.abs().max().item())


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_an_encoders_output_of_the_same_length_is_not_packed_with_the_decoders_mask():
    bert = config("Bert", **BERT)
    decoder = config("Bert", **BERT, is_decoder=True, add_cross_attention=True)
    model = larger(
        transformers.EncoderDecoderModel(
            encoder=transformers.BertModel(bert), decoder=transformers.BertLMHeadModel(decoder)
        )
    )
    given = {
        "input_ids": TOKENS,
        "attention_mask": KEEP.long(),
        "decoder_input_ids": TOKENS.flip(0),
        "decoder_attention_mask": KEEP.flip(0).long(),
        "use_cache": False,
    }
    expected = model(**given).logits
    mw.unpad(model)
    with mw.explain() as log:
        found = model(**given).logits
    assert routes(log) == ["packed", "packed"]
    assert_close_where(KEEP.flip(0), found, expected)


def test_a_decoder_with_cross_attention_runs_packed_beside_an_encoders_output():
    settings = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **IDS}
    model = larger(transformers.GPT2LMHeadModel(config("GPT2", **settings, add_cross_attention=True)))
    states = torch.randn(3, 12, 32, generator=torch.Generator().manual_seed(1))
    given = {"input_ids": TOKENS, "attention_mask": KEEP.long(), "use_cache": False, "encoder_hidden_states": states}
    expected = model(**given).logits
    mw.unpad(model)
    with mw.explain() as log:
        found = model(**given).logits
    assert routes(log) == ["packed"]
    assert_close_where(KEEP, found, expected)


def test_a_number_of_items_as_trainers_pass_it_runs_packed():
    model = larger(transformers.LlamaForCausalLM(config("Llama", **SIZE)))
    labels = torch.where(KEEP, TOKENS, -100)
    given = {
        "input_ids": TOKENS,
        "attention_mask": KEEP.long(),
        "labels": labels,
        "num_items_in_batch": (labels[:, 1:] != -100).sum(),
    }
    expected = model(**given)
    wanted = gradients(model, expected.loss)
    found, ways = run(mw.unpad(model), **given)
    assert ways == ["packed"]
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
    assert_equal_gradients(wanted, gradients(model, found.loss))


def test_a_cache_that_nobody_requested_is_left_out_in_training_and_beside_a_loss():
    model = larger(transformers.LlamaForCausalLM(config("Llama", **SIZE)))
    given = {"input_ids": TOKENS, "attention_mask": KEEP.long()}
    expected = model(**given)
    assert expected.past_key_values is not None
    mw.unpad(model)
    out, ways = run(model, **given, labels=torch.where(KEEP, TOKENS, -100))
    assert ways == ["packed"]
    assert out.past_key_values is None
    assert run(model.train(), **given)[1] == ["packed"]
    out, ways = run(model.eval(), **given)
    assert ways == ["packed"]
    torch.testing.assert_close(out.logits[KEEP], expected.logits[KEEP], rtol=1e-4, atol=1e-4)
    assert out.past_key_values.get_seq_length() == 12


def test_positions_along_several_axes_are_packed_axis_by_axis():
    # Three rows: the axes could be taken for the batch.
    size = {**SIZE, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = transformers.Qwen2VLTextConfig(**size, rope_parameters=rope)
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel

    model = larger(Qwen2VLTextModel(text))
    positions = torch.stack([torch.arange(12).expand(3, 12) + axis for axis in range(3)])
    given = {"input_ids": TOKENS, "attention_mask": KEEP.long(), "position_ids": positions, "use_cache": False}
    expected = model(**given).last_hidden_state
    found, ways = run(mw.unpad(model), **given)
    assert ways == ["packed"]
    assert_close_where(KEEP, found.last_hidden_state, expected)


# -- lengths -----------------------------------------------------------------------------------------------------------


class LimitedBert(transformers.BertModel):
    """Refuses a sequence that is longer than its table of positions, as CLIP's text model does."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        if input_ids.shape[1] > self.config.max_position_embeddings:
            raise ValueError("too long")
        return super().forward(input_ids, attention_mask, position_ids=position_ids, **kwargs)


def test_more_kept_tokens_than_the_model_has_positions_are_packed_in_several_rows():
    model = larger(LimitedBert(config("Bert", **{**BERT, "max_position_embeddings": 16})))
    expected = model(input_ids=TOKENS, attention_mask=KEEP.long())
    found, ways = run(mw.unpad(model), input_ids=TOKENS, attention_mask=KEEP.long())
    assert ways == ["packed"]
    assert KEEP.sum() > 16
    assert_close_where(KEEP, found.last_hidden_state, expected.last_hidden_state)
    torch.testing.assert_close(found.pooler_output, expected.pooler_output, rtol=1e-4, atol=TOLERANCE)


@pytest.mark.parametrize("limit", [None, 5, 12, 100])
@pytest.mark.parametrize("spare", [0, 1])
def test_rows_hold_every_token_and_are_no_longer_than_the_padded_batch_or_the_limit(limit, spare):
    layout = Layout.of(Packing.of(KEEP), limit=limit, spare=spare)
    assert layout.width <= max(12, limit or 0)
    assert layout.size >= KEEP.sum() + spare
    x = torch.randn(3, 12, 2)
    folded = layout.fold(x)
    assert folded.shape == (layout.rows, layout.width, 2)
    assert torch.equal(layout.unfold(folded), x * KEEP[..., None])


ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "long_factor": [3.0, 2.0, 2.0, 5.0],
        "short_factor": [1.0, 1.0, 1.0, 1.0],
        "original_max_position_embeddings": 8,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_follow_the_padded_length_where_only_padding_passes_the_original(kind):
    length = 8 if kind == "dynamic" else 64
    settings = {**SIZE, "max_position_embeddings": length, "rope_parameters": ROPES[kind]}
    model = larger(transformers.LlamaModel(config("Llama", **settings)))
    keep = torch.arange(12) < torch.tensor([7, 5, 4])[:, None]
    given = {"input_ids": TOKENS, "attention_mask": keep.long(), "use_cache": False}
    expected = model(**given).last_hidden_state
    short = model(**{name: value[:, :7] for name, value in given.items() if name != "use_cache"}, use_cache=False)
    assert not torch.allclose(short.last_hidden_state[keep[:, :7]], expected[keep], atol=1e-2)
    found, ways = run(mw.unpad(model), **given)
    assert ways == ["packed"]
    assert_close_where(keep, found.last_hidden_state, expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_first_column_is_right_where_a_window_keeps_every_key_from_it(implementation):
    values = {**MODERN, "local_attention": 6, "global_attn_every_n_layers": 2, "attn_implementation": implementation}
    model = larger(transformers.ModernBertModel(config("ModernBert", **values)))
    expected = model(input_ids=TOKENS, attention_mask=SIDES["left"].long()).last_hidden_state
    mw.unpad(model)
    with pytest.warns(PaddedRunWarning, match="on the right") if implementation == "eager" else mw.explain():
        found = model(input_ids=TOKENS, attention_mask=SIDES["left"].long()).last_hidden_state
    torch.testing.assert_close(found[:, 0], expected[:, 0], rtol=1e-4, atol=TOLERANCE * expected.abs().max().item())


# -- outputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
def test_a_pooler_without_an_encoder_before_it_reads_each_rows_first_token(side):
    keep = SIDES[side]
    model = larger(transformers.NomicBertForSequenceClassification(config("NomicBert", **SIZE)))
    expected = model(input_ids=TOKENS, attention_mask=keep.long()).logits
    assert expected.shape == (3, 2)
    found, ways = run(mw.unpad(model), input_ids=TOKENS, attention_mask=keep.long())
    assert ways == ["packed"]
    torch.testing.assert_close(found.logits, expected, rtol=1e-4, atol=TOLERANCE * expected.abs().max().item())


def mixtral(head="MixtralForCausalLM"):
    sizes = {**SIZE, "intermediate_size": 64, "num_key_value_heads": 2}
    return larger(getattr(transformers, head)(config("Mixtral", **sizes, num_local_experts=4, num_experts_per_tok=2)))


@pytest.mark.parametrize("side", SIDES)
def test_router_logits_and_their_loss_come_out_as_they_do_padded(side):
    keep, model = SIDES[side], mixtral()
    labels = torch.where(keep, TOKENS, -100)
    labels[:, 1:][~keep[:, :-1]] = -100
    given = {"input_ids": TOKENS, "attention_mask": keep.long(), "labels": labels, "output_router_logits": True}
    expected = model(**given)
    wanted = gradients(model, expected.loss)
    found, ways = run(mw.unpad(model), **given)
    assert ways == ["packed"]
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.aux_loss, expected.aux_loss, rtol=1e-5, atol=1e-6)
    assert_equal_gradients(wanted, gradients(model, found.loss))


@pytest.mark.parametrize("return_dict", [True, False])
def test_router_logits_have_the_shape_of_the_padded_model_without_a_head(return_dict):
    model = mixtral("MixtralModel")
    given = {
        "input_ids": TOKENS,
        "attention_mask": KEEP.long(),
        "use_cache": False,
        "output_router_logits": True,
        "return_dict": return_dict,
    }
    expected, (found, ways) = model(**given), run(mw.unpad(model), **given)
    assert ways == ["packed"]
    assert type(found) is type(expected)
    pairs = zip(found[-1], expected[-1], strict=True)
    for mine, theirs in pairs:
        assert mine.shape == theirs.shape == (36, 4)
        assert_close_where(KEEP.flatten(), mine, theirs)


def test_an_output_that_looks_packed_by_chance_is_left_alone():
    # One token of each of three rows: three tokens, as there are three rows of pooled outputs.
    model = larger(transformers.BertModel(config("Bert", **BERT)))
    keep = torch.zeros(3, 12, dtype=torch.bool)
    keep[:, 0] = True
    expected = model(input_ids=TOKENS, attention_mask=keep.long())
    found, ways = run(mw.unpad(model), input_ids=TOKENS, attention_mask=keep.long())
    assert ways == ["packed"]
    torch.testing.assert_close(found.pooler_output, expected.pooler_output, rtol=1e-4, atol=TOLERANCE)
    assert_close_where(keep, found.last_hidden_state, expected.last_hidden_state)


# -- losses ------------------------------------------------------------------------------------------------------------


def llava():
    text = config("Llama", **SIZE)
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    composite = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=98)
    return transformers.LlavaForConditionalGeneration(composite)


def encoder_as_language_model():
    return transformers.BertLMHeadModel(config("Bert", **BERT, is_decoder=False))


def mllama():
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig

    text = MllamaTextConfig(**{**SIZE, "num_key_value_heads": 2, "cross_attention_layers": [], **IDS})
    return transformers.MllamaForCausalLM(text)


LOSSES = {"llava": llava, "encoder": encoder_as_language_model, "mllama": mllama}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("ignore:unpad. this .* runs padded")
def test_a_loss_never_shifts_across_a_border(name, side):
    model, keep = larger(LOSSES[name]()), SIDES[side]
    given = {"input_ids": TOKENS, "attention_mask": keep.long(), "labels": torch.where(keep, TOKENS, -100)}
    expected = model(**given)
    wanted = gradients(model, expected.loss)
    mw.unpad(model)
    found, ways = run(model, **given)
    assert ways == (["packed"] if side == "right" else ["padded"])
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
    assert_equal_gradients(wanted, gradients(model, found.loss))


def test_labels_shifted_beforehand_that_count_dropped_tokens_run_padded():
    model = larger(transformers.LlamaForCausalLM(config("Llama", **SIZE)))
    given = {"input_ids": TOKENS, "attention_mask": KEEP.long(), "labels": TOKENS, "shift_labels": TOKENS.flip(1)}
    expected = model(**given).loss
    mw.unpad(model)
    with pytest.warns(PaddedRunWarning, match="-100"):
        found = model(**given).loss
    assert torch.equal(found, expected)


def test_a_decoder_that_classifies_by_a_dropped_token_runs_padded():
    model = larger(transformers.LlamaForSequenceClassification(config("Llama", **SIZE, pad_token_id=0)))
    # The last token that is not the padding token is dropped: the mask and the tokens disagree.
    expected = model(input_ids=TOKENS, attention_mask=KEEP.long(), use_cache=False).logits
    mw.unpad(model)
    with pytest.warns(PaddedRunWarning, match="pad_token_id"):
        found = model(input_ids=TOKENS, attention_mask=KEEP.long(), use_cache=False).logits
    assert torch.equal(found, expected)
    ids = torch.where(KEEP, TOKENS, 0)
    found, ways = run(model, input_ids=ids, attention_mask=KEEP.long(), use_cache=False)
    assert ways == ["packed"]
    expected = mw.models.repad(model)(input_ids=ids, attention_mask=KEEP.long(), use_cache=False).logits
    torch.testing.assert_close(found.logits, expected, rtol=1e-4, atol=TOLERANCE * expected.abs().max().item())


# -- refusals ----------------------------------------------------------------------------------------------------------


def lfm2():
    sizes = {**SIZE, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"], **IDS}
    return transformers.Lfm2Model(config("Lfm2", **sizes))


def jamba():
    sizes = {**SIZE, "intermediate_size": 64, "num_key_value_heads": 2, **IDS}
    small = {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
        "num_experts": 2,
    }
    return transformers.JambaModel(config("Jamba", **sizes, **small))


MIXING = {"lfm2": lfm2, "jamba": jamba}


@pytest.mark.usefixtures("without_tokenwise")
@pytest.mark.parametrize("name", MIXING)
def test_a_convolution_over_tokens_is_refused_however_small_its_weights_are(name):
    model = MIXING[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e-3)
    with pytest.raises(UnsupportedModelError, match="a convolution reads neighbouring tokens"):
        mw.unpad(model)


@pytest.mark.usefixtures("without_tokenwise")
@pytest.mark.parametrize("name", MIXING)
def test_a_convolution_over_tokens_is_refused_without_weights(name):
    with torch.device("meta"):
        model = MIXING[name]()
    with pytest.raises(UnsupportedModelError, match="a Conv1d, mixes tokens"):
        mw.unpad(model)


class MeanBert(transformers.BertModel):
    """Adds the mean of a row, over padding too, to its tokens: nothing that its modules show."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.last_hidden_state = out.last_hidden_state + out.last_hidden_state.mean(1, keepdim=True)
        return out


def test_a_model_without_weights_is_compared_at_its_first_call():
    with torch.device("meta"):
        served, mixing = (kind(config("Bert", **BERT)) for kind in (transformers.BertModel, MeanBert))
    for model in (served, mixing):
        mw.unpad(model)
        model.to_empty(device="cpu")
        model.load_state_dict(larger(transformers.BertModel(config("Bert", **BERT))).state_dict())
        model.embeddings.position_ids.copy_(torch.arange(64)[None])
        model.embeddings.token_type_ids.zero_()
        model.eval()
    expected = larger(transformers.BertModel(config("Bert", **BERT)))(input_ids=TOKENS, attention_mask=KEEP.long())
    found, ways = run(served, input_ids=TOKENS, attention_mask=KEEP.long())
    assert ways == ["packed"]
    assert_close_where(KEEP, found.last_hidden_state, expected.last_hidden_state)
    with pytest.warns(PaddedRunWarning, match="something other than attention"):
        found, ways = run(mixing, input_ids=TOKENS, attention_mask=KEEP.long())
    assert ways == []
    assert "forward" not in vars(mixing)
    assert mixing.config._attn_implementation == "sdpa"
    expected = expected.last_hidden_state + expected.last_hidden_state.mean(1, keepdim=True)
    torch.testing.assert_close(found.last_hidden_state, expected, rtol=1e-5, atol=1e-5)


class OwnBert(transformers.BertModel):
    """A user's own, in a file that knows nothing of transformers' tables."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_a_users_own_subclass_is_served():
    model = larger(OwnBert(config("Bert", **BERT)))
    expected = model(TOKENS, KEEP.long()).last_hidden_state
    with mw.explain() as log:
        found = mw.unpad(model)(TOKENS, KEEP.long()).last_hidden_state
    assert routes(log) == ["packed"]
    assert_close_where(KEEP, found, expected)


class KeywordBert(transformers.BertModel):
    def forward(self, input_ids, **kwargs):
        return super().forward(input_ids, **kwargs)


def test_a_subclass_that_hands_its_keywords_on_is_served():
    model = larger(KeywordBert(config("Bert", **BERT)))
    expected = model(TOKENS, attention_mask=KEEP.long()).last_hidden_state
    found, ways = run(mw.unpad(model), input_ids=TOKENS, attention_mask=KEEP.long())
    assert ways == ["packed"]
    assert_close_where(KEEP, found.last_hidden_state, expected)


class LargestOfAll(transformers.BertPreTrainedModel):
    """A head that reads dropped tokens, with a forward that takes no more than it needs."""

    def __init__(self, settings):
        super().__init__(settings)
        self.bert = transformers.BertModel(settings)
        self.post_init()

    def forward(self, input_ids, attention_mask=None):
        return self.bert(input_ids, attention_mask=attention_mask).last_hidden_state.amax(1)


class NeedsMore(LargestOfAll):
    def forward(self, input_ids, attention_mask, more):
        return super().forward(input_ids, attention_mask) + more


def test_a_users_head_that_reads_dropped_tokens_is_refused_or_said_not_to_be_comparable():
    with pytest.raises(UnsupportedModelError, match="something other than attention"):
        mw.unpad(LargestOfAll(config("Bert", **BERT)))
    with pytest.warns(UserWarning, match="could not be compared"):
        mw.unpad(NeedsMore(config("Bert", **BERT)))


class TokenNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return self.norm(x.flatten(0, -2)).view_as(x)


def test_a_batch_norm_over_tokens_is_refused():
    model = transformers.BertModel(config("Bert", **BERT))
    model.encoder.layer[0].output.LayerNorm = TokenNorm(32)
    with pytest.raises(UnsupportedModelError, match="a norm counts all tokens"):
        mw.unpad(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_model_that_quantizes_by_the_largest_of_a_batch_is_refused():
    model = transformers.BertModel(config("Bert", **BERT)).eval()
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
    with pytest.raises(UnsupportedModelError, match="by the largest of all"):
        mw.unpad(quantized)


@pytest.mark.parametrize("given", ["embeddings", "no padding token"])
def test_a_decoder_that_classifies_by_its_last_column_runs_padded(given):
    padding = {"pad_token_id": 0} if given == "embeddings" else {}
    model = larger(transformers.LlamaForSequenceClassification(config("Llama", **SIZE, use_cache=False, **padding)))
    inputs = {"attention_mask": KEEP[1:2].long(), "input_ids": TOKENS[1:2]}
    if given == "embeddings":
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    expected = model(**inputs).logits
    mw.unpad(model)
    with pytest.warns(PaddedRunWarning, match="as the last one"):
        found = model(**inputs).logits
    assert torch.equal(found, expected)


class OwnTargets(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, targets=None, **kwargs):
        out = super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        if targets is not None:
            out.loss = nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
        return out


def test_targets_of_any_name_that_count_dropped_tokens_run_padded():
    model, keep = larger(OwnTargets(config("Llama", **SIZE, use_cache=False))), SIDES["left"]
    given = {"input_ids": TOKENS, "attention_mask": keep.long(), "targets": torch.where(keep, TOKENS, -100)}
    expected = model(**given).loss
    mw.unpad(model)
    with pytest.warns(PaddedRunWarning, match="targets count predictions of dropped tokens"):
        found = model(**given).loss
    assert torch.equal(found, expected)


def clip():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = {**sizes, "vocab_size": 99, "bos_token_id": 97, "eos_token_id": 98, "max_position_embeddings": 16}
    vision = {**sizes, "image_size": 8, "patch_size": 4}
    return transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)


@pytest.mark.usefixtures("without_tokenwise")
def test_a_model_of_text_and_images_is_refused_with_reasons():
    with pytest.raises(UnsupportedModelError) as refusal:
        mw.unpad(transformers.CLIPModel(clip()))
    assert "text_model: transformers: its pooler_output" in str(refusal.value)
    assert "vision_model: transformers: CLIPVisionModel.forward takes no input_ids" in str(refusal.value)


@pytest.mark.usefixtures("without_tokenwise")
def test_a_pooled_output_of_packed_tokens_is_refused():
    with pytest.raises(UnsupportedModelError, match="pooler_output"):
        mw.unpad(transformers.CLIPTextModel(clip().text_config))
