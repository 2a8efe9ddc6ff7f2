"""The model card of final/ (README.md): what the Hub shows of a model, where it comes from, and how it is loaded.

Tests: tests/engine/checkpointing/test_model_card.py.
"""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from engine.checkpointing.model_folder import RUN_CONFIG
from engine.config.addons import used_addons
from engine.config.redact import redact_all
from engine.loop.train_state import Run
from engine.models.config_and_tokenizer import pretrained_source
from engine.storage import hub
from engine.storage.jsonl import lines_from_end, read_json

PIPELINES = {  # the end of the name of a model's class -> its pipeline
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
    "ForSemanticSegmentation": "image-segmentation",
}
WITH_LABELS = ("ForSequenceClassification", "ForTokenClassification")  # peft does not know how many
SHOWN = ("preference_loss", "beta")  # options that a number of the card depends on
PACKAGES = ("transformers", "torch", "accelerate", "datasets")


def write_card(folder: Path, run: Run, config: dict, evaluated_step: int, best: str) -> None:
    """Write README.md of a complete final/, and the run's configuration, which eval.py reads.

    The evaluation of `evaluated_step` is that of its weights; 0: there is none. `best`: a sentence about the best step."""
    cfg = run.cfg
    own_base = getattr(run.task, "base_model", None)
    name, commit, weights = cfg.model_name_or_path, None, None
    if own_base is not None:
        name, commit, weights = own_base.name, own_base.commit, own_base.weights
    elif name:
        commit = pretrained_source(cfg)[1]
    lines = [f"{'Fine-tuned from ' + _public_name(name) if name else 'Trained from random weights'} on {_data(cfg)}; "]
    lines[0] += (
        f"task `{cfg.task}`, seed {cfg.seed}, global batch {cfg.global_batch_size}. {RUN_CONFIG} holds the configuration."
    )
    lines += [addon.model_card(cfg).strip() for addon in used_addons(cfg)]
    if name and (commit or weights):
        version = f"commit {commit}" if commit else f"weights {weights}"
        lines.append(f"Its base model is {_public_name(name)}, {version}.")
    if best:
        lines.append(f"{best[0].upper()}{best[1:]}.")
    options = {key: config[key] for key in SHOWN if config.get(key) is not None}
    numbers = _evaluation(cfg, evaluated_step)
    versions = read_json(Path(cfg.output_dir, "environment.json")).get("versions", {})
    lines += [_table("loss", options), _table(f"evaluation of step {evaluated_step:,}", numbers)]
    lines += [_code(folder, run), ", ".join(f"{each} {versions[each]}" for each in PACKAGES if each in versions)]
    head = yaml.safe_dump(_front_matter(folder, run, name if commit else None), sort_keys=False, allow_unicode=True)
    text = "\n\n".join(line for line in lines if line)
    (folder / "README.md").write_text(f"---\n{head}---\n# {Path(cfg.output_dir).name}\n\n{text}\n", encoding="utf-8")
    text = yaml.safe_dump(redact_all(config), sort_keys=False, allow_unicode=True)
    (folder / RUN_CONFIG).write_text(text, encoding="utf-8")


def _front_matter(folder: Path, run: Run, base: str | None) -> dict[str, Any]:
    """Return what the Hub reads: library, pipeline, base model and data sets, if these are on the Hub."""
    from transformers import PreTrainedModel

    values: dict[str, Any] = {}
    if isinstance(run.task.saved(run.model.model), PreTrainedModel):
        values["library_name"] = "peft" if _is_adapter(folder) else "transformers"
        values["pipeline_tag"] = _pipeline(run)
    values["base_model"] = base
    values["datasets"] = sorted({key.split()[1].partition("@")[0] for key in hub.records if key.startswith("dataset ")})
    return {name: value for name, value in values.items() if value} | {"tags": [run.cfg.task]}


def _pipeline(run: Run) -> str | None:
    """Return the name of the pipeline that a task of its own names, or that fits the class of the model."""
    name = type(run.task.saved(run.model.model)).__name__
    found = [pipeline for end, pipeline in PIPELINES.items() if name.endswith(end)]
    return getattr(run.task, "pipeline_tag", None) or (found[0] if found else None)


def _is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").exists()


def _evaluation(cfg: Any, step: int) -> dict[str, Any]:
    lines = lines_from_end(Path(cfg.output_dir, "metrics.jsonl")) if step else ()
    found = next((line for _, line in lines if line.get("kind") == "eval" and line["step"] == step), {})
    return {name: value for name, value in found.items() if name not in ("kind", "step")}


def _table(title: str, rows: dict[str, Any]) -> str:
    lines = [f"| {title} | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
    return "\n".join(lines) if rows else ""


def _code(folder: Path, run: Run) -> str:
    """Return a few lines of Python that load the model of this folder, if its class is one of transformers."""
    model, pipeline = run.task.saved(run.model.model), _pipeline(run)
    tokenizer: Any = getattr(run.task, "tokenizer", None)
    loader, library, more = type(model).__name__, "transformers", ""
    if not type(model).__module__.startswith("transformers."):
        return ""
    if _is_adapter(folder):
        of_peft = [end for end in PIPELINES if loader.endswith(end) and end in ("ForCausalLM", *WITH_LABELS)]
        more = f", num_labels={model.config.num_labels}" if loader.endswith(WITH_LABELS) else ""
        loader, library = "AutoPeftModel" + "".join(of_peft), "peft"
    elif pipeline and (tokenizer is not None or pipeline.startswith("image")):
        given: Any = {"fill-mask": f"a {getattr(tokenizer, 'mask_token', '')}", "text-generation": "The"}.get(
            pipeline, "A text."
        )
        if pipeline == "text-generation" and tokenizer.chat_template:
            given = [{"role": "user", "content": "What is 2 + 2?"}]
        given = "image.png" if pipeline.startswith("image") else given
        imports, body = (
            ["from transformers import pipeline"],
            [f'model = pipeline("{pipeline}", FOLDER)', f"print(model({given!r}))"],
        )
        return _python(imports, body)
    imports, body = [f"from {library} import {loader}"], [f"model = {loader}.from_pretrained(FOLDER{more})"]
    if tokenizer is not None:
        imports.append("from transformers import AutoTokenizer")
        body.append("tokenizer = AutoTokenizer.from_pretrained(FOLDER)")
    return _python(imports, body)


def _python(imports: list[str], body: list[str]) -> str:
    return "\n".join(
        ["```python", *imports, "", 'FOLDER = "."  # that of this file, or its name on the Hub', *body, "```"]
    )


def _data(cfg: Any) -> str:
    sources = list(cfg.mixture) if cfg.mixture else [cfg.dataset_name, *cfg.train_file]
    return ", ".join(_public_name(source) for source in sources if source)


def _public_name(source: str) -> str:
    """Return a Hub name unchanged, but only the last component of a URL or a local path."""
    if "://" in source:
        return Path(urlsplit(source).path).name or "a URL"
    return Path(source).name if Path(source).is_absolute() or Path(source).exists() else source
