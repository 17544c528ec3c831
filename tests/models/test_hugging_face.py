import copy
import inspect
import pickle
from contextlib import nullcontext

import pytest
import torch

import maskwise as mw
from maskwise.models import PaddedRunWarning, UnsupportedModelError

from .contract import TOLERANCE, assert_equal_gradients, assert_packed_equals_padded, gradients, masks, routes, weighted
from .zoo import DEBERTAS, DECODERS, ENCODERS, build, config, transformers


def inputs(keep, **more):
    ids = torch.randint(5, 99, keep.shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": keep.long(), **more}


def calling(given):
    def call(model):
        out = model(**given)
        pooled = getattr(out, "pooler_output", None)
        return out.last_hidden_state, [] if pooled is None else [pooled]

    return call


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_an_encoder_gives_the_same_packed(name, training):
    keep = masks()
    assert_packed_equals_padded(build(name), calling(inputs(keep)), keep, training=training)


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_scores_the_same_packed_without_a_cache(name):
    keep = masks()
    assert_packed_equals_padded(build(name), calling(inputs(keep, use_cache=False)), keep, first=False)


@pytest.mark.parametrize("name", DEBERTAS)
def test_a_deberta_gives_the_same_packed_where_each_row_keeps_its_first_token(name):
    keep = masks()
    keep[1] = torch.arange(11) < 5
    assert_packed_equals_padded(build(name), calling(inputs(keep)), keep)


def test_a_deberta_runs_padded_where_heads_would_read_a_first_token_that_is_dropped():
    model, given = build("deberta").eval(), inputs(masks())
    expected = model(**given).last_hidden_state
    mw.unpad(model)
    with mw.explain() as log, pytest.warns(PaddedRunWarning, match="padding on the right"):
        found = model(**given).last_hidden_state
    assert routes(log) == ["padded"]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["bert", "roberta", "mpnet", "modernbert", "distilbert"])
def test_the_first_column_is_what_the_padded_model_has_there_since_heads_read_it(name):
    model, keep = build(name).eval(), masks()
    # In an empty row torch's attention gives 0; an eager one reads what is dropped, and runs padded.
    keep[4] = name == "mpnet"
    given = inputs(keep)
    expected = model(**given).last_hidden_state[:, 0]
    found, ways = mw.unpad(model)(**given).last_hidden_state, routes_of(model, given)
    assert ways == ["packed"]
    torch.testing.assert_close(found[:, 0], expected, rtol=1e-4, atol=TOLERANCE)
    dropped = ~keep
    dropped[:, 0] = False
    assert found[dropped].abs().max() == 0


@pytest.mark.parametrize("name", ["mpnet", "bert-eager"])
def test_an_empty_row_runs_padded_where_attention_is_eager(name):
    model, keep = build(name).eval(), masks()
    keep[4] = False
    expected = model(**inputs(keep))
    mw.unpad(model)
    with pytest.warns(PaddedRunWarning, match="a row keeps nothing"):
        found = model(**inputs(keep))
    assert torch.equal(found.last_hidden_state, expected.last_hidden_state)


HEADS = [
    ("bert", "BertForSequenceClassification"),
    ("bert", "BertForMaskedLM"),
    ("roberta", "RobertaForSequenceClassification"),
    ("distilbert", "DistilBertForSequenceClassification"),
    ("electra", "ElectraForTokenClassification"),
    ("modernbert", "ModernBertForSequenceClassification"),
    ("mpnet", "MPNetForMaskedLM"),
    ("deberta-v3", "DebertaV2ForSequenceClassification"),
    ("gpt2", "GPT2LMHeadModel"),
    ("llama", "LlamaForCausalLM"),
]


@pytest.mark.parametrize(("name", "head"), HEADS, ids=lambda each: each)
def test_a_head_gives_the_same_loss_logits_and_gradients(name, head):
    torch.manual_seed(0)
    model, keep = build(name, head).eval(), masks()
    keep[1] = torch.arange(11) < 5
    given = inputs(keep, **({"use_cache": False} if name in DECODERS else {}))
    if "Sequence" in head:
        labels = torch.tensor([0, 1, 1, 0, 1])
    else:
        labels = torch.where(keep, given["input_ids"] % 2, -100)
        if name in DECODERS:
            # What is predicted from a dropped token is no prediction.
            labels[:, 1:][~keep[:, :-1]] = -100
    padded = model(**given, labels=labels)
    wanted = gradients(model, padded.loss)
    mw.unpad(model)
    with mw.explain() as log:
        packed = model(**given, labels=labels)
    assert routes(log) == ["packed"]
    torch.testing.assert_close(packed.loss, padded.loss, rtol=1e-5, atol=1e-6)
    kept = keep if padded.logits.dim() == 3 else slice(None)
    torch.testing.assert_close(packed.logits[kept], padded.logits[kept], rtol=1e-4, atol=TOLERANCE)
    assert_equal_gradients(wanted, gradients(model, packed.loss))


def test_labels_that_count_padding_run_padded_with_the_same_loss():
    model, given = build("bert", "BertForMaskedLM").eval(), inputs(masks())
    expected = model(**given, labels=given["input_ids"]).loss
    mw.unpad(model)
    with mw.explain() as log, pytest.warns(PaddedRunWarning, match="labels of -100"):
        found = model(**given, labels=given["input_ids"]).loss
    assert torch.equal(found, expected)
    assert "labels count predictions of dropped tokens" in next(iter(log)).reason


PADDED = {
    "no attention_mask": {"attention_mask": None},
    "nothing is dropped": {"attention_mask": torch.ones(5, 11, dtype=torch.long)},
    "attention weights": {"output_attentions": True},
    "not one flag for each token": {"attention_mask": torch.ones(5, 1, 11, 11)},
}


@pytest.mark.parametrize("reason", PADDED)
def test_what_cannot_be_packed_runs_padded_and_says_why(reason):
    model, given = build("bert-eager").eval(), inputs(masks(), **PADDED[reason])
    expected = model(**given)
    mw.unpad(model)
    silent = reason in {"no attention_mask", "nothing is dropped"}
    with mw.explain() as log, nullcontext() if silent else pytest.warns(PaddedRunWarning, match=reason):
        found = model(**given)
    (call,) = log
    assert call.route == "padded"
    assert reason in call.reason
    assert torch.equal(found.last_hidden_state, expected.last_hidden_state)
    if reason == "attention weights":
        assert all(torch.equal(*pair) for pair in zip(found.attentions, expected.attentions, strict=True))


def test_a_cache_is_filled_by_a_packed_call_as_by_a_padded_one():
    keep = masks()
    model, given = build("llama").eval(), inputs(keep)
    expected = model(**given)
    mw.unpad(model)
    with mw.explain() as log:
        found = model(**given)
    assert routes(log) == ["packed"]
    tolerance = {"rtol": 1e-4, "atol": TOLERANCE}
    torch.testing.assert_close(found.last_hidden_state[keep], expected.last_hidden_state[keep], **tolerance)
    for mine, theirs in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
        torch.testing.assert_close(mine.keys.transpose(1, 2)[keep], theirs.keys.transpose(1, 2)[keep], **tolerance)
        torch.testing.assert_close(mine.values.transpose(1, 2)[keep], theirs.values.transpose(1, 2)[keep], **tolerance)


@pytest.mark.parametrize("return_dict", [True, False])
def test_hidden_states_come_out_padded_in_a_dict_or_a_tuple(return_dict):
    model, keep = build("bert").eval(), masks()
    given = inputs(keep, output_hidden_states=True, return_dict=return_dict)
    expected, found = model(**given), mw.unpad(model)(**given)
    assert type(found) is type(expected)
    states = (expected[2], found[2]) if not return_dict else (expected.hidden_states, found.hidden_states)
    assert len(states[1]) == len(states[0]) == 3
    for theirs, mine in zip(*states, strict=True):
        torch.testing.assert_close(mine[keep], theirs[keep], rtol=1e-4, atol=TOLERANCE)


def test_embeddings_and_token_types_and_positions_may_be_given():
    model, keep = build("bert").eval(), masks()
    given = {
        "inputs_embeds": torch.randn(*keep.shape, 32),
        "token_type_ids": torch.randint(0, 2, keep.shape),
        "position_ids": torch.arange(11).flip(0)[None],
        "attention_mask": keep,
    }
    expected, found = model(**given), mw.unpad(model)(**given)
    torch.testing.assert_close(found[0][keep], expected[0][keep], rtol=1e-4, atol=TOLERANCE)


def test_padding_never_leaks():
    model, keep = mw.unpad(build("bert").eval()), masks()
    given = inputs(keep)
    first = model(**given).last_hidden_state
    given["input_ids"] = torch.where(keep, given["input_ids"], 7)
    second = model(**given).last_hidden_state
    watched = keep.clone()
    watched[:, 0] = True
    assert torch.equal(first[keep], second[keep])
    assert torch.equal(first[~watched], second[~watched])


def test_dropout_is_drawn_in_training_and_the_mean_is_that_of_the_padded_model():
    settings = {**ENCODERS["bert"][2], "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    model = transformers.BertModel(config("Bert", **settings)).train()
    given, keep = inputs(masks()), masks()

    def draws():
        with torch.no_grad():
            return torch.stack([model(**given).last_hidden_state[keep] for _ in range(100)])

    padded, again = draws().mean(0), draws().mean(0)
    mw.unpad(model)
    packed = draws()
    assert not torch.equal(packed[0], packed[1])
    # How far two means of padded draws lie apart is how far a mean of packed draws may lie; 1216 places average out.
    by_chance = (again - padded).abs().mean()
    assert (packed.mean(0) - padded).abs().mean() < 1.25 * by_chance


def test_gradient_checkpointing_recomputes_the_packed_layers():
    model, keep = build("bert").train(), masks()
    given = inputs(keep)
    wanted = gradients(model, weighted(model(**given).last_hidden_state * keep[..., None]))
    mw.unpad(model).gradient_checkpointing_enable({"use_reentrant": False})
    with mw.explain() as log:
        out = model(**given).last_hidden_state
    assert routes(log) == ["packed"]
    assert_equal_gradients(wanted, gradients(model, weighted(out * keep[..., None])))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("name", ["bert", "mpnet", "deberta-v3"])
def test_a_copy_is_unpadded_too_and_stands_on_its_own(name, copied):
    keep = masks()
    keep[1] = torch.arange(11) < 5
    model, given = mw.unpad(build(name).eval()), inputs(keep)
    twin = copied(model)
    with torch.no_grad():
        expected = model(**given).last_hidden_state
        for parameter in model.parameters():
            parameter.zero_()
        with mw.explain() as log:
            found = twin(**given).last_hidden_state
    assert routes(log) == ["packed"]
    assert torch.equal(found, expected)
    mw.models.repad(twin)
    assert routes_of(model, given) == ["packed"]


def routes_of(model, given):
    with mw.explain() as log:
        model(**given)
    return routes(log)


def test_an_exception_inside_leaves_nothing_behind():
    model, given = mw.unpad(build("bert").eval()), inputs(masks())
    expected = model(**given).last_hidden_state
    broken = {**given, "input_ids": given["input_ids"] + 1000}
    with pytest.raises(IndexError):
        model(**broken)
    assert torch.equal(model(**given).last_hidden_state, expected)


def test_repad_brings_everything_back():
    model = build("bert", "BertForMaskedLM")
    names = [set(vars(module)) for module in model.modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    keys, implementation = list(model.state_dict()), model.config._attn_implementation
    mw.unpad(model)
    assert list(model.state_dict()) == keys
    mw.models.repad(model)
    assert [set(vars(module)) for module in model.modules()] == names
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert model.config._attn_implementation == implementation


def test_a_changed_implementation_runs_padded_and_says_so():
    model, given = mw.unpad(build("bert").eval()), inputs(masks())
    model.set_attn_implementation("eager")
    with mw.explain() as log, pytest.warns(PaddedRunWarning, match="repad"):
        model(**given)
    assert "changed after unpad" in next(iter(log)).reason


def test_forward_called_by_itself_is_packed_too_and_has_the_signature_it_had():
    model, keep = build("bert", "BertForMaskedLM").eval(), masks()
    signatures = [inspect.signature(each.forward) for each in (model, model.bert)]
    expected = model.bert.forward(**inputs(keep)).last_hidden_state
    mw.unpad(model)
    assert [inspect.signature(each.forward) for each in (model, model.bert)] == signatures
    with mw.explain() as log:
        found = model.bert.forward(**inputs(keep)).last_hidden_state
    assert routes(log) == ["packed"]
    torch.testing.assert_close(found[keep], expected[keep], rtol=1e-4, atol=TOLERANCE)


def test_a_compiled_model_runs_padded():
    model, given = build("bert").eval(), inputs(masks())
    expected = model(**given).last_hidden_state
    compiled = torch.compile(mw.unpad(model), backend="eager")
    with pytest.warns(PaddedRunWarning, match="compiled"):
        compiled(**given)
    torch.testing.assert_close(compiled(**given).last_hidden_state, expected, rtol=1e-5, atol=1e-6)


REFUSED = {
    "takes its mask from elsewhere": lambda: transformers.LayoutLMModel(config("LayoutLM", **ENCODERS["bert"][2])),
    "something other than attention": lambda: transformers.EsmModel(
        config("Esm", **ENCODERS["bert"][2], pad_token_id=1, mask_token_id=3, token_dropout=True)
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_packed_is_served_token_wise_and_equal(reason):
    model, keep = REFUSED[reason]().eval(), masks()
    keep[:, 0] = True
    given = inputs(keep)
    expected = model(**given)[0]
    mw.unpad(model)
    with mw.explain() as log:
        found = model(**given)[0]
    assert routes(log) == ["tokenwise"]
    torch.testing.assert_close(found[keep], expected[keep], rtol=1e-4, atol=TOLERANCE)


@pytest.mark.usefixtures("without_tokenwise")
@pytest.mark.parametrize("reason", REFUSED)
def test_a_model_that_cannot_be_served_is_refused_and_left_as_it_was(reason):
    model = REFUSED[reason]().train()
    implementation = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=reason) as refusal:
        mw.unpad(model)
    assert "write an adapter" in str(refusal.value)
    assert model.config._attn_implementation == implementation
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())
    assert model.training
