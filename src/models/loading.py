"""Load a tokenizer, a configuration and a model by name, or build one with random weights.

Tests: tests/config/test_bad_input.py and tests/models/test_loading.py.
"""

import json
from pathlib import Path

import torch

from src.config.errors import UsageError, did_you_mean, warn
from src.config.paths import locate, not_found_locally
from src.config.schema import RunConfig, plain_name
from src.config.yaml_files import read_yaml
from src.download import http_files, hub, sample_datasets
from src.download.cache_folder import cache_root
from src.text.tokenization import masks_known


def _reason(error: Exception) -> str:
    """Return the first sentence of a library's message on one line."""
    if isinstance(error, KeyError):
        return f"unknown value {error}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:400] or type(error).__name__


def _folder(cfg: RunConfig, name: str, field: str = "model_name_or_path", weights: bool = True) -> str:
    revision = cfg.model_revision if name == cfg.model_name_or_path else "main"
    return hub.model_folder(name, revision, field, cache_root(cfg), weights, cfg.trust_remote_code)


def source(cfg: RunConfig) -> tuple[Path, str | None]:
    """Return the folder of the pretrained model and, from the Hub, its commit."""
    folder = _folder(cfg, cfg.model_name_or_path)
    fetched = http_files.fetched.get(f"model {cfg.model_name_or_path}@{cfg.model_revision}", {})
    return Path(folder), fetched.get("commit")


def load_tokenizer(cfg: RunConfig):
    """Return the tokenizer of `tokenizer_name` or of the model, or None when neither brings one."""
    from transformers import AutoTokenizer

    name = cfg.tokenizer_name or cfg.model_name_or_path
    if name is None:
        return None
    field = "tokenizer_name" if cfg.tokenizer_name else "model_name_or_path"
    if not (folder := sample_datasets.sample_tokenizer(name, cache_root(cfg))):
        # A tokenizer may be a Hub repository of its own, of which weights are not wanted.
        folder = _folder(cfg, name, field, weights=name == cfg.model_name_or_path)
    if not cfg.tokenizer_name and Path(folder).is_dir():
        known = (
            "tokenizer.json",
            "tokenizer_config.json",
            "vocab.txt",
            "vocab.json",
            "tokenizer.model",
            "spiece.model",
        )
        if not any((Path(folder) / file).exists() for file in known):
            return None  # a model folder without a tokenizer is fine for rows of input_ids
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=cfg.trust_remote_code)
    except Exception as error:
        raise UsageError(
            f"{field}: no tokenizer could be loaded from {name}: {not_found_locally(folder)}{_reason(error)} (give a folder made by "
            "save_pretrained, or a Hub id)"
        ) from error


def tokenizer_fingerprint(tokenizer) -> str:
    """Return what a tokenizer's output depends on; call it before the first use, which leaves settings behind."""
    return tokenizer.backend_tokenizer.to_str() if getattr(tokenizer, "is_fast", False) else repr(tokenizer)


def load_config(cfg: RunConfig, tokenizer):
    """Return the transformers configuration; a random model takes vocabulary size and special ids from the tokenizer."""
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # of reading and writing weights, which would tear the bar of training
    if cfg.model_name_or_path:
        try:
            folder = _folder(cfg, cfg.model_name_or_path)
            config = AutoConfig.from_pretrained(folder, trust_remote_code=cfg.trust_remote_code)
        except Exception as error:
            raise UsageError(
                f"model_name_or_path: no model could be read from {cfg.model_name_or_path}: "
                f"{not_found_locally(cfg.model_name_or_path)}{_reason(error)} (give a folder made by save_pretrained, or a Hub id)"
            ) from error
        _refuse_kernels(
            cfg, f"{folder}/config.json", json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        )
        return config
    values = read_yaml(cfg.model_config)
    _refuse_kernels(cfg, cfg.model_config, values)
    kind = values.pop("model_type", None)
    if not isinstance(kind, str):
        raise UsageError(
            f"{cfg.model_config}: model_type is {kind}: give a name that transformers knows (llama, gpt2, bert, …)"
        )
    try:
        known = AutoConfig.for_model(kind)
    except ValueError:
        from transformers import CONFIG_MAPPING

        raise UsageError(
            f"{cfg.model_config}: model_type: unknown value {kind!r}{did_you_mean(str(kind), list(CONFIG_MAPPING))}"
        ) from None
    names = set(known.to_dict()) | set(getattr(known, "attribute_map", {}))
    wrong = [name for name in values if name not in names and not hasattr(known, name)]
    if wrong:
        raise UsageError(f"{cfg.model_config}: {wrong[0]}: {kind} has no such field{did_you_mean(wrong[0], names)}")
    if tokenizer is not None:
        values.setdefault("vocab_size", len(tokenizer))
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            values.setdefault(name, getattr(tokenizer, name))
    values = {
        name: float(v) if isinstance(getattr(known, name, None), float) and isinstance(v, int) else v
        for name, v in values.items()
    }
    try:
        config = AutoConfig.for_model(kind, **values)
    except Exception as error:
        raise UsageError(f"{cfg.model_config}: not a valid {kind} configuration: {_reason(error)}") from error
    if faults := _config_errors(config, values):
        raise UsageError(f"{cfg.model_config}: {'; '.join(faults)}")
    return config


def _refuse_kernels(cfg: RunConfig, file: str, values: dict) -> None:
    """Raise UsageError if a model's configuration names a kernel of the Hub, whose code transformers would download and run."""
    if cfg.attn_implementation or cfg.trust_remote_code:  # the user has chosen
        return
    parts = [values]
    while parts:
        for name, value in parts.pop().items():
            if isinstance(value, dict):
                parts.append(value)
            if name.endswith("attn_implementation") and isinstance(value, str) and not plain_name(value):
                raise UsageError(
                    f"{file}: {name} is {value}, code from the Hub: give --attn_implementation sdpa, or --trust_remote_code "
                    "true if you trust it"
                )


def _config_errors(config, values: dict) -> list[str]:
    """Return the sizes and probabilities that transformers takes without a word, to fail in the first step or to train nonsense."""
    positive = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    positive += ("num_key_value_heads", "max_position_embeddings")
    sizes = {name: getattr(config, name, None) for name in positive}
    sizes = {name: size for name, size in sizes.items() if isinstance(size, int)}
    faults = [
        f"{name} is {size}: it must be above zero" for name, size in sizes.items() if size <= 0 and name in values
    ]
    heads, shared = sizes.get("num_attention_heads", 1), sizes.get("num_key_value_heads", 1)
    if not faults and heads % shared:
        faults.append(f"num_key_value_heads is {shared}: it must divide num_attention_heads, which is {heads}")
    for name, value in values.items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float) and not 0 <= value < 1:
            faults.append(f"{name} is {value}: give a probability from 0 to below 1")
    return faults


def check_fit(cfg: RunConfig, config, tokenizer, max_length: int | None, auto_class) -> int:
    """Return the rows' largest length; UsageError where task, tokenizer, model and max_length do not fit together."""
    source = cfg.model_name_or_path or cfg.model_config
    if type(config) not in auto_class._model_mapping and not getattr(config, "auto_map", None):
        raise UsageError(
            f"{source}: transformers has no {auto_class.__name__} of model_type {config.model_type}: give another model, "
            f"or another --task than {cfg.task}"
        )
    size = getattr(config, "vocab_size", None)
    if tokenizer is not None and size is not None and len(tokenizer) > size:
        raise UsageError(
            f"{source}: vocab_size is {size}, but the tokenizer {cfg.tokenizer_name or source} has {len(tokenizer)} tokens: "
            "its ids would fall outside the embedding; use the model's own tokenizer or a larger vocab_size"
        )
    limit = getattr(config, "max_position_embeddings", None)
    limit = limit if limit is not None and limit > 0 else None  # some say -1 for any number
    if limit is not None and config.model_type in ("roberta", "xlm-roberta", "camembert"):
        limit -= 2  # their positions begin after the padding index
    if max_length is not None and limit is not None and max_length > limit:
        raise UsageError(
            f"max_length is {max_length}, but {source} has {limit} positions: give at most --max_length {limit}"
        )
    return max_length or min(1024, limit or 1024)


def build_model(
    cfg: RunConfig, config, auto_class, weights=None, new_weights: tuple[str, ...] = (), empty: bool = False
):
    """Return the model on the CPU in `run.dtype`: from the folder `weights`, else pretrained, else random by the seed.
    Or, if `empty`, with weights in memory that is never touched.

    Weights that are read must all be there, except those whose name contains one of `new_weights` (a new head).
    """
    dtype = getattr(torch, cfg.dtype)
    if dtype is torch.bfloat16:
        warn(
            "dtype is bfloat16: weights without a float32 copy. Updates smaller than 1/256 of a weight are lost; "
            "for speed use mixed_precision: bf16 in the accelerate file and keep dtype float32.",
        )
    torch.manual_seed(cfg.seed)
    extra = {"attn_implementation": cfg.attn_implementation} if cfg.attn_implementation else {}
    name = str(weights or cfg.model_name_or_path or "")
    try:
        if empty:
            return _empty_model(auto_class, config, dtype, extra)
        if not name:
            return auto_class.from_config(config, dtype=dtype, **extra)
        model, info = auto_class.from_pretrained(
            locate(name) if weights else _folder(cfg, name),
            config=config,
            dtype=dtype,
            trust_remote_code=cfg.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            **extra,
        )
    except Exception as error:
        raise UsageError(f"{name or cfg.model_config}: the model could not be built: {_reason(error)}") from error
    other = {key: f" (there it is {list(there)}, here {list(here)})" for key, there, here in info["mismatched_keys"]}
    wanted = dict.fromkeys(info["missing_keys"], "") | other
    missing = sorted(key for key in wanted if weights or not any(part in key for part in new_weights))
    if missing:
        raise UsageError(
            f"model_name_or_path: {name} has no weights for {len(missing)} parameters of {type(model).__name__}, first "
            f"{missing[0]}{wanted[missing[0]]}: they would stay random; give a folder saved from this kind of model"
        )
    return model


def _empty_model(auto_class, config, dtype: torch.dtype, extra: dict):
    """Return a model whose weights nothing has written to: the system gives such memory only when it is touched.

    Not on torch's meta device, where accelerate could not tell one weight from another by its address."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = auto_class.from_config(config, dtype=dtype, **extra)
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                memory = torch.empty(value.shape, dtype=value.dtype)
                module._parameters[name] = torch.nn.Parameter(memory, requires_grad=value.requires_grad)
    model.tie_weights()
    return model


@torch.no_grad()
def has_plain_lm_head(model: torch.nn.Module) -> bool:
    """Return whether the logits are the output embedding of the last hidden state, and nothing else.

    Some models scale or cap their logits; computing the loss from their hidden states would be wrong without a word.
    Random weights have logits near zero, where a cap does not show: so large ones are put in their place.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or model.base_model is model:
        return False
    seen = []

    def replace(head, inputs, logits):
        seen[:] = inputs[0], torch.linspace(-1e3, 1e3, logits.numel(), dtype=logits.dtype).view_as(logits)
        return seen[1]

    training = model.training
    model.eval()
    length = min(8, getattr(model.config, "max_position_embeddings", 8))
    ids = torch.arange(length).remainder(model.config.vocab_size)[None]
    arguments = {"input_ids": ids, "use_cache": False}
    hook = head.register_forward_hook(replace)
    logits = model(**arguments).logits
    hook.remove()
    hidden = model.base_model(**arguments).last_hidden_state
    model.train(training)
    if not seen or seen[0].shape != hidden.shape:
        return False
    return torch.equal(logits.to(seen[1].dtype), seen[1]) and torch.allclose(seen[0], hidden)


@torch.no_grad()
def check_packing(model: torch.nn.Module) -> None:
    """Raise UsageError if the second document of a packed row sees the first.

    Recurrent models, ALiBi and positions of a model's own ignore position_ids, and would leak without a word."""
    half = min(4, getattr(model.config, "max_position_embeddings", 8) // 2)
    second = torch.arange(half) % model.config.vocab_size
    rows = torch.stack([torch.cat([torch.full((half,), token), second]) for token in (0, model.config.vocab_size - 1)])
    positions = torch.arange(half).repeat(len(rows), 2)
    training = model.training
    model.eval()
    with masks_known(packed=True):
        one, other = model(input_ids=rows, position_ids=positions, use_cache=False).logits[:, half:]
    model.train(training)
    if not torch.allclose(one, other, rtol=1e-5, atol=1e-6):
        raise UsageError(
            f"packing is true, but in a {model.config.model_type} the documents of a row see each other: it does not go by "
            "position_ids; give --packing false"
        )
