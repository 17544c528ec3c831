"""The loss head of language models on rows that have a label: the same loss, and the same gradients, without logits."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F

import maskwise as mw
from maskwise.errors import ArgumentError
from tests.models.zoo import BERT, GPT2, MODERN, SIZE, transformers

STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GROUPED = {**SIZE, "num_key_value_heads": 2, "head_dim": 8}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
# name: (model class, config class, values, whether the loss honours num_items_in_batch)
MODELS = {
    "bert": ("BertForMaskedLM", "Bert", BERT, False),
    "bert-untied": ("BertForMaskedLM", "Bert", {**BERT, **UNTIED}, False),
    "roberta": ("RobertaForMaskedLM", "Roberta", BERT, False),
    "modernbert": ("ModernBertForMaskedLM", "ModernBert", MODERN, True),
    "modernbert-sparse": ("ModernBertForMaskedLM", "ModernBert", {**MODERN, "sparse_prediction": True}, True),
    "gpt2": ("GPT2LMHeadModel", "GPT2", {**GPT2, **STILL}, True),
    "llama": ("LlamaForCausalLM", "Llama", {**GROUPED, **UNTIED}, True),
    "llama-tied": ("LlamaForCausalLM", "Llama", {**GROUPED, **TIED}, True),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3", GROUPED, True),
    # A cap that logits reach, so that to leave it out is seen.
    "gemma2": ("Gemma2ForCausalLM", "Gemma2", {**GROUPED, "final_logit_softcapping": 0.2}, True),
    "cohere": ("CohereForCausalLM", "Cohere", {**SIZE, "logit_scale": 0.0625}, True),
    "granite": ("GraniteForCausalLM", "Granite", {**GROUPED, "logits_scaling": 8.0}, True),
}
EVERY = pytest.mark.parametrize("name", MODELS)


def build(name):
    model, config, values, _ = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, f"{config}Config")(**values)).train()


def batch():
    """Three sequences of nine tokens, a few of them padding, with labels for a third of the rest."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 99, (3, 9), generator=generator)
    mask = mw.Mask.from_lengths([9, 4, 7]).to_bool()
    labels = torch.where(mask & (torch.rand(3, 9, generator=generator) < 0.4), ids, -100)
    labels[0, 3] = ids[0, 3]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def step(model, **inputs):
    """The loss, and the gradients of all parameters."""
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    return output, {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def assert_same_step(found, expected):
    (output, gradients), (own, of_own) = found, expected
    torch.testing.assert_close(output.loss, own.loss, rtol=1e-6, atol=1e-6)
    assert gradients.keys() == of_own.keys()
    for name, each in gradients.items():
        # Sums of another order, through two layers.
        torch.testing.assert_close(each, of_own[name], rtol=1e-4, atol=1e-6, msg=name)


@EVERY
def test_loss_and_gradients_are_those_of_the_model_itself_without_logits(name):
    model = build(name)
    expected = step(model, **batch())
    assert mw.nn.kept_head(model) is model
    found = step(model, **batch())
    assert_same_step(found, expected)
    assert found[0].logits is None
    assert expected[0].logits is not None


@EVERY
def test_num_items_in_batch_divides_where_it_does_in_the_model_itself(name):
    model = build(name)
    own = step(model, **batch())
    expected = step(model, **batch(), num_items_in_batch=torch.tensor(40))
    assert (own[0].loss != expected[0].loss) == MODELS[name][3]
    assert_same_step(step(mw.nn.kept_head(model), **batch(), num_items_in_batch=torch.tensor(40)), expected)


@EVERY
def test_evaluation_and_calls_without_labels_are_unchanged_to_the_last_bit(name):
    model = build(name)
    inputs = batch()
    without = {key: value for key, value in inputs.items() if key != "labels"}
    expected = [model.eval()(**inputs), model(**without), model.train()(**without)]
    mw.nn.kept_head(model)
    found = [model.eval()(**inputs), model(**without), model.train()(**without)]
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.logits, b.logits)
    assert torch.equal(found[0].loss, expected[0].loss)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"use_cache": False}], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_generated_tokens_are_the_same_in_both_modes_and_after_full_head(name, options):
    model, ids = build(name), batch()["input_ids"][:2]

    def tokens():
        settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, **options}
        return [model.train(training).generate(ids, **settings).tolist() for training in (True, False)]

    expected = tokens()
    mw.nn.kept_head(model)
    assert tokens() == expected
    mw.nn.full_head(model)
    assert tokens() == expected


def test_full_head_leaves_nothing_behind():
    model = build("llama")
    before = {module: set(vars(module)) for module in model.modules()}
    expected = step(model, **batch())
    assert mw.nn.full_head(mw.nn.kept_head(model)) is model
    assert {module: set(vars(module)) for module in model.modules()} == before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    output, _ = step(model, **batch())
    assert torch.equal(output.loss, expected[0].loss)
    assert torch.equal(output.logits, expected[0].logits)


def test_only_rows_with_a_label_are_multiplied():
    model, inputs = mw.nn.kept_head(build("llama")), batch()
    with mw.force("pieces"), mw.explain() as log:
        model(**inputs)
    (call,) = [call for call in log if call.op == "linear_cross_entropy"]
    kept = int((inputs["labels"][:, 1:] != -100).sum())
    assert (call.route, call.computed) == ("pieces", kept * 32)


def test_what_a_row_without_a_label_holds_reaches_nothing():
    model = build("llama")
    mw.nn.kept_head(model)
    labels = torch.full((1, 9), -100)
    labels[0, 3] = 5
    # A causal model: the third token is predicted by the first three.
    results = []
    for last in (7, 8):
        ids = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10, last]])
        results.append(step(model, input_ids=ids, labels=labels)[1]["lm_head.weight"])
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_batch_without_labels_gives_0_instead_of_nan(name):
    model, inputs = build(name), batch()
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    assert math.isnan(model(**inputs).loss.item())
    output, gradients = step(mw.nn.kept_head(model), **inputs)
    assert output.loss.item() == 0.0
    assert all(torch.equal(each, torch.zeros_like(each)) for each in gradients.values())


def test_a_loss_of_another_kind_in_a_call_is_the_models_own():
    model = mw.nn.kept_head(build("llama"))
    inputs = batch()
    shifted = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    assert model(**inputs, shift_labels=shifted).logits is not None
    assert model(**inputs, return_dict=False)[1].shape == (3, 9, 99)
    assert model(**inputs, logits_to_keep=torch.arange(9)).logits.shape == (3, 9, 99)


def test_a_head_that_is_replaced_later_computes_the_loss_itself():
    model = mw.nn.kept_head(build("llama"))
    model.set_output_embeddings(torch.nn.Linear(32, 99, bias=False))
    assert model(**batch()).logits.shape == (3, 9, 99)


def test_an_error_in_the_model_leaves_no_call_behind():
    model = mw.nn.kept_head(build("llama"))
    inputs = batch()
    with pytest.raises(IndexError):
        model(**{**inputs, "input_ids": inputs["input_ids"] + 1000})
    hidden = torch.randn(2, 32)
    assert torch.equal(model.lm_head(hidden), F.linear(hidden, model.lm_head.weight))


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_trains_by_itself(copier):
    model = mw.nn.kept_head(build("llama-tied"))
    expected = step(model, **batch())
    twin = copier(model)
    assert_same_step(step(twin, **batch()), expected)
    mw.nn.full_head(twin)
    assert twin(**batch()).logits is not None
    assert model(**batch()).logits is None


def test_a_state_dict_and_ties_are_what_they_were():
    model = build("llama-tied")
    names = set(model.state_dict())
    mw.nn.kept_head(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert set(model.state_dict()) == names
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)


@pytest.mark.parametrize("first", ["unpad", "kept_head"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_an_unpadded_model_has_a_kept_head_in_either_order(name, first):
    model = build(name)
    inputs = batch()
    expected = step(model, **inputs)
    for change in (mw.unpad, mw.nn.kept_head) if first == "unpad" else (mw.nn.kept_head, mw.unpad):
        change(model)
    found = step(model, **inputs)
    assert found[0].logits is None
    assert_same_step(found, expected)


def test_bfloat16_and_autocast_are_served():
    model, inputs = build("llama"), batch()
    expected = model(**inputs).loss.item()
    mw.nn.kept_head(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(**inputs).loss.item() == pytest.approx(expected, rel=1e-2)
    low = mw.nn.kept_head(build("llama").bfloat16())
    output, gradients = step(low, **inputs)
    assert output.loss.item() == pytest.approx(expected, rel=1e-2)
    assert gradients["lm_head.weight"].dtype is torch.bfloat16


def test_a_model_in_training_mode_stays_in_it():
    model = build("llama")
    model.model.layers[0].eval()
    modes = [each.training for each in model.modules()]
    mw.nn.kept_head(model)
    assert [each.training for each in model.modules()] == modes


def test_a_compiled_model_trains_with_the_same_loss():
    model = build("llama")
    expected = model(**batch()).loss.item()
    compiled = torch.compile(mw.nn.kept_head(model), backend="aot_eager")
    output, gradients = step(compiled, **batch())
    assert output.logits is None
    assert output.loss.item() == pytest.approx(expected, rel=1e-5)
    assert len(gradients) == len(list(model.parameters()))


# -- what is refused ---------------------------------------------------------------------------------------------------
class Scored(transformers.LlamaForCausalLM):
    """A loss that is not the labels' cross entropy."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.loss = None if output.loss is None else output.loss + 1.0
        return output


class Squared(transformers.LlamaForCausalLM):
    """Logits that the head alone does not give."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits**2
        return output


class Silent(transformers.LlamaForCausalLM):
    """Labels without a loss."""

    def forward(self, *args, labels=None, **kwargs):
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Scored, "Scored, whose loss is another"),
        (Squared, "leave the logits of its head, or scale or softcap them"),
        (Silent, "Silent, which returns none"),
    ],
)
def test_a_model_with_another_loss_is_refused_and_unchanged(kind, reason):
    model = kind(transformers.LlamaConfig(**GROUPED)).train()
    before = {module: set(vars(module)) for module in model.modules()}
    with pytest.raises(ArgumentError, match=reason):
        mw.nn.kept_head(model)
    assert {module: set(vars(module)) for module in model.modules()} == before
    assert model.training
    assert not any(each._forward_hooks for each in model.modules())


def test_an_encoder_decoder_is_refused():
    config = transformers.T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    with pytest.raises(ArgumentError, match="T5ForConditionalGeneration, an encoder-decoder"):
        mw.nn.kept_head(transformers.T5ForConditionalGeneration(config))
