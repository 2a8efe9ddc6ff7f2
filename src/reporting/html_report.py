"""report.html: the curves and settings of a run.

A fork adds figures here. Tests: tests/reporting/test_html_report.py.
"""

import html
import io
import json
import sys
from pathlib import Path

from src.config.errors import UsageError
from src.config.redact import redact, redact_all
from src.storage.atomic_folder import rewrite

FIGURES = [  # title, unit of the left axis, kind of line -> its numbers
    ("Loss", "per unit of weight", {"train": "loss", "eval": "loss"}),
    ("Learning rate", "", {"train": "learning_rate"}),
    ("Gradient norm", "before clipping", {"train": "grad_norm"}),
    ("Throughput", "tokens per second", {"train": "tokens_per_second"}),
    ("Padding", "share of positions", {"train": "padding"}),
]
STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { margin-bottom: 0 } figure { display: inline-block; width: 49%; min-width: 24em; margin: 0 } svg { width: 100%; height: auto }
table { border-collapse: collapse } td { padding: .1em 1.5em .1em 0; vertical-align: top; font-variant-numeric: tabular-nums }
td:first-child { color: #666 } .pair { display: flex; flex-wrap: wrap; gap: 3em } pre { background: #f6f6f6; padding: 1em }"""


def main(argv: list[str]) -> None:
    if len(argv) != 1 or argv[0].startswith("-"):
        raise UsageError("give one run folder: python -m src.reporting.html_report runs/NAME")
    print(write(Path(argv[0])))


def write(folder: Path) -> Path:
    """Write report.html to a run folder, of a run that is finished, going on or was killed; return its path."""
    lines, spoilt = read_metrics(folder)
    kinds = {kind: [line for line in lines if line.get("kind") == kind] for kind in ("train", "eval")}
    environment = redact_all(decoded(read(folder / "environment.json")))  # of earlier versions, too
    environment = environment or {"environment.json": "missing or unreadable"}
    last = "".join(f"<div><h2>Last {kind} line</h2>{table(found[-1])}</div>" for kind, found in kinds.items() if found)
    note = f"<p>{spoilt} unreadable line(s) of metrics.jsonl left out.</p>" if spoilt else ""
    name, config = html.escape(folder.resolve().name), redact(read(folder / "config.yaml")) or "config.yaml is missing"
    page = (
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{name}</title><style>{STYLE}</style>'
        f"<h1>{name}</h1>{note}{''.join(figures(kinds))}<div class=pair>{last}</div>"
        f"<h2>Environment</h2>{table(environment)}"
        f"<h2>Configuration</h2><pre>{html.escape(config)}</pre></html>\n"
    )
    report = folder / "report.html"
    try:
        rewrite(report, page)
    except OSError as error:
        raise UsageError(f"{report} cannot be written: {error}") from error
    return report


def read_metrics(folder: Path) -> tuple[list[dict], int]:
    """Return the lines of metrics.jsonl that can be read, and how many cannot: a kill leaves half a line."""
    text = read(folder / "metrics.jsonl").splitlines()
    lines = [line for line in map(decoded, text) if isinstance(line.get("step"), int)]
    if not lines:
        raise UsageError(f"{folder} holds no metrics.jsonl with a line to report: give the folder of a run")
    return lines, len(text) - len(lines)


def decoded(text: str) -> dict:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def figures(kinds: dict[str, list[dict]]) -> list[str]:
    """Return a figure as inline SVG for each of FIGURES that has a number; a null leaves a gap in its curve."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcdefaults()  # not what a matplotlibrc in the working directory says
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text, in the page's font
    made = []
    for title, unit, wanted in FIGURES:
        curves = {kind: [(x["step"], x.get(name)) for x in kinds[kind]] for kind, name in wanted.items()}
        curves = {k: points for k, points in curves.items() if any(isinstance(y, int | float) for _, y in points)}
        if not curves:
            continue
        figure = Figure(figsize=(6, 3.2), layout="constrained")
        axes = figure.subplots()
        for kind, points in curves.items():
            few = kind == "eval" or len(points) < 25
            axes.plot(*zip(*points, strict=True), label=kind, marker="o" if few else None, markersize=3.5)
        axes.set(title=title, xlabel="step", ylabel=unit)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if len(curves) > 1:
            axes.legend(frameon=False)
        drawing = io.StringIO()
        figure.savefig(drawing, format="svg", metadata={"Date": None})
        made.append(f"<figure>{drawing.getvalue()[drawing.getvalue().index('<svg') :]}</figure>")
    return made


def table(values: dict) -> str:
    """Return a table of two columns, with what is nested on one line."""
    rows = []
    for name, value in values.items():
        if isinstance(value, dict):
            value = [f"{k} {v}," for k, v in value.items()]
        shown = " ".join(map(str, value)).rstrip(",") if isinstance(value, list) else str(value)
        rows.append(f"<tr><td>{html.escape(str(name).replace('_', ' '))}<td>{html.escape(shown)}")
    return f"<table>{''.join(rows)}</table>"


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
