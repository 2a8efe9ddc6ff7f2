"""report.html: the curves and settings of a run.

    make report [RUN=folder]

Add figures to FIGURES. Tests: tests/addons/tools/test_html_report.py.
"""

import html
import io
from datetime import datetime
from pathlib import Path

from src.config.errors import UsageError
from src.runtime.exit_codes import run_main
from src.storage import jsonl
from src.storage.atomic_folder import read_json, rewrite

FIGURES = [  # title, label of the y-axis ({unit}: what the task counts), {kind of line in metrics.jsonl: key}
    ("Loss", "per unit of weight", {"train": "loss", "eval": "loss"}),
    ("Learning rate", "", {"train": "learning_rate"}),
    ("Gradient norm", "before clipping", {"train": "grad_norm"}),
    ("Throughput", "{unit} per second", {"train": "tokens_per_second"}),
    ("Padding", "share of the {unit} in a micro-batch", {"train": "padding"}),
]
STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { margin-bottom: 0 } figure { display: inline-block; width: 49%; min-width: 24em; margin: 0 } svg { width: 100%; height: auto }
table { border-collapse: collapse } td { padding: .1em 1.5em .1em 0; vertical-align: top; font-variant-numeric: tabular-nums }
td:first-child { color: #666 } .pair { display: flex; flex-wrap: wrap; gap: 3em } pre { background: #f6f6f6; padding: 1em }"""


def main(argv: list[str]) -> None:
    if len(argv) != 1 or argv[0].startswith("-"):
        raise UsageError("give one run folder: make report RUN=runs/NAME")
    print(write(Path(argv[0])))


def write(folder: Path) -> Path:
    """Write report.html to a run folder and return its path; the run may be complete, running or killed."""
    lines = jsonl.read_lines(folder / "metrics.jsonl")  # a kill can truncate the last line
    if not lines:
        raise UsageError(f"{folder} has no metrics.jsonl with a readable line: give a run folder")
    by_kind = {kind: [line for line in lines if line["kind"] == kind] for kind in ("train", "eval")}
    environment = read_json(folder / "environment.json") or {"environment.json": "missing or unreadable"}
    unit = environment.pop("unit", "tokens")
    body = figures(by_kind, unit)
    last = [
        f"<div><h2>Last {kind} line</h2>{table({k.replace('tokens_per', f'{unit}_per'): v for k, v in of_kind[-1].items()})}</div>"
        for kind, of_kind in by_kind.items()
        if of_kind
    ]
    body.append(f"<div class=pair>{''.join(last)}</div>")
    body.append(f"<h2>Environment</h2>{table(environment)}")
    file = folder / "config.yaml"
    config = file.read_text(encoding="utf-8") if file.is_file() else "config.yaml is missing"
    body.append(f"<h2>Configuration</h2><pre>{html.escape(config)}</pre>")
    name = html.escape(folder.resolve().name)
    head = f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{name}</title><style>{STYLE}</style>'
    report = folder / "report.html"
    try:
        rewrite(report, f"{head}<h1>{name}</h1>{''.join(body)}</html>\n")
    except OSError as error:
        raise UsageError(f"{report} cannot be written: {error}") from error
    return report


def figures(by_kind: dict[str, list[dict]], unit: str) -> list[str]:
    """Return an inline SVG for each entry of FIGURES that has values. A null makes a gap in its curve."""
    import matplotlib

    matplotlib.rcdefaults()  # ignore a matplotlibrc in the working directory
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text, in the page's font
    made = []
    for title, label, keys in FIGURES:
        curves = {}
        for kind, key in keys.items():
            points = [(line["step"], line.get(key)) for line in by_kind[kind]]
            if any(isinstance(value, int | float) for _, value in points):
                curves[kind] = points
        if curves:
            made.append(f"<figure>{draw(title, label.format(unit=unit), curves)}</figure>")
    return made


def draw(title: str, unit: str, curves: dict[str, list[tuple]]) -> str:
    """Draw the curves {label: [(step, value), …]} in one figure; return it as SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    for label, points in curves.items():
        few = label.startswith("eval") or len(points) < 25
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, label=label, marker="o" if few else None, markersize=3.5)
    axes.set(title=title, xlabel="step", ylabel=unit)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        axes.legend(frameon=False)
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg", metadata={"Date": None})
    text = drawing.getvalue()
    return text[text.index("<svg") :]


def table(values: dict) -> str:
    """Format (name, value) pairs as an HTML table of two columns; a nested value takes one line."""
    rows = []
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        shown = ("; " if any(isinstance(item, dict) for item in items) else " ").join(map(one_line, items))
        rows.append(f"<tr><td>{html.escape(str(name).replace('_', ' '))}<td>{html.escape(shown)}")
    return f"<table>{''.join(rows)}</table>"


def one_line(value: object) -> str:
    """Format a value; a dict as `name value, …`, and seconds since 1970 in its `time` as a date."""
    if not isinstance(value, dict):
        return str(value)
    if isinstance(time := value.get("time"), float):
        value = value | {"time": f"{datetime.fromtimestamp(time):%Y-%m-%d %H:%M:%S}"}
    return ", ".join(f"{key.replace('_', ' ')} {item}" for key, item in value.items())


if __name__ == "__main__":
    run_main(main)
