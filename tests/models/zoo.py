"""Small random Hugging Face models, built from configs: nothing is downloaded."""

import pytest

transformers = pytest.importorskip("transformers", reason="the extra maskwise[transformers] is not installed")

SIZE = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "max_position_embeddings": 64,
}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {**SIZE, **STILL}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2 = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **IDS}
MODERN = {**SIZE, **IDS, "cls_token_id": 1, "sep_token_id": 2}


def config(kind, **values):
    return getattr(transformers, f"{kind}Config")(**values)


# name: (model class, config class, values)
ENCODERS = {
    "bert": ("BertModel", "Bert", BERT),
    "bert-eager": ("BertModel", "Bert", {**BERT, "attn_implementation": "eager"}),
    "roberta": ("RobertaModel", "Roberta", BERT),
    "xlm-roberta": ("XLMRobertaModel", "XLMRoberta", BERT),
    "electra": ("ElectraModel", "Electra", {**BERT, "embedding_size": 16}),
    "albert": ("AlbertModel", "Albert", {**BERT, "embedding_size": 16}),
    "distilbert": (
        "DistilBertModel",
        "DistilBert",
        {
            "vocab_size": 99,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 37,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "mpnet": ("MPNetModel", "MPNet", BERT),
    # A window of three tokens to each side, so that it hides something of eleven.
    "modernbert": ("ModernBertModel", "ModernBert", {**MODERN, "local_attention": 6, "global_attn_every_n_layers": 2}),
    "nomic-bert": ("NomicBertModel", "NomicBert", SIZE),
}
DECODERS = {
    "llama": ("LlamaModel", "Llama", {**SIZE, "num_key_value_heads": 2}),
    "gpt2": ("GPT2Model", "GPT2", {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "mistral": ("MistralModel", "Mistral", {**SIZE, "num_key_value_heads": 2, "sliding_window": 4}),
    "qwen3": ("Qwen3Model", "Qwen3", {**SIZE, "num_key_value_heads": 2, "head_dim": 8}),
}
DISENTANGLED = {**BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
DEBERTAS = {
    "deberta": ("DebertaModel", "Deberta", DISENTANGLED),
    "deberta-v3": (
        "DebertaV2Model",
        "DebertaV2",
        {**DISENTANGLED, "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True},
    ),
    "deberta-v2-conv": ("DebertaV2Model", "DebertaV2", {**DISENTANGLED, "conv_kernel_size": 3}),
}
ALL = {**ENCODERS, **DECODERS, **DEBERTAS}


def build(name, head=None):
    kind, settings, values = ALL[name]
    return getattr(transformers, head or kind)(config(settings, **values))
