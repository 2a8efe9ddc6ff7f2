"""Map of the code: the first line of each file of train.py, src/, engine/ and addons/ (`make map`).

Tests: tests/project/test_rooms.py.
"""

import ast
from pathlib import Path

from engine.config.paths import REPOSITORY

PLACES = ("train.py", "eval.py", "src", "engine", "addons")


def first_lines(root: Path = REPOSITORY) -> dict[str, str]:
    """Return {path below root: first line of the file's docstring} of all files of the code that have one."""
    lines = {}
    for place in PLACES:
        path = root / place
        for file in [path] if path.suffix else sorted(path.rglob("*.py")):
            text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
            if text:
                lines[str(file.relative_to(root))] = text.split("\n")[0]
    return lines


def main() -> None:
    """Print the map, folder by folder."""
    folder = None
    for path, line in first_lines().items():
        if Path(path).parent != folder:
            folder = Path(path).parent
            print(f"\n{folder}/")
        print(f"  {Path(path).name:28} {line}")


if __name__ == "__main__":
    main()
