"""report.html: the curves and settings of a run, or of several runs with what differs between them.

    make report [RUN=folder]
    make report RUNS='folder folder …'

Add figures to FIGURES. Tests: tests/addons/tools/test_html_report.py.
"""

import html
import io
from datetime import datetime
from itertools import cycle
from pathlib import Path

import yaml

from src.config.errors import UsageError
from src.config.paths import path_of_flag
from src.runtime.exit_codes import run_main
from src.storage import jsonl
from src.storage.atomic_folder import rewrite
from src.storage.jsonl import read_json

FIGURES = [  # title, label of the y-axis ({unit}: what the task counts), {kind of line in metrics.jsonl: key}
    ("Loss", "per unit of weight", {"train": "loss", "eval": "loss"}),
    ("Learning rate", "", {"train": "learning_rate"}),
    ("Gradient norm", "before clipping", {"train": "grad_norm"}),
    ("Throughput", "{unit} per second", {"train": "tokens_per_second"}),
    ("Padding", "share of the {unit} in a micro-batch", {"train": "padding"}),
]
STYLE = """:root { color-scheme: light dark } h1 { margin-bottom: 0; overflow-wrap: anywhere }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em }
figure { display: inline-block; width: 49%; min-width: min(24em, 100%); margin: 0 } svg { width: 100%; height: auto }
table { border-collapse: collapse; display: block; overflow-x: auto } th { text-align: left }
td, th { padding: .1em 1.5em .1em 0; vertical-align: top; font-variant-numeric: tabular-nums }
td:first-child { opacity: .7 } td + td { overflow-wrap: anywhere }
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
    body = figures(runs)
    body += [section(f"Last {kind} line", {name: run[kind][-1] for name, run in runs.items() if run[kind]})
             for kind in ("train", "eval")]  # fmt: skip
    body.append(section("Environment", {name: run["environment"] for name, run in runs.items()}))
    body.append(section("Configuration", {name: run["config"] for name, run in runs.items()}))
    title = html.escape(" and ".join(runs))
    head = '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>"
    beside = paths[0].with_name(f"report_{'_'.join(path.name for path in paths)}.html")
    report = paths[0] / "report.html" if len(paths) == 1 else beside
    try:
        rewrite(report, f"{head}{''.join(body)}</html>\n")
    except OSError as error:
        raise UsageError(f"{report} cannot be written: {error}") from error
    return report


def read(folder: Path) -> dict:
    """Return the lines of a run by kind, its environment, its configuration and what its task counts."""
    lines = [line for line in jsonl.read_lines(folder / "metrics.jsonl") if "kind" in line]
    if not lines:
        raise UsageError(f"{folder} has no metrics.jsonl with a readable line: give a run folder")
    run = {kind: [line for line in lines if line["kind"] == kind] for kind in ("train", "eval")}
    environment = read_json(folder / "environment.json") or {"environment.json": "missing or unreadable"}
    file = folder / "config.yaml"
    config = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {"config.yaml": "missing"}
    return run | {"unit": environment.pop("unit", "tokens"), "environment": environment, "config": config}


def figures(runs: dict[str, dict]) -> list[str]:
    """Return an inline SVG for each entry of FIGURES that has values. A null makes a gap in its curve."""
    import matplotlib

    matplotlib.rcdefaults()  # ignore a matplotlibrc in the working directory
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text, in the page's font
    matplotlib.rcParams["text.parse_math"] = False  # $ in the name of a run is a $
    made, unit = [], next(iter(runs.values()))["unit"]
    for title, label, keys in FIGURES:
        curves = {}
        for name, run in runs.items():
            for kind, key in keys.items():
                points = [(line["step"], line.get(key)) for line in run[kind]]
                if any(isinstance(value, int | float) for _, value in points):
                    curves[" ".join([name] * (len(runs) > 1) + [kind])] = points
        if curves:
            made.append(f"<figure>{draw(title, label.format(unit=unit), curves)}</figure>")
    return made


def draw(title: str, unit: str, curves: dict[str, list[tuple]]) -> str:
    """Draw the curves {label: [(step, value), …]} in one figure; return it as SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    for style, (label, points) in zip(cycle(["-", "--", ":", "-."]), curves.items(), strict=False):
        few = label.endswith("eval") or len(points) < 25
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, style if len(curves) > 2 else "-", label=label, marker="o" * few, markersize=3.5)
    axes.set(title=title, xlabel="step", ylabel=unit)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        axes.legend(frameon=False)
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg", metadata={"Date": None}, transparent=True)
    text = drawing.getvalue()
    return text[text.index("<svg") :]


def section(title: str, by_run: dict[str, dict]) -> str:
    """Format values by name as a table with a column for each run; of several runs only what differs."""
    names = dict.fromkeys(name for values in by_run.values() for name in values)
    rows = {name: [in_words(values.get(name)) for values in by_run.values()] for name in names}
    if len(by_run) > 1:
        rows = {name: cells for name, cells in rows.items() if len({*cells}) > 1}
        title += f": {len(rows)} of {len(names)} differ"
        rows = {"": [*by_run]} | rows
    text = "".join(f"<tr><td>{'<td>'.join(map(html.escape, [str(name), *cells]))}" for name, cells in rows.items())
    return f"<h2>{html.escape(title)}</h2><table>{text}</table>" if by_run else ""


def in_words(value: object) -> str:
    """Format a value on one line; a dict as `name value, …`, and seconds since 1970 in its `time` as a date."""
    if isinstance(value, list):
        return ("; " if any(isinstance(item, dict) for item in value) else " ").join(map(in_words, value))
    if not isinstance(value, dict):
        return str(value)
    if isinstance(time := value.get("time"), float):
        value = value | {"time": f"{datetime.fromtimestamp(time):%Y-%m-%d %H:%M:%S}"}
    return ", ".join(f"{key.replace('_', ' ')} {item}" for key, item in value.items())


if __name__ == "__main__":
    run_main(main)
