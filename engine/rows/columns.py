"""The field `columns`: a task sees each column by the name of its part, whatever it is called in the data.

Tests: tests/engine/rows/test_columns.py.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from engine.config.errors import UsageError, did_you_mean, warn_once

# Columns that other trainers use. A warning names those that the data has and this task ignores.
MEANINGFUL = """
    attention_mask labels loss_mask assistant_mask assistant_masks completion_mask prompt_mask position_ids
    token_type_ids seq_lengths cu_seqlens tools label kto_tag system history documents functions chat_template_kwargs
    image images audio audios video videos weight weights sample_weight loss_weight chosen rejected margin messages
    input_ids input
"""


def check_parts(columns: Mapping[str, str], parts: Iterable[str], task: str) -> None:
    """Raise UsageError for a part that rows of the task do not have."""
    for part in columns:
        if part not in parts:
            known = ", ".join(parts) or "none: `parts` of the task names them (engine/task.py)"
            raise UsageError(
                f"columns: {part} is no part of the rows of task {task}{did_you_mean(part, parts)}; its parts are {known}"
            )


def columns_by_name(there: Iterable[str], columns: Mapping[str, str]) -> dict[str, str]:
    """Return {name that a task sees: column} for columns that are there; a part takes the place of a column of its name."""
    there = list(there)
    named = {part: column for part, column in columns.items() if column in there}
    others = {name: name for name in there if name not in named and name not in named.values()}
    return others | named


def check_columns(there: list[str], columns: Mapping[str, str], split: str, is_mixed: bool) -> None:
    """Raise UsageError for a column that the run file names and the data lacks; in a mixture (`is_mixed`) warn of it.

    Warn of a column whose name is that of a part which another column is."""
    for part, column in columns.items():
        if column not in there:
            problem = f"`{column}`, which columns names for {part}, is not among the columns {', '.join(there)}"
            problem = f"{split} data: {problem}{did_you_mean(column, there)}"
            if not is_mixed:
                raise UsageError(problem)
            warn_once(f"{problem}; its rows are read by their other columns")
        elif part in there and part not in columns.values():
            warn_once(f"{split} data: the columns {part} are not used: only {column}, which columns names for it")


def with_columns(text: str, columns: Mapping[str, str]) -> str:
    """Return a text about rows with the column of each part that it quotes."""
    named = [(part, column) for part, column in columns.items() if part != column and f"`{part}`" in text]
    notes = ", ".join(f"`{part}` is the column `{column}`" for part, column in named)
    return f"{text} ({notes})" if notes else text


@contextmanager
def named_in_errors(columns: Mapping[str, str]) -> Iterator[None]:
    """Within, a UsageError that quotes a part says which column it is."""
    try:
        yield
    except UsageError as error:
        text = with_columns(str(error), columns)
        if text != str(error):
            error.args = (text,)
        raise


def warn_of_ignored(
    columns: list[str], used: list[str], split: str, meaningful: Iterable[str] = (), hint: str = ""
) -> None:
    """Warn of columns that are not used but have a meaning elsewhere: those of MEANINGFUL, and `meaningful` ones."""
    meaningful = {*MEANINGFUL.split(), *meaningful}
    ignored = [name for name in columns if name in meaningful and name not in used]
    if ignored:
        warn_once(f"{split} data: the columns {', '.join(ignored)} are not used: only {', '.join(used)}{hint}")
