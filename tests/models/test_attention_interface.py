"""``attn_implementation="maskwise"``: as eager attention does, padded and padding-free, with gradients, in graphs."""

import copy
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", reason="the extra maskwise[transformers] is not installed")

import transformers
from transformers import DataCollatorWithFlattening, masking_utils

import maskwise as mw
from maskwise.models.hugging_face.interface import Pattern, attention_forward, attention_mask

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "max_position_embeddings": 2048,
}
SHARED = {**SIZES, "num_key_value_heads": 2}
DECODERS = {
    "llama": lambda: transformers.LlamaConfig(**SHARED),
    "mistral, a window": lambda: transformers.MistralConfig(**SHARED, sliding_window=3),
    "gemma2, a soft cap": lambda: transformers.Gemma2Config(
        **SHARED, head_dim=8, sliding_window=3, attn_logit_softcapping=2.0
    ),
    "gpt-oss, sinks": lambda: transformers.GptOssConfig(
        **SHARED, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=3
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=99, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    ),
}
ENCODERS = {
    "bert": lambda: transformers.BertConfig(**SIZES),
    "modernbert, windows": lambda: transformers.ModernBertConfig(
        **SIZES, local_attention=4, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2
    ),
}
LENGTHS = (12, 7, 4)


def both(config, auto=None):
    """The model with eager attention, and the same with ours."""
    auto = auto or transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    eager = auto.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    ours = auto.from_config(copy.deepcopy(config), attn_implementation="maskwise").eval()
    with torch.no_grad():
        for parameter in eager.parameters():
            # Weights so large that a wrong mask shows.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    ours.load_state_dict(eager.state_dict())
    assert ours.config._attn_implementation == "maskwise"
    return eager, ours


def batch(side, lengths=LENGTHS):
    keep = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    keep = keep.flip(1) if side == "left" else keep
    ids = torch.randint(3, 99, keep.shape, generator=torch.Generator().manual_seed(1))
    positions = (keep.long().cumsum(1) - 1).clamp(min=0)
    return keep, {"input_ids": ids, "attention_mask": keep.long(), "position_ids": positions}


def gradients(model, outputs, keep=None):
    model.zero_grad()
    rows = outputs if keep is None else outputs[keep]
    (rows * torch.linspace(0.5, 1.5, rows.numel()).reshape(rows.shape)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, wanted, tolerance=2e-4):
    scale = max(float(each.abs().max()) for each in wanted.values())
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        # Sums of float32 in another order.
        torch.testing.assert_close(found[name] / scale, value / scale, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_a_padded_batch_gives_what_eager_attention_gives_with_its_gradients(name, side):
    is_decoder = name in DECODERS
    eager, ours = both((DECODERS | ENCODERS)[name](), None if is_decoder else transformers.AutoModel)
    keep, given = batch(side)
    options = {"use_cache": False} if is_decoder else {}
    wanted, found = (model(**given, **options)[0] for model in (eager, ours))
    torch.testing.assert_close(found[keep], wanted[keep], rtol=1e-4, atol=1e-4)
    assert_same(gradients(ours, found, keep), gradients(eager, wanted, keep))


@pytest.mark.parametrize("spelling", ["position_ids", "cu_seq_lens", "seq_idx"])
@pytest.mark.parametrize("name", DECODERS)
def test_flattened_sequences_give_what_the_padded_batch_gives_with_its_gradients(name, spelling):
    eager, ours = both(DECODERS[name]())
    keep, given = batch("right")
    wanted = eager(**given, use_cache=False).logits
    features = [{"input_ids": row[:n].tolist()} for row, n in zip(given["input_ids"], LENGTHS, strict=True)]
    collate = DataCollatorWithFlattening(
        return_tensors="pt", return_flash_attn_kwargs=spelling == "cu_seq_lens", return_seq_idx=spelling == "seq_idx"
    )
    flat = dict(collate(features))
    flat.pop("labels")
    found = ours(**flat, use_cache=False).logits
    torch.testing.assert_close(found[0], wanted[keep], rtol=1e-4, atol=1e-4)
    assert_same(gradients(ours, found), gradients(eager, wanted, keep))


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_take_flattened_sequences_as_sentence_transformers_makes_them(name):
    eager, ours = both(ENCODERS[name](), transformers.AutoModel)
    keep, given = batch("right")
    takes = {"position_ids"} if name == "bert" else set()
    wanted = eager(**{key: value for key, value in given.items() if key in takes | {"input_ids", "attention_mask"}})[0]
    features = [{"input_ids": row[:n].tolist()} for row, n in zip(given["input_ids"], LENGTHS, strict=True)]
    flat = dict(DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True)(features))
    flat.pop("labels")
    found = ours(**flat)[0]
    torch.testing.assert_close(found[0], wanted[keep], rtol=1e-4, atol=1e-4)
    assert_same(gradients(ours, found), gradients(eager, wanted, keep))


@pytest.mark.parametrize("name", ["llama", "mistral, a window"])
def test_rows_that_each_hold_several_sequences_are_taken_as_trl_packs_them(name):
    # Two rows of the same length, and positions that restart with each sequence: no mask, and no other boundary.
    eager, ours = both(DECODERS[name]())
    rows = torch.randint(3, 99, (2, 11), generator=torch.Generator().manual_seed(1))
    lengths = ((4, 7), (6, 5))
    positions = torch.stack([torch.cat([torch.arange(n) for n in each]) for each in lengths])
    found = ours(input_ids=rows, position_ids=positions, use_cache=False).logits
    parts = [part for row, each in zip(rows, lengths, strict=True) for part in row.split(list(each))]
    wanted = torch.cat([eager(input_ids=part[None], use_cache=False).logits[0] for part in parts])
    torch.testing.assert_close(found.flatten(0, 1), wanted, rtol=1e-4, atol=1e-4)
    assert_same(gradients(ours, found.flatten(0, 1)), gradients(eager, wanted))


def test_a_loss_of_flattened_sequences_is_that_of_the_padded_batch():
    eager, ours = both(DECODERS["llama"]())
    keep, given = batch("right")
    wanted = eager(**given, labels=given["input_ids"].masked_fill(~keep, -100)).loss
    features = [{"input_ids": row[:n].tolist()} for row, n in zip(given["input_ids"], LENGTHS, strict=True)]
    found = ours.train()(**DataCollatorWithFlattening(return_tensors="pt")(features)).loss
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True}, {"num_beams": 3}], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral, a window", "gemma2, a soft cap"])
def test_generation_gives_the_same_tokens(name, options, cache):
    eager, ours = both(DECODERS[name]())
    _, given = batch("left")
    given.pop("position_ids")
    if cache is not None:
        options = {**options, "cache_implementation": cache}
    tokens = []
    for model in (eager, ours):
        torch.manual_seed(0)
        tokens.append(model.generate(**given, max_new_tokens=6, **options))
    assert torch.equal(*tokens)


class NoPairs(TorchDispatchMode):
    """Collects tensors with two dims of the full length."""

    def __init__(self, length):
        super().__init__()
        self.length, self.found = length, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, torch.Tensor) and list(each.shape).count(self.length) > 1:
                self.found.append((str(func), tuple(each.shape)))
        return out


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_no_tensor_of_all_pairs_is_made(name):
    # Long enough for blocks to pay: small calls may make all pairs.
    length = 1201
    _, ours = both((DECODERS | ENCODERS)[name](), None if name == "llama" else transformers.AutoModel)
    _, given = batch("right", (length, 50))
    with NoPairs(length) as seen:
        ours(**given)[0].sum().backward()
    assert seen.found == []
    if name == "llama":
        flat = {key: value[:, :length] for key, value in given.items() if key != "attention_mask"}
        flat["position_ids"] = torch.cat([torch.arange(100), torch.arange(length - 100)])[None].expand(2, -1)
        with NoPairs(length) as seen:
            ours(**flat, use_cache=False)[0].sum().backward()
        assert seen.found == []


def ragged(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 20, (int(torch.randint(2, 6, (), generator=generator)),), generator=generator).tolist()
    tokens = sum(lengths)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return {
        "input_ids": torch.randint(3, 99, (1, tokens), generator=generator),
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


@pytest.mark.parametrize("name", ["llama", "mistral, a window"])
@pytest.mark.parametrize("with_ends", [True, False], ids=["cu_seq_lens", "position_ids"])
def test_ragged_batches_compile_twice_at_the_most_and_without_a_break(name, with_ends):
    _, ours = both(DECODERS[name]())
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(ours, fullgraph=True, backend=backend, dynamic=True)
    for seed in range(20):
        given = ragged(seed)
        if not with_ends:
            given = {key: given[key] for key in ("input_ids", "position_ids")}
        else:
            # A Python number would be a constant of the graph.
            given = {key: value for key, value in given.items() if not key.startswith("max")}
        wanted, found = ours(**given, use_cache=False).logits, compiled(**given, use_cache=False).logits
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert len(graphs) <= 2


@pytest.mark.parametrize("name", ["llama", "gemma2, a soft cap"])
def test_a_compiled_training_step_has_the_gradients_of_the_plain_one(name):
    _, ours = both(DECODERS[name]())
    torch.compiler.reset()
    given = {key: value for key, value in ragged(3).items() if not key.startswith("max")}
    wanted = gradients(ours, ours(**given, use_cache=False).logits)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=True)
    assert_same(gradients(ours, compiled(**given, use_cache=False).logits), wanted)


def test_dropout_in_a_graph_is_drawn_alike_in_both_passes():
    torch.compiler.reset()
    q, k, v = (torch.randn(1, 2, 6, 8, dtype=torch.float64) for _ in range(3))
    v.requires_grad_()
    module = torch.nn.Module()
    module.is_causal = False

    def call(v):
        return attention_forward(module, q, k, v, None, dropout=0.5)[0]

    out = torch.compile(call, fullgraph=True, backend="aot_eager")(v)
    # The result is linear in the values, so that their product with its gradient is its sum, of the same draw.
    (gradient,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close((gradient * v).sum(), out.sum())


MASKS = {
    "causal": lambda: masking_utils.causal_mask_function,
    "bidirectional": lambda: masking_utils.bidirectional_mask_function,
    "window": lambda: masking_utils.sliding_window_causal_mask_function(3),
    "two-sided window": lambda: masking_utils.sliding_window_bidirectional_mask_function(2),
    "sequences": lambda: masking_utils.and_masks(
        masking_utils.causal_mask_function,
        masking_utils.packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1, 1]])),
    ),
    "a window and sequences": lambda: masking_utils.and_masks(
        masking_utils.sliding_window_causal_mask_function(2),
        masking_utils.packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1, 1]])),
    ),
    "chunks": lambda: masking_utils.chunked_causal_mask_function(3, torch.tensor([0, 0])),
    "blocks of images": lambda: masking_utils.or_masks(
        masking_utils.causal_mask_function,
        masking_utils.blockwise_overlay(torch.tensor([[-1, 0, 0, 0, -1, 1, 1], [-1, -1, -1, 2, 2, 2, -1]])),
    ),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize("kind", MASKS)
def test_masks_keep_what_those_of_transformers_keep(kind, offset, padded):
    sequences = "sequences" in kind
    if offset and (sequences or "blocks" in kind):
        offset = 0
    queries, keys = 7 - offset, 7
    keep = torch.ones(2, keys, dtype=torch.bool)
    if padded:
        keep[1, 5:] = False
    if sequences:
        keep[:] = True
    given = {
        "batch_size": 2,
        "q_length": queries,
        "kv_length": keys,
        "q_offset": offset,
        "mask_function": MASKS[kind](),
        "attention_mask": keep,
        "device": "cpu",
    }
    wanted = masking_utils.sdpa_mask(**given, allow_is_causal_skip=False).expand(2, 1, queries, keys)
    found = attention_mask(**given, config=None)
    assert isinstance(found, Pattern) == (kind not in {"chunks", "blocks of images"})
    # Values that name their key, and queries that weigh all alike: the result is the mean of what is kept.
    q, k = torch.zeros(2, 1, queries, 8), torch.zeros(2, 1, keys, 8)
    v = torch.eye(keys, 8).expand(2, 1, keys, 8)
    if sequences and isinstance(found, Pattern):
        found = Pattern(None, found.segments, found.is_causal, found.left, found.right)
    out, _ = attention_forward(torch.nn.Module(), q, k, v, found)
    assert torch.equal(out.transpose(1, 2)[..., :keys] > 0, wanted)


@pytest.mark.parametrize(
    "order", ["maskwise.models.hugging_face, transformers", "transformers, maskwise.models.hugging_face"]
)
def test_the_name_is_known_in_either_order_of_imports(order):
    code = (
        f"import {order}\n"
        "from transformers import AttentionInterface, BertConfig, BertModel\n"
        "sizes = {'vocab_size': 9, 'hidden_size': 8, 'intermediate_size': 8, 'num_attention_heads': 2}\n"
        "config = BertConfig(**sizes, num_hidden_layers=1)\n"
        "config._attn_implementation = 'maskwise'\n"
        "assert BertModel(config).config._attn_implementation == 'maskwise'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_maskwise_models_imports_no_transformers():
    code = "import maskwise.models, sys; assert 'transformers' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_unpad_serves_it_token_wise_beside_a_packed_model_of_the_same_class():
    padded, ours = both(ENCODERS["bert"](), transformers.AutoModel)
    keep = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]])
    given = {"input_ids": torch.randint(1, 9, keep.shape), "attention_mask": keep}
    packed = copy.deepcopy(padded)
    packed.set_attn_implementation("sdpa")
    with torch.no_grad():
        wanted = padded(**given).last_hidden_state
        # Either may be called first.
        for model, route in ((packed, "packed"), (ours, "tokenwise"), (packed, "packed")):
            mw.unpad(model)
            with mw.explain() as log:
                found = model(**given).last_hidden_state
            assert [call.route for call in log if call.op.startswith("unpad")] == [route]
            torch.testing.assert_close(found[keep.bool()], wanted[keep.bool()], rtol=1e-4, atol=1e-5)
