"""Models of transformers through the whole program: two steps, an evaluation, save and load.

`make test` runs one model of each kind, `make test-cluster` the others.
"""

import json
import re
from typing import Any

import pytest

from engine.find_tasks import OPTIONS
from tests.conformance import recipes
from tests.helpers import kit

LM, CLASSIFIER = "causal_lm", "text_classification"

# Task, model type, fields that the shrunk configuration needs besides.
FEW = [
    (LM, "llama", {}),
    (LM, "bloom", {}),  # ALiBi
    (LM, "gemma2", {}),  # capped logits, sliding windows
    (LM, "mixtral", {}),  # experts
    (LM, "mamba", {}),  # recurrent
    (LM, "gemma3", {}),  # its text is one part of the configuration
    (CLASSIFIER, "roberta", {"max_position_embeddings": 66}),
    (CLASSIFIER, "qwen3", {}),  # a decoder classifies
]
TASKS = {
    LM: "gpt2 opt mistral qwen2 qwen3_moe gemma gemma3_text phi falcon falcon_mamba olmo2 stablelm starcoder2 cohere "
    "gpt_bigcode xglm mpt gpt_oss granite bert helium lfm2 gptj codegen biogpt phi3 glm4 deepseek_v3 rwkv recurrent_gemma "
    "jamba bart gpt_neox",
    CLASSIFIER: "bert distilbert albert electra deberta-v2 mpnet modernbert xlm-roberta squeezebert convbert gpt2 llama",
}
MORE = [(task, model, {}) for task, models in TASKS.items() for model in models.split()]
MORE += [(LM, "mamba2", {"num_heads": 8, "head_dim": 8})]

SMALL = (  # names of fields, and the size that they get if theirs is larger; the first match wins
    (r"(.*_)?vocab_size", 512),
    (r"n_group|topk_group|n_groups|mamba_n_groups", 1),
    (r"mamba_n_heads|mamba_num_heads|mamba_d_head|mamba_head_dim|.*lora_rank|.*state_size|mamba_d_state", 8),
    (r"time_step_rank|kv_channels|.*head_dim|d_kv|attention_head_size|head_size", 8),
    (r"rotary_dim|.*num_experts|n_routed_experts|num_local_experts", 4),
    (r"num_experts_per_tok|moe_k|top_k_experts", 2),
    (r"num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|num_(en|de)coder_layers", 2),
    (r"hidden_size|d_model|n_embd|embed_dim|dim|d_embed|word_embed_proj_dim|lru_width|.*embedding_size", 32),
    (r"intermediate_size|.*_intermediate_size|.*ffn_dim|d_ff|n_inner|ffn_hidden_size|hidden_dim", 64),
    (r"max_position_embeddings|n_positions|max_seq_len|seq_length|n_ctx", 128),
    (r".*attention_heads|num_heads|n_heads?|heads", 4),
)


def shrunk(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration that a tiny model changes, also those of the configurations inside it."""
    values, heads = {}, getattr(config, "num_attention_heads", None)
    for name, value in config.to_dict().items():
        inner = getattr(config, name, None) if name.endswith("_config") else None
        size = next((size for pattern, size in SMALL if re.fullmatch(pattern, name)), None)
        if name == "head_dim" and value is None:
            values[name] = 8
        elif re.fullmatch(r"num_key_value_heads|num_kv_heads|n_kv_heads", name) and value:
            values[name] = 4 if value == heads else min(value, 2)
        elif size and isinstance(value, int) and value > size:
            values[name] = size
        elif hasattr(inner, "to_dict") and (changed := shrunk(inner)):
            values[name] = changed
    return values


def _through(task: str, model: str, values: dict, folder) -> tuple[float, float]:
    """Train and evaluate a tiny model; return the loss of train.py's last evaluation, and that of eval.py."""
    from accelerate.state import AcceleratorState
    from transformers import CONFIG_MAPPING

    import eval as evaluation
    import train

    fields = {"model_type": model} | shrunk(CONFIG_MAPPING[model]()) | values
    argv = getattr(recipes, task)(folder)
    argv[argv.index("--model_config") + 1] = kit.write_yaml(folder / f"{model}.yaml", fields)
    data = {f"{split}_file": folder / f"{split}.jsonl" for split in ("train", "validation")}
    sizes = {"max_steps": 2, "global_batch_size": 4, "per_device_batch_size": 2, "max_length": 48}
    argv += kit.flags(**data, **sizes, output_dir=folder / model)
    scored = kit.flags(checkpoint=folder / model, output_dir=folder / "eval")
    for main, words in ((train.main, argv), (evaluation.main, scored)):
        AcceleratorState._reset_state(reset_partial_state=True)  # of the commands before in this process
        main([str(word) for word in words])
    return kit.Run(folder / model).kind("eval")[-1]["loss"], json.loads((folder / "eval/eval.json").read_text())["loss"]


PARTS = [pytest.param(MORE[first : first + 12], marks=pytest.mark.cluster) for first in range(0, len(MORE), 12)]


@pytest.mark.parametrize("models", [FEW, *PARTS])
def test_models_train_save_and_evaluate(tmp_path, models):
    """All in one process; a model that fails is the last in its output."""

    models = [model for model in models if model[0] in OPTIONS]  # a fork may have removed the classifier

    def all_through():
        return [_through(*model, tmp_path) for model in models]

    [losses] = kit.spawn(1, all_through, out=tmp_path / "out", timeout=600)
    for model, (trained, evaluated) in zip(models, losses, strict=True):
        assert trained == evaluated, model
