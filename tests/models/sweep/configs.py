"""Small configs of every kind: the class's own defaults, with every size in them made small."""

import dataclasses

from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCABULARY, HIDDEN, LAYERS, HEADS, INNER, HEAD = 99, 32, 2, 4, 64, 8
LIMIT = 16
"""The longest sequence. The batch keeps more tokens than this, so that packed positions must be those of each row."""
WINDOW = 4
"""Of sliding attention, and chunks: less than a sequence, so that it hides something."""
SPECIAL = 20
"""Ids below this are special tokens; the batch draws its own from above."""

# What an attribute is set to, where the config has it and it is not None.
GROUPS = [
    (VOCABULARY, "vocab_size text_vocab_size vocab_size_per_layer_input"),
    (
        HIDDEN,
        "hidden_size n_embd d_model dim embed_dim emb_dim embedding_size word_embed_proj_dim projection_dim "
        "out_hidden_size encoder_hidden_size decoder_hidden_size text_embed_dim hidden_dim model_dim n_embed "
        "text_hidden_size pooler_hidden_size output_hidden_size projector_hidden_size cross_attention_hidden_size "
        "text_config_hidden_size mm_hidden_size vision_hidden_size audio_hidden_size lru_width embedding_dim "
        "pooler_output_size backbone_hidden_size qformer_hidden_size output_dim text_dim mm_embed_dim",
    ),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth num_encoder_layers "
        "num_decoder_layers num_hidden_layers_encoder decoder_num_layers memory_attention_num_layers n_enc_layers "
        "n_dec_layers num_layer local_layers",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
        "decoder_num_attention_heads num_attention_heads_encoder attention_heads",
    ),
    (
        INNER,
        "intermediate_size n_inner encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff d_inner mlp_dim ffn_hidden_size "
        "shared_expert_intermediate_size shared_intermediate_size intermediate_size_mlp intermediate_dim "
        "ffn_intermediate_size expert_ffn_hidden_size ff_dim adapter_attn_dim",
    ),
    (
        HEAD,
        "head_dim d_kv attention_head_size v_head_dim attention_head_dim kv_channels global_head_dim swa_head_dim "
        "swa_v_head_dim d_head cross_attention_head_dim query_pre_attn_scalar qk_head_dim",
    ),
    (
        LIMIT,
        "max_position_embeddings n_positions max_seq_len max_sequence_length max_seq_length max_target_positions "
        "max_encoder_position_embeddings max_decoder_position_embeddings",
    ),
    (WINDOW, "sliding_window attention_chunk_size window_size attention_window_size"),
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts num_routed_experts"),
    (0, "num_kv_shared_layers"),
    (
        1,
        "n_group num_expert_group topk_group n_shared_experts num_shared_experts first_k_dense_replace "
        "decoder_sparse_step moe_layer_start_index max_window_layers",
    ),
    (
        2,
        "num_key_value_heads num_kv_heads n_kv_heads num_global_key_value_heads num_experts_per_tok moe_topk moe_k "
        "top_k_experts num_experts_per_token type_vocab_size spatial_merge_size",
    ),
    (4, "qk_rope_head_dim qk_nope_head_dim rotary_dim"),
    (8, "local_attention patch_size hidden_size_per_layer_input"),
    (16, "moe_intermediate_size expert_dim moe_shared_expert_intermediate_size kv_lora_rank q_lora_rank num_patches"),
    (32, "image_size num_hash_buckets"),
]
SIZES = {name: value for value, names in GROUPS for name in names.split()}
LAYER_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "indexer_types", "attention_types")
"""One entry for each layer; a few of them, with every entry that the default has."""


def small(kind, **overrides):
    """A small config of this kind; the overrides of its table come last."""
    config = shrink(CONFIG_MAPPING[kind](), {**OVERRIDES.get(kind, {}), **overrides})
    # The default of experts, a grouped product, knows no float64.
    config._experts_implementation = "eager"
    return config


def shrink(default, overrides=None):
    """The same class of config, small."""
    given = dict(overrides or {})
    names = [field.name for field in dataclasses.fields(default)]
    values = {}
    for name in names:
        value = getattr(default, name, None)
        if isinstance(value, PreTrainedConfig):
            nested = {**BY_CLASS.get(type(value).__name__, {}), **given.pop(name, {})}
            values[name] = shrink(value, nested)
        elif name in SIZES and value is not None and not isinstance(value, (list, tuple, dict)):
            values[name] = SIZES[name]
    values.update(_layers(default, values))
    values.update(_ids(default, names))
    values.update(BY_CLASS.get(type(default).__name__, {}))
    values.update(given)
    return type(default)(**values)


def _layers(default, values):
    """The lists with an entry for each layer, short but with every kind of layer; and how many layers that makes."""
    found = {}
    for name in LAYER_LISTS:
        entries = getattr(default, name, None)
        if isinstance(entries, (list, tuple)) and entries and name in {f.name for f in dataclasses.fields(default)}:
            found[name] = list(dict.fromkeys(entries))
    if not found:
        return {}
    count = max(LAYERS, *(len(each) for each in found.values()))
    lists = {name: (each * count)[:count] for name, each in found.items()}
    sizes = {name: count for name in ("num_hidden_layers", "n_layer", "num_layers") if name in values}
    return {**lists, **sizes}


def _ids(default, names):
    """Special tokens, each with an id of its own that the small vocabulary has."""
    found = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} if "vocab_size" in names else {}
    free = iter(range(3, SPECIAL))
    for name in names:
        value = getattr(default, name, None)
        is_id = name.endswith(("_token_id", "_token_index")) and not isinstance(value, bool)
        if is_id and isinstance(value, int) and name not in {"pad_token_id", "bos_token_id", "eos_token_id"}:
            found[name] = next(free)
    return {name: value for name, value in found.items() if name in names}


# By the name of a config's class, wherever it stands: what the general rule does not know.
BY_CLASS = {
    "Lfm2Config": {"layer_types": ["conv", "full_attention"]},
}
# By kind, for the outermost config.
OVERRIDES = {}
