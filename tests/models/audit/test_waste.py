"""Waste is found at its module, with the rewrite measured on a copy; the loss of splits; what mw.optimize applies."""

import copy
import json
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import maskwise as mw
from maskwise.models.audit.batch import Batch, find_tokens
from maskwise.models.audit.denominator import find_denominator
from maskwise.models.audit.rewrites import Rewrite, compare, compare_training
from maskwise.models.audit.subject import preserved
from maskwise.models.audit.waste import profile
from tests.models.audit.cases import B, D, L, keep_mask

transformers = pytest.importorskip("transformers")
SMALL = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def ids(rows=4, length=20, lengths=(20, 4, 6, 2)):
    mask = mw.Mask.from_lengths(list(lengths), max_len=length).to_attention_mask()
    return {"input_ids": torch.randint(5, 90, (rows, length)), "attention_mask": mask}


def gpt2():
    sizes = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 2, "use_cache": False}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def by_cause(report):
    return {each.cause: each for each in report.waste}


def pruned(size=64, share=0.95):
    model = nn.Sequential(nn.Linear(size, 4 * size), nn.ReLU(), nn.Linear(4 * size, size)).eval()
    for layer in (model[0], model[2]):
        layer.weight.data[torch.rand_like(layer.weight) < share] = 0
    return model


# -- the cases ---------------------------------------------------------------------------------------------------------
def test_a_causal_model_with_60_percent_padding_wastes_it_and_unpad_was_measured():
    report = mw.audit(gpt2(), ids())
    assert report.leaks == ()
    waste = by_cause(report)
    assert report.masks[0][1].float().mean() == pytest.approx(0.4)
    # The positions of every module but attention's; which has pairs.
    assert waste["padding"].flops == pytest.approx(0.6, abs=0.1)
    rewrite = waste["padding"].rewrites[0]
    assert (rewrite.name, rewrite.mode, rewrite.agrees) == ("mw.unpad", "eval", True)
    assert rewrite.before > 0
    assert rewrite.after > 0
    assert "transformer.h.0.mlp.c_fc" in waste["padding"].modules
    assert set(waste["attention"].modules) == {"transformer.h.0.attn", "transformer.h.1.attn"}
    assert report.useful_tokens_per_second == pytest.approx(0.4 * report.tokens_per_second)


def test_the_unpadded_model_wastes_nothing_but_in_its_head():
    report = mw.audit(mw.unpad(gpt2()), ids())
    assert report.leaks == ()
    assert {each.path for each in report.profile.modules if each.wasted} == {"", "lm_head"}


def test_an_mlm_head_computes_logits_without_a_label():
    model = transformers.BertForMaskedLM(transformers.BertConfig(**{**SMALL, "vocab_size": 2000}))
    batch = {"input_ids": torch.randint(5, 90, (4, 20)), "attention_mask": torch.ones(4, 20, dtype=torch.long)}
    batch["labels"] = batch["input_ids"].where(torch.arange(20) % 10 == 0, -100)
    report = mw.audit(model, batch)
    waste = by_cause(report)["labels"]
    assert waste.modules == ("cls.predictions.decoder",)
    (rewrite,) = waste.rewrites
    assert (rewrite.name, rewrite.mode, rewrite.agrees) == ("mw.nn.kept_head", "train", True)
    head = next(each for each in report.profile.modules if each.path == "cls.predictions.decoder")
    assert head.wasted["labels"] == pytest.approx(0.9)
    assert head.own_flops == 2 * 4 * 20 * 32 * 2000


def test_a_pruned_mlp_multiplies_by_zeros():
    report = mw.audit(pruned(), torch.randn(32, 64))
    waste = by_cause(report)["weights"]
    assert set(waste.modules) == {"0", "2"}
    assert waste.flops == pytest.approx(0.95, abs=0.01)
    (rewrite,) = waste.rewrites
    assert (rewrite.name, rewrite.agrees) == ("mw.compress", True)


def test_the_compressed_mlp_has_no_finding():
    model = pruned(256, 0.99)
    sparse = [mw.nn.SparseLinear.from_linear(model[index], model[index].weight != 0) for index in (0, 2)]
    small = nn.Sequential(sparse[0], model[1], sparse[1])
    assert "weights" not in by_cause(mw.audit(small, torch.randn(64, 256)))


def test_zero_activations_are_reported_without_a_rewrite():
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
    nn.init.constant_(model[0].bias, -3.0)
    report = mw.audit(model, torch.randn(512, 8))
    costs = {each.path: each for each in report.profile.modules}
    assert costs["2"].wasted["activations"] > 0.9
    assert costs["2"].useful == 1.0
    assert report.ok


def test_a_clean_modern_bert_has_no_finding():
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    model = transformers.ModernBertModel(transformers.ModernBertConfig(**SMALL, **special))
    padded = mw.audit(model, ids())
    assert padded.leaks == ()
    full = mw.audit(mw.unpad(model), ids())
    assert full.ok, str(full)
    assert "no findings" in str(full)


def test_where_unpad_does_not_apply_a_token_budget_is_measured():
    model = nn.Sequential(nn.Embedding(99, 32), nn.Linear(32, 32))
    keep = mw.Mask.from_lengths([20, 4, 6, 2]).to_bool()
    waste = by_cause(mw.audit(model, torch.randint(99, (4, 20)), mask=keep))["padding"]
    first, second = waste.rewrites
    assert first.name == "mw.unpad"
    assert first.before is None
    assert "no adapter serves" in first.note
    assert (second.name, second.agrees) == ("mw.TokenBudgetSampler", True)


def test_a_rewrite_pays_only_with_the_same_results():
    assert Rewrite("mw.unpad", "", "eval", 2.0, 1.0, 1e-6).pays
    assert not Rewrite("mw.unpad", "", "eval", 2.0, 1.0, 0.1).pays
    assert not Rewrite("mw.unpad", "", "eval", 2.0, 1.99, 0.0).pays
    assert not Rewrite("mw.unpad", "", note="no adapter serves it").pays


def test_flops_of_a_module_are_those_of_the_modules_in_it():
    model = transformers.BertModel(transformers.BertConfig(**SMALL))
    batch = Batch.of(model, ids())
    with preserved(model, None) as subject:
        measured = profile(subject, batch, find_tokens(batch, None))
    costs = {each.path: each for each in measured.modules}
    assert costs["encoder.layer.0.intermediate.dense"].own_flops == 2 * 80 * 32 * 64
    # Scores and values, two heads.
    assert costs["encoder.layer.0.attention.self"].own_flops == 2 * 2 * 4 * 2 * 20 * 20 * 16
    assert costs[""].flops == measured.flops
    assert costs["encoder.layer.0.intermediate.dense"].wasted == {"padding": pytest.approx(0.6)}


def test_projections_inside_of_attention_are_positions_and_not_pairs():
    model = nn.MultiheadAttention(32, 2, batch_first=True)

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = model

        def forward(self, x, key_padding_mask):
            return self.attention(x, x, x, key_padding_mask=key_padding_mask, need_weights=False)[0]

    wrapped = Attends()
    batch = Batch.of(wrapped, (torch.randn(4, 40, 32), mw.Mask.from_lengths([40, 5, 8, 3]).to_key_padding()))
    with preserved(wrapped, None) as subject:
        measured = profile(subject, batch, find_tokens(batch, None))
    cost = next(each for each in measured.modules if each.path == "attention")
    projections, pairs = 4 * 2 * 160 * 32 * 32, 2 * 2 * 4 * 2 * 40 * 40 * 16
    assert cost.own_flops == projections + pairs
    assert cost.wasted["padding"] == pytest.approx((1 - 56 / 160) * projections / (projections + pairs))
    kept = (40**2 + 5**2 + 8**2 + 3**2) / (4 * 40**2)
    assert cost.wasted["attention"] == pytest.approx((1 - kept) * pairs / (projections + pairs))


# -- denominator -------------------------------------------------------------------------------------------------------
def labelled():
    x, keep = torch.randn(B, L, D), keep_mask()
    return {"input": x, "labels": torch.randint(3, (B, L)).masked_fill(~keep, -100)}


def cross_entropy(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def with_window(output, batch, denominator=None):
    logits, labels = output.flatten(0, 1), batch["labels"].flatten()
    return mw.loss(F.cross_entropy, logits, labels, labels != -100, denominator=denominator)


def denominator_of(model, batch, loss):
    bound = Batch.of(model, batch)
    with preserved(model, loss) as subject:
        return find_denominator(subject, bound, find_tokens(bound, None))


def test_a_mean_of_means_over_tokens_depends_on_the_split():
    found = denominator_of(nn.Linear(D, 3), labelled(), cross_entropy)
    assert (found.invariant, found.weighting, found.splits) == (False, "labels", (2, 4))
    assert found.error > 1e-3
    assert found.gradient > 1e-3
    assert "mw.accumulate" in found.fix


def test_a_loss_with_a_window_does_not():
    found = denominator_of(nn.Linear(D, 3), labelled(), with_window)
    assert (found.invariant, found.weighting, found.fix) == (True, "window", "")


def test_a_mean_over_rows_does_not():
    batch = {"input": torch.randn(4, D), "labels": torch.randint(3, (4,))}
    assert denominator_of(nn.Linear(D, 3), batch, lambda out, b: F.cross_entropy(out, b["labels"])).invariant


def test_an_odd_number_of_rows_is_split_too():
    x, keep = torch.randn(9, L, D), mw.Mask.from_lengths([12, 5, 9, 3, 7, 1, 4, 8, 2]).to_bool()
    batch = {"input": x, "labels": torch.randint(3, (9, L)).masked_fill(~keep, -100)}
    found = denominator_of(nn.Linear(D, 3), batch, cross_entropy)
    assert (found.invariant, found.weighting, found.splits) == (False, "labels", (2, 4, 8))


def test_a_sum_is_named():
    batch = {"input": torch.randn(4, D), "labels": torch.randint(3, (4,))}
    loss = lambda out, b: F.cross_entropy(out, b["labels"], reduction="sum")
    found = denominator_of(nn.Linear(D, 3), batch, loss)
    assert (found.invariant, found.weighting) == (False, "sum")
    assert "window.scale" in found.fix


def test_without_a_loss_there_is_nothing_to_split():
    assert mw.audit(nn.Linear(D, 3), torch.randn(4, D)).denominator is None


# -- optimize ----------------------------------------------------------------------------------------------------------
def test_optimize_unpads_a_copy_that_agrees():
    model = gpt2().eval()
    # A twentieth of the tokens is real: more than the noise of a busy machine.
    batch = ids(32, 128, (128, *[4] * 31))
    better, report = mw.optimize(model, batch)
    assert [step.name for step in report.steps] == ["mw.unpad"], str(report)
    keep = batch["attention_mask"].bool()
    torch.testing.assert_close(better(**batch).logits[keep], model(**batch).logits[keep], rtol=1e-4, atol=1e-4)
    assert not hasattr(model, "_maskwise_adapter")
    assert json.loads(report.to_json())["steps"][0]["name"] == "mw.unpad"
    assert "optimized" in str(report)


def test_optimize_compresses_in_evaluation():
    model = pruned(256, 0.97)
    x = torch.randn(128, 256)
    small, report = mw.optimize(model, x)
    torch.testing.assert_close(small(x), model(x), rtol=1e-4, atol=1e-4)
    assert {step.name for step in (*report.steps, *report.refused)} == {"mw.compress"}
    assert report.mode == "eval"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gradients_are_compared_without_dropout(attention):
    config = transformers.BertConfig(**SMALL, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)
    model = transformers.BertForMaskedLM._from_config(config, attn_implementation=attention).train()
    batch = ids()
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    found = Batch.of(model, batch)
    with preserved(model, None) as subject:
        other = subject.of(mw.unpad(copy.deepcopy(model)))
        rewrite = compare_training("mw.unpad", "", subject, other, found, find_tokens(found, None))
    assert (rewrite.mode, rewrite.agrees) == ("train", True)


def test_gradients_of_kept_outputs_are_compared_without_a_loss():
    model = transformers.BertModel(transformers.BertConfig(**SMALL)).train()
    found = Batch.of(model, ids())
    with preserved(model, None) as subject:
        other = subject.of(mw.unpad(copy.deepcopy(model)))
        rewrite = compare_training("mw.unpad", "", subject, other, found, find_tokens(found, None))
        with torch.no_grad():
            other.model.encoder.layer[0].output.dense.weight.mul_(3.0)
        wrong = compare_training("mw.unpad", "", subject, other, found, find_tokens(found, None))
    assert (rewrite.mode, rewrite.agrees, wrong.agrees) == ("train", True, False)


def test_half_precision_agrees_within_its_rounding():
    model = gpt2().to(torch.bfloat16).eval()
    found = Batch.of(model, ids())
    with preserved(model, None) as subject:
        rewrite = compare(
            "mw.unpad", "", subject, subject.of(mw.unpad(copy.deepcopy(model))), found, find_tokens(found, None)
        )
    assert rewrite.agrees
    assert rewrite.tolerance > Rewrite("", "").tolerance


def test_optimize_in_training_compares_gradients():
    model = gpt2().train()
    batch = ids(4, 64, (64, 8, 6, 4))
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    better, report = mw.optimize(model, batch)
    assert report.mode == "train"
    assert better.training
    assert report.difference < 1e-3
    assert {step.mode for step in report.steps} <= {"train"}


def test_optimize_tries_the_attention_of_maskwise_where_a_mask_drops_pairs():
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.MistralConfig(vocab_size=50, sliding_window=16, num_key_value_heads=4, **sizes)
    model = transformers.MistralModel(config).eval()
    batch = {"input_ids": torch.randint(50, (2, 512)), "attention_mask": torch.ones(2, 512, dtype=torch.long)}
    better, report = mw.optimize(model, batch)
    tried = {step.name: step for step in (*report.steps, *report.refused)}
    assert tried.keys() == {"mw.attention"}
    assert tried["mw.attention"].agrees
    assert tried["mw.attention"].line == 'model.set_attn_implementation("maskwise")'
    used = "maskwise" if report.steps else "sdpa"
    assert (better.config._attn_implementation, model.config._attn_implementation) == (used, "sdpa")
    torch.testing.assert_close(better(**batch)[0], model(**batch)[0], rtol=1e-4, atol=1e-4)


def test_optimize_takes_a_mask_that_the_batch_does_not_have():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 1).eval()
    x, keep = torch.randn(4, 16, 32), mw.Mask.from_lengths([16, 2, 2, 2])
    _, report = mw.optimize(model, x, mask=keep)
    assert "mw.unpad" in {step.name for step in (*report.steps, *report.refused)}
    assert mw.optimize(model, x)[1].refused == ()


def test_optimize_leaves_what_does_not_pay():
    model = nn.Linear(D, 3).eval()
    same, report = mw.optimize(model, torch.randn(4, D))
    assert (report.steps, report.refused, report.speedup) == ((), (), 1.0)
    x = torch.randn(2, D)
    assert torch.equal(same(x), model(x))
    assert same is not model


# -- real models -------------------------------------------------------------------------------------------------------
def audio():
    mask = torch.ones(2, 400, dtype=torch.long)
    mask[0, 230:] = 0
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    convolutions = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 16}
    masking = {"mask_time_prob": 0.0, "mask_feature_prob": 0.0, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0}
    config = transformers.Wav2Vec2Config(**sizes, **convolutions, **masking, feat_extract_norm="group")
    return transformers.Wav2Vec2Model(config), {"input_values": torch.randn(2, 400) * mask, "attention_mask": mask}


def bert():
    return transformers.BertModel(transformers.BertConfig(**SMALL)), ids()


def t5():
    sizes = {"vocab_size": 99, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    labels = torch.randint(5, 90, (4, 7))
    labels[1:, 4:] = -100
    return transformers.T5ForConditionalGeneration(config), {**ids(), "labels": labels}


def vit():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8)
    return transformers.ViTModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def whisper():
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    sizes = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "num_mel_bins": 8}
    mask = torch.ones(2, 100, dtype=torch.long)
    mask[0, 60:] = 0
    model = WhisperEncoder(transformers.WhisperConfig(**sizes, max_source_positions=50))
    return model, {"input_features": torch.randn(2, 8, 100), "attention_mask": mask}


#: What is known of each: Wav2Vec2's group norm runs over time, and Whisper's encoder ignores its mask.
REAL = {
    "bert": (bert, []),
    "gpt2": (lambda: (gpt2(), ids()), []),
    "t5": (t5, []),
    "vit": (vit, []),
    "whisper": (whisper, [("conv1", "convolution over padding")]),
    "wav2vec2": (audio, [("feature_extractor.conv_layers.0.layer_norm", "GroupNorm over padding")]),
}


@pytest.mark.parametrize("name", REAL)
def test_models_of_transformers_are_audited(name):
    build, expected = REAL[name]
    model, batch = build()
    report = mw.audit(model, batch)
    assert [(leak.module, leak.cause) for leak in report.leaks if not leak.only_nan] == expected
    assert report.profile.flops > 0
    assert max(map(len, str(report).splitlines())) <= 80
    assert json.loads(report.to_json())["model"] == type(model).__name__


def test_an_audit_takes_few_passes():
    model, calls = transformers.BertModel(transformers.BertConfig(**SMALL)), []
    mask = mw.Mask.from_lengths(torch.arange(32) % 20 + 1, max_len=20).to_attention_mask()
    rows = {"input_ids": torch.randint(5, 90, (32, 20)), "attention_mask": mask}

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids, attention_mask):
            calls.append((len(input_ids), torch.is_grad_enabled()))
            return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    # The fewest rounds, which is what a model of seconds gets.
    with patch("maskwise.models.audit.rewrites.BUDGET", 0.0):
        mw.audit(Counted(), rows)
    # A forward and backward pass counts as three forward passes, and a few rows as their share.
    cost = sum((size / 32) * (3 if grad else 1) for size, grad in calls) / 3
    assert cost <= 20, calls
