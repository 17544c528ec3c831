"""Small configs of every kind: the class's own defaults, with every size in them made small."""

import dataclasses

from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCABULARY, HIDDEN, LAYERS, HEADS, INNER, HEAD = 99, 32, 2, 4, 64, 8
LIMIT = 16
"""The longest sequence. The batch keeps more tokens than this, so that packed positions must be those of each row."""
EOS = 2
WINDOW = 4
"""Of sliding attention, and chunks: less than a sequence, so that it hides something."""
SPECIAL = 20
"""Ids below this are special tokens; the batch draws its own from above."""

# What an attribute is set to, where the config has it and it is not None.
GROUPS = [
    (
        VOCABULARY,
        "vocab_size text_vocab_size vocab_size_per_layer_input shape_vocab_size pronunciation_vocab_size "
        "unit_hifi_gan_vocab_size",
    ),
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
        HEAD,
        "mamba_n_heads mamba_d_head mamba_num_heads mamba_head_dim linear_key_head_dim linear_value_head_dim "
        "linear_head_dim index_head_dim",
    ),
    (16, "mamba_d_state ssm_state_size"),
    (INNER, "mamba_d_ssm"),
    (1, "mamba_n_groups n_groups"),
    (2, "linear_num_key_heads linear_num_value_heads linear_num_heads index_n_heads index_topk"),
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
    (32, "image_size num_hash_buckets encoder_hash_byte_group_vocab"),
]
SIZES = {name: value for value, names in GROUPS for name in names.split()}
REQUIRED = {
    "vocab_size",
    "head_dim",
    "num_key_value_heads",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
}
"""Set also where the default is None."""
LATENT = {"num_key_value_heads": HEADS, "head_dim": HEAD // 2}
LAYER_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "indexer_types")
"""One entry for each layer; a few of them, with every entry that the default has."""


def small(kind, wanted=None, **more):
    """A small config of this kind, or of the part of it that a class of its own has (the text of Llama 4, say)."""
    config = shrink(CONFIG_MAPPING[kind](), {**OVERRIDES.get(kind, {}), **more})
    if wanted is not None and not isinstance(config, wanted):
        config = next((each for each in vars(config).values() if isinstance(each, wanted)), config)
    # The default of experts, a grouped product, knows no float64.
    config._experts_implementation = "eager"
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    return config


def shrink(default, overrides=None):
    """The same class of config, small."""
    given = {**BY_CLASS.get(type(default).__name__, {}), **(overrides or {})}
    fields = {field.name: _value(default, field) for field in dataclasses.fields(default)}
    # What the whole sets in its parts (a decoder that attends across, say) stays.
    usual = {field.name: field.default for field in dataclasses.fields(default)}
    values = {name: value for name, value in fields.items() if isinstance(value, bool) and value != usual[name]}
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            values[name] = shrink(value, given.pop(name, None))
        elif name in SIZES and (value is not None or name in REQUIRED) and not isinstance(value, (list, tuple, dict)):
            values[name] = SIZES[name]
    values.update(_layers(fields, values))
    values.update(_ids(fields))
    if "kv_lora_rank" in values:
        # Keys that are expanded from one latent vector are there for each head, and only a part of each is rotated.
        values.update({name: value for name, value in LATENT.items() if name in values})
    values.update(given)
    sections = _sections(fields.get("rope_parameters"), values.get("head_dim", HEAD))
    if sections is not None and "rope_parameters" not in given:
        values["rope_parameters"] = sections
    return type(default)(**values)


def _value(config, field):
    # Where a value differs by layer, reading it raises a RuntimeError.
    try:
        return getattr(config, field.name, None)
    except RuntimeError:
        return field.default


def _sections(rope, head):
    """RoPE whose dimensions are split over time, height and width, for a small head."""
    if not isinstance(rope, dict) or "mrope_section" not in rope:
        return None
    half = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
    count = len(rope["mrope_section"])
    return {**rope, "mrope_section": [half - (count - 1) * (half // count)] + [half // count] * (count - 1)}


def _layers(fields, values):
    """The lists with an entry for each layer, short but with every kind of layer; and how many layers that makes."""
    lists = {name: fields.get(name) for name in LAYER_LISTS}
    found = {
        name: list(dict.fromkeys(each)) for name, each in lists.items() if isinstance(each, (list, tuple)) and each
    }
    if not found:
        return {}
    count = max(LAYERS, *(len(each) for each in found.values()))
    sizes = {name: count for name in ("num_hidden_layers", "n_layer", "num_layers") if name in values}
    return {**{name: (each * count)[:count] for name, each in found.items()}, **sizes}


def _ids(fields):
    """Special tokens, each with an id of its own that the small vocabulary has."""
    common = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS}
    found = {name: value for name, value in common.items() if name in fields}
    free = iter(range(3, SPECIAL))
    for name, value in fields.items():
        is_id = name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
        if is_id and name not in common:
            found[name] = next(free)
    return found


MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
# By the name of a config's class, wherever it stands: what the general rule does not know.
BY_CLASS = {
    "AlignVisionConfig": {
        "kernel_sizes": [3, 3],
        "in_channels": [32, 16],
        "out_channels": [16, 24],
        "depthwise_padding": [],
        "strides": [1, 2],
        "num_block_repeats": [1, 1],
        "expand_ratios": [1, 6],
        "hidden_dim": HIDDEN,
    },
    "BridgeTowerVisionConfig": {"hidden_size": 64},
    "BrosConfig": {"dim_bbox": 4},
    "ChameleonVQVAEConfig": {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "resolution": 32},
    "ClapAudioConfig": {
        "num_mel_bins": 16,
        "spec_size": 64,
        "patch_size": 2,
        "patch_stride": [2, 2],
        "freq_ratio": 2,
        "num_channels": 3,
        "patch_embeds_hidden_size": 16,
        "depths": [2, 2],
        "num_attention_heads": [2, 2],
    },
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"]},
    "DiffusionGemmaTextConfig": {
        "global_head_dim": HEAD,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    "EmbeddingGemma2TextConfig": {"global_head_dim": HEAD},
    "Emu3VQVAEConfig": {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "attn_resolutions": []},
    "Ernie4_5_VLMoeTextConfig": {
        "moe_intermediate_size": [16, 16],
        "rope_parameters": {**MROPE, "mrope_section": [1, 1, 2]},
    },
    "EsmcConfig": {"num_key_value_heads": HEADS},
    "Florence2VisionConfig": {
        "embed_dim": [8, 16, 32, 32],
        "depths": [1, 1, 1, 1],
        "num_heads": [1, 2, 4, 4],
        "num_groups": [1, 2, 4, 4],
        "projection_dim": HIDDEN,
    },
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "Gemma4TextConfig": {"global_head_dim": HEAD},
    "Gemma4UnifiedTextConfig": {"global_head_dim": HEAD},
    "Glm4vMoeTextConfig": {"rope_parameters": {**MROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 0, 0]}},
    "Glm4vTextConfig": {"rope_parameters": MROPE},
    "Glm5NextTextConfig": {
        "num_key_value_heads": HEADS,
        "index_kpool": 2,
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": HEAD,
    },
    "GlmImageTextConfig": {"rope_parameters": MROPE},
    "GlmOcrTextConfig": {"rope_parameters": MROPE},
    "GraniteMoeHybridConfig": {"layer_types": ["linear_attention", "full_attention"]},
    "HunYuanVLTextConfig": {"rope_parameters": MROPE},
    "JanusVQVAEConfig": {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1},
    "LEDConfig": {"attention_window": WINDOW},
    "LayoutLMv3Config": {
        "coordinate_size": 6,
        "shape_size": 4,
        "max_2d_position_embeddings": 64,
        "visual_embed": False,
    },
    "Lfm2Config": {"layer_types": ["conv", "full_attention"]},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "LiltConfig": {"hidden_size": 48, "max_2d_position_embeddings": 64},
    "Llama4VisionConfig": {"vision_output_dim": HIDDEN, "projector_input_dim": HIDDEN, "projector_output_dim": HIDDEN},
    "LongformerConfig": {"attention_window": WINDOW},
    "LukeConfig": {"entity_vocab_size": 32, "entity_emb_size": HIDDEN},
    "Mamba2Config": {"num_heads": 8, "state_size": 16},
    "MarkupLMConfig": {"max_depth": 4, "xpath_unit_hidden_size": 8},
    "XCLIPVisionConfig": {
        "mit_hidden_size": HIDDEN,
        "mit_intermediate_size": INNER,
        "mit_num_attention_heads": HEADS,
        "mit_num_hidden_layers": LAYERS,
    },
    "MLukeConfig": {"entity_vocab_size": 32, "entity_emb_size": HIDDEN},
    "MobileBertConfig": {"embedding_size": 16, "intra_bottleneck_size": 16},
    "PerceiverConfig": {
        "num_latents": 8,
        "d_latents": HIDDEN,
        "num_self_attends_per_block": LAYERS,
        "num_self_attention_heads": HEADS,
        "num_cross_attention_heads": HEADS,
    },
}
# By kind, for the outermost config.
OVERRIDES = {
    "align": {"projection_dim": 48},
    "chameleon": {"vocabulary_map": {"<image>": 4, "IMGIMGA": 5}},
    "emu3": {"vocabulary_map": {"<image>": 4, "<|visual token 000000|>": 5, "<|extra_200|>": 6}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": HEAD}},
    "gradium_phonon_tts": {"flow_head_config": {"condition_dim": HIDDEN}},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]]},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1]}},
}
