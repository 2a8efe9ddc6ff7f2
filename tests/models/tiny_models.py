"""Tiny models of transformers: the default configuration of a model type, shrunk by the names of its fields."""

import re
from typing import Any

from tests.helpers import kit

SMALL = (  # names of fields, and the size that they get if theirs is larger; the first match wins
    (r"(.*_)?vocab_size", 512),
    (r"n_group|topk_group|n_groups|mamba_n_groups", 1),
    (r"mamba_n_heads|mamba_num_heads|mamba_d_head|mamba_head_dim|.*lora_rank|.*state_size|mamba_d_state", 8),
    (r"time_step_rank|kv_channels|.*head_dim|d_kv|attention_head_size|head_size", 8),
    (r"rotary_dim", 4),
    (r".*num_experts|n_routed_experts|num_local_experts", 4),
    (r"num_experts_per_tok|moe_k|top_k_experts", 2),
    (r"num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|num_(en|de)coder_layers|depth", 2),
    (r"hidden_size|d_model|n_embd|embed_dim|dim|d_embed|word_embed_proj_dim|lru_width|.*embedding_size", 32),
    (r"intermediate_size|.*_intermediate_size|.*ffn_dim|d_ff|n_inner|ffn_hidden_size|hidden_dim", 64),
    (r"max_position_embeddings|n_positions|max_seq_len|seq_length|n_ctx", 128),
    (r".*attention_heads|num_heads|n_heads?|heads", 4),
    (r"image_size", 64),
)


def small(name: str) -> int | None:
    """Return the size of a field in a tiny model, None if it keeps its own."""
    return next((size for pattern, size in SMALL if re.fullmatch(pattern, name)), None)


def shrunk(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration that a tiny model changes, also those of the configurations inside it."""
    values, heads = {}, getattr(config, "num_attention_heads", None)
    for name, value in config.to_dict().items():
        inner = getattr(config, name, None) if name.endswith("_config") else None
        if name == "head_dim" and value is None:
            values[name] = 8
        elif re.fullmatch(r"num_key_value_heads|num_kv_heads|n_kv_heads", name) and value:
            values[name] = 4 if value == heads else min(value, 2)
        elif isinstance(value, int) and not isinstance(value, bool) and value > (size := small(name) or value):
            values[name] = size
        elif hasattr(inner, "to_dict") and (changed := shrunk(inner)):
            values[name] = changed
    return values


def model_file(folder, model_type: str, **values):
    """Write a file for `model_config` with a tiny model; `values` replace those of the shrunk configuration."""
    from transformers import CONFIG_MAPPING

    fields = shrunk(CONFIG_MAPPING[model_type]()) | values
    return kit.write_yaml(folder / f"{model_type}.yaml", {"model_type": model_type} | fields)
