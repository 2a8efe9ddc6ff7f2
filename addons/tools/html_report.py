"""report.html: the curves and settings of a run, or of several runs, sorted by their best, with what differs.

    make report [RUN=folder]
    make report RUNS='folder folder …'

Add figures to FIGURES. Tests: tests/addons/tools/test_html_report.py.
"""

import html
import io
import math
from datetime import datetime
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from engine.config.addresses import path_of_flag
from engine.config.errors import UsageError
from engine.config.run_config import RunConfig, best_by
from engine.process.exit_codes import run_main
from engine.rows.prompts import prompt_in_words
from engine.storage import jsonl
from engine.storage.atomic_folder import rewrite
from engine.storage.jsonl import read_json

FIGURES = [  # title, label of the y-axis ({unit}: what the task counts), {kind of line in metrics.jsonl: key}
    ("Loss", "per unit of weight", {"train": "loss", "eval": "loss"}),
    ("Learning rate", "", {"train": "learning_rate"}),
    ("Gradient norm", "before clipping", {"train": "grad_norm"}),
    ("Throughput", "{unit} per second", {"train": "tokens_per_second"}),
    ("Padding", "share of the {unit} in a micro-batch", {"train": "padding"}),
]
DIGITS, ALL = 5, 17  # of a number in tables and figures; metrics.jsonl has all
SHOWN_STEPS = 5  # evaluations with their answers to sample_prompts
LONGEST_NAME = 200  # bytes of the name of a report on several runs
STYLE = """:root { color-scheme: light dark } h1 { margin-bottom: 0; overflow-wrap: anywhere }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em }
figure { display: inline-block; width: 49%; min-width: min(24em, 100%); margin: 0 } svg { width: 100%; height: auto }
table { border-collapse: collapse; display: block; overflow-x: auto; margin-bottom: 1em } th { text-align: left }
td, th { padding: .1em 1.5em .1em 0; vertical-align: top; font-variant-numeric: tabular-nums }
td:first-child { opacity: .7 } td + td { overflow-wrap: anywhere }
.texts td + td, .texts th { white-space: pre-wrap; overflow-wrap: anywhere }
@media (prefers-color-scheme: dark) { svg { filter: invert(.9) hue-rotate(180deg) } }"""


def main(argv: list[str]) -> None:
    if not argv or argv[0].startswith("-"):
        raise UsageError("give one run folder, or several: make report RUN=runs/NAME, make report RUNS='runs/A runs/B'")
    print(write(*(Path(path_of_flag(word, "RUN")) for word in argv)))


def write(*folders: Path) -> Path:
    """Write report.html to a run folder, or for several runs beside the first one; return its path.

    A run may be complete, running or killed."""
    paths = [Path(folder).resolve() for folder in folders]
    names = [path.name for path in paths] if len({path.name for path in paths}) == len(paths) else [*map(str, paths)]
    runs = {name: read(folder) for name, folder in zip(names, folders, strict=True)}
    best = {name: evaluation for name, run in runs.items() if (evaluation := best_evaluation(run))}
    body = [ranking(runs, best), *figures(runs, best)]
    for kind in ("train", "eval"):
        body.append(section(f"Last {kind} line", {name: run[kind][-1] for name, run in runs.items() if run[kind]}))
    body.append(samples(runs))
    body.append(section("Environment", {name: run["environment"] for name, run in runs.items()}))
    body.append(section("Configuration", {name: run["config"] for name, run in runs.items()}, digits=ALL))
    title = html.escape(" and ".join(runs))
    head = '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>"
    beside = f"report_{'_'.join(path.name for path in paths)}"
    if len(beside.encode()) > LONGEST_NAME:
        beside = f"report_{len(paths)}_runs"
    report = paths[0] / "report.html" if len(paths) == 1 else paths[0].with_name(f"{beside}.html")
    rewrite(report, f"{head}{''.join(body)}</html>\n")
    return report


def read(folder: Path) -> dict:
    """Return the lines of a run by kind, its environment, its configuration and what its task counts."""
    lines = [line for line in jsonl.read_lines(folder / "metrics.jsonl") if "kind" in line]
    if not lines:
        raise UsageError(f"{folder} has no metrics.jsonl with a readable line: give a run folder")
    run = {kind: [line for line in lines if line["kind"] == kind] for kind in ("train", "eval", "sample")}
    environment = read_json(folder / "environment.json") or {"environment.json": "missing or unreadable"}
    file = folder / "config.yaml"
    config = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {"config.yaml": "missing"}
    return run | {"unit": environment.pop("unit", "tokens"), "environment": environment, "config": config}


# ---- the best evaluation -----------------------------------------------------------------------------------------------


class Best(NamedTuple):
    """The best evaluation of a run."""

    metric: str  # that its configuration names, or the loss
    is_greater: bool  # whether a greater value is better
    value: float
    step: int


def best_evaluation(run: dict) -> Best | None:
    """Return the best evaluation of a run, or None if it has none with a finite value."""
    fields = {name: run["config"].get(name) for name in ("metric_for_best_model", "greater_is_better")}
    metric, is_greater = best_by(RunConfig(**fields))
    lines = [line for line in run["eval"] if is_finite(line.get(metric))]
    if not lines:
        return None
    choose = max if is_greater else min
    line = choose(lines, key=lambda line: line[metric])  # the first of equal ones
    return Best(metric, is_greater, line[metric], line["step"])


def is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def ranking(runs: dict[str, dict], best: dict[str, Best]) -> str:
    """Return a table of the runs, sorted by their best evaluation, with the best one in bold.

    The metric is that of the first run that has one. Runs that were evaluated by another, or not, stand at the end."""
    if not best:
        return ""
    metric, is_greater, *_ = next(iter(best.values()))
    ranked = [name for name in runs if name in best and best[name].metric == metric]
    ranked.sort(key=lambda name: best[name].value, reverse=is_greater)
    values = dict(zip(ranked, in_few_digits([best[name].value for name in ranked], DIGITS), strict=True))
    rows = [["run", f"best {metric}", "at step", f"last {metric}", "last step", "last train loss"]]
    for name in [*ranked, *(name for name in runs if name not in ranked)]:
        evaluated, trained = (runs[name][kind][-1] if runs[name][kind] else {} for kind in ("eval", "train"))
        of_best = [values[name], f"{best[name].step:,}"] if name in ranked else ["none", "none"]
        last_step = max(line.get("step", 0) for line in (evaluated, trained))
        rows.append([name, *of_best, rounded(evaluated.get(metric)), f"{last_step:,}", rounded(trained.get("loss"))])
    cells = [[html.escape(cell) for cell in row] for row in rows]
    cells[1][1] = f"<b>{cells[1][1]} ★</b>"
    text = "".join(f"<tr><td>{'<td>'.join(row)}" for row in cells)
    order = f", {'greatest' if is_greater else 'lowest'} first" if len(runs) > 1 else ""
    return f"<h2>{html.escape(f'Best {metric}{order}')}</h2><table>{text}</table>"


# ---- figures -----------------------------------------------------------------------------------------------------------


def figures(runs: dict[str, dict], best: dict[str, Best]) -> list[str]:
    """Return an inline SVG for each entry of FIGURES that has values. A null makes a gap in its curve."""
    import matplotlib

    matplotlib.rcdefaults()  # ignore a matplotlibrc in the working directory
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text, in the page's font
    matplotlib.rcParams["text.parse_math"] = False  # $ in the name of a run is a $
    made, unit = [], next(iter(runs.values()))["unit"]
    for title, label, keys in FIGURES:
        curves, stars = {}, {}
        for name, run in runs.items():
            for kind, key in keys.items():
                points = [(line["step"], line.get(key)) for line in run[kind]]
                if not any(isinstance(value, int | float) for _, value in points):
                    continue
                curve = f"{name} {kind}" if len(runs) > 1 else kind
                curves[curve] = points
                if kind == "eval" and name in best and best[name].metric == key:
                    stars[curve] = (best[name].step, best[name].value)
        if curves:
            made.append(f"<figure>{draw(title, label.format(unit=unit), curves, stars)}</figure>")
    return made


def draw(title: str, unit: str, curves: dict[str, list[tuple]], stars: dict[str, tuple]) -> str:
    """Draw the curves {label: [(step, value), …]} in one figure, with a star at the best point of some; return the SVG.

    The legend is below the axes, where it covers no curve."""
    from matplotlib.figure import Figure

    has_legend = len(curves) > 1
    columns = 2 if max(map(len, curves)) <= 28 else 1
    height = 3.2 + 0.2 * math.ceil(len(curves) / columns) * has_legend
    figure = Figure(figsize=(6, height), layout="constrained")
    axes = figure.subplots()
    for style, (label, points) in zip(cycle(["-", "--", ":", "-."]), curves.items(), strict=False):
        few = label.endswith("eval") or len(points) < 25
        steps, values = zip(*points, strict=True)
        [line] = axes.plot(
            steps, values, style if len(curves) > 2 else "-", label=label, marker="o" * few, markersize=3.5
        )
        if label in stars:
            axes.plot(*stars[label], "*", color=line.get_color(), markersize=11, gid=f"best {label}")
    axes.set(title=title, xlabel="step", ylabel=unit)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if has_legend:
        figure.legend(loc="outside lower center", ncols=columns, frameon=False)
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg", metadata={"Date": None}, transparent=True)
    text = drawing.getvalue()
    return text[text.index("<svg") :]


# ---- answers to sample_prompts -------------------------------------------------------------------------------------------


def samples(runs: dict[str, dict]) -> str:
    """Return a table with each prompt and the answers of the last SHOWN_STEPS evaluations, the newest first."""
    rows = []
    for name, run in runs.items():
        steps = sorted({line["step"] for line in run["sample"]})[-SHOWN_STEPS:]
        prompts: dict[str, dict[int, str]] = {}  # by prompt: answers by step
        for line in run["sample"]:
            prompts.setdefault(prompt_in_words(line["prompt"]), {})[line["step"]] = line["answer"]
        for prompt, answers in prompts.items():
            heading = f"{name}: {prompt}" if len(runs) > 1 else prompt
            rows.append(f"<tr><th colspan=2>{html.escape(heading)}")
            shown = [step for step in reversed(steps) if step in answers]
            rows += [f"<tr><td>step {step:,}<td>{html.escape(answers[step])}" for step in shown]
    return f"<h2>Answers to sample_prompts</h2><table class=texts>{''.join(rows)}</table>" if rows else ""


# ---- tables ------------------------------------------------------------------------------------------------------------


def section(title: str, by_run: dict[str, dict], digits: int = DIGITS) -> str:
    """Format values by name as a table with a column for each run; of several runs only what differs."""
    names = dict.fromkeys(name for values in by_run.values() for name in values)
    rows = {name: in_few_digits([values.get(name) for values in by_run.values()], digits) for name in names}
    if len(by_run) > 1:
        rows = {name: cells for name, cells in rows.items() if len({*cells}) > 1}
        title += f": {len(rows)} of {len(names)} differ"
        rows = {"": [*by_run]} | rows
    text = "".join(f"<tr><td>{'<td>'.join(map(html.escape, [str(name), *cells]))}" for name, cells in rows.items())
    return f"<h2>{html.escape(title)}</h2><table>{text}</table>" if by_run else ""


def in_few_digits(values: list, digits: int) -> list[str]:
    """Format the values of the runs with `digits`, or as many more as tell them apart."""
    exact = [in_words(value, ALL) for value in values]
    for count in range(digits, ALL):
        texts = [in_words(value, count) for value in values]
        if len({*texts}) == len({*exact}):
            return texts
    return exact


def in_words(value: Any, digits: int) -> str:
    """Format a value on one line; a dict as `name value, …`, and seconds since 1970 in its `time` as a date."""
    if isinstance(value, list):
        separator = "; " if any(isinstance(item, dict) for item in value) else " "
        return separator.join(in_words(item, digits) for item in value)
    if not isinstance(value, dict):
        return rounded(value, digits)
    if isinstance(time := value.get("time"), float):
        value = value | {"time": f"{datetime.fromtimestamp(time):%Y-%m-%d %H:%M:%S}"}
    return ", ".join(f"{key.replace('_', ' ')} {in_words(item, digits)}" for key, item in value.items())


def rounded(value: Any, digits: int = DIGITS) -> str:
    """Format a float with `digits` digits, a large one as a whole number, and anything else as it is."""
    if value is None:
        return "none"
    if not isinstance(value, float) or not math.isfinite(value) or digits == ALL:
        return str(value)
    is_large = abs(value) >= 10 ** (digits - 1)
    return f"{value:,.0f}" if is_large else f"{value:.{digits}g}"


if __name__ == "__main__":
    run_main(main)
