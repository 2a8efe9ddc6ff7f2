"""Shared test tools under one name: ranks over gloo, tiny models and data, runs in a folder, comparisons."""
# ruff: noqa: F401 (tests import all names from here)

import torch

from tests.helpers.commands import (
    Ranks,
    _command,
    after_prepare,
    evaluate_here,
    run_command,
    run_evaluation,
    run_training,
)
from tests.helpers.ranks import (
    ONCE,
    ONCE_SHARDED,
    REPOSITORY,
    RankFailed,
    fork,
    free_port,
    kill_all,
    spawn,
    until,
    where,
)
from tests.helpers.runs import Run, distance, first_other_step, last_step, ledger_text, load_weights, same, timeless
from tests.helpers.tiny_data import (
    CHATML,
    EXACT,
    GPT2,
    LLAMA,
    TINY,
    flags,
    need_addon,
    need_task,
    open_data,
    save_model,
    tiny_files,
    tiny_tokenizer,
    write_jsonl,
    write_yaml,
)
