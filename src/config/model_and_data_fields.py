"""The fields of the run file (YAML) about the run, its model and its data; RunConfig in schema.py adds the others.

Tests: tests/config/test_config.py, tests/checkpointing/test_resume.py.
"""

from dataclasses import dataclass

from src.config.fields import ASK, option
from src.config.untrusted_values import plain_data, plain_name


@dataclass(frozen=True)
class ModelAndDataFields:
    """The groups run, model and data of --help."""

    task: str = option(
        "kind of model: causal_lm, seq2seq, segmentation, … (docs/tasks.md)",
        "causal_lm",
        group="run",
        from_checkpoint=True,
    )
    output_dir: str = option(  # the parser replaces None
        "run folder (default: runs/ and the name of the run file)", may_change_on_resume=True
    )
    seed: int = option(
        "the only seed: weights, data order, dropout, augmentation", 42, min=0, max=2**63 - 1, from_checkpoint=True
    )
    resume: str = option(
        "auto (newest checkpoint of output_dir, if any), never, or a checkpoint folder",
        "auto",
        may_change_on_resume=True,
    )
    time_limit: float | None = option(
        "minutes until the run saves and exits with code 75 (default: no limit)", above=0, may_change_on_resume=True
    )
    dry_run: bool = option(
        "print the plan (steps, tokens, learning rate, memory, disk) and exit", False, may_change_on_resume=True
    )
    smoke: bool = option(
        "two real steps, an evaluation, a save, a resume into a fresh model, compared; then stop",
        False,
        may_change_on_resume=True,
    )

    model_name_or_path: str | None = option("Hub id or folder of a pretrained model", group="model", is_path=True)
    model_revision: str = option("branch, tag or commit of the Hub model", "main")
    model_config: str | None = option(
        "YAML or JSON file with a transformers config, for random weights", is_path=True, may_change_on_resume=True
    )
    init_from: str | None = option(
        "folder of a run, checkpoint or final model: the initial weights of this run", is_path=True
    )
    tokenizer_name: str | None = option(
        "Hub id or folder of the tokenizer (default: the model's)", is_path=True, may_change_on_resume=True
    )
    dtype: str = option(
        "dtype of the weights", "float32", choices=("float32", "float64", "bfloat16"), from_checkpoint=True
    )
    attn_implementation: str | None = option(
        "sdpa, eager, … (default: chosen by transformers)", may_change_on_resume=True, from_checkpoint=plain_name
    )
    trust_remote_code: bool = option(
        "run Python code of a model, tokenizer, metric or kernel", False, may_change_on_resume=True, from_checkpoint=ASK
    )

    dataset_name: str | None = option(
        "Hub id or folder of a dataset, or a sample that a file of samples/ makes, such as stdlib_code",
        group="data",
        is_path=True,
        may_change_on_resume=True,
        from_checkpoint=plain_data,
    )
    dataset_config_name: str | None = option(
        "configuration (subset) of the Hub dataset", may_change_on_resume=True, from_checkpoint=True
    )
    dataset_revision: str | None = option(
        "branch, tag or commit of the Hub dataset (default: main)", may_change_on_resume=True, from_checkpoint=True
    )
    dataset_split: str | None = option(
        "split of dataset_name to train on (default: train)", may_change_on_resume=True, from_checkpoint=True
    )
    train_file: list[str] = option(
        "training data: paths, globs or URLs of jsonl, json, csv, parquet, txt or arrow files",
        [],
        is_path=True,
        may_change_on_resume=True,
        from_checkpoint=plain_data,
    )
    validation_file: list[str] = option(
        "evaluation data, in the same formats", [], is_path=True, may_change_on_resume=True, from_checkpoint=plain_data
    )
    mixture: dict | None = option(
        "several datasets: {NAME: {train_file: FILES, weight: X}, …}, or dataset_name instead of train_file; each may "
        "have a validation_file; weight: its share of the examples (by default its size); each is also evaluated alone",
        may_change_on_resume=True,
        from_checkpoint=plain_data,
    )
    cache_dir: str | None = option(
        "folder for downloads and prepared data (default: HF_DATASETS_CACHE)",
        may_change_on_resume=True,
        from_checkpoint=ASK,
    )
    cache_per_node: bool = option(
        "give each node its own folder in cache_dir instead of sharing one", False, may_change_on_resume=True
    )
    preprocessing_num_workers: int = option(
        "processes per rank that prepare data", 1, min=1, max=256, may_change_on_resume=True
    )
