"""Write the pins of requirements.txt and requirements-extra.txt from uv.lock: `make lock`. Needs uv.

Ranges are in pyproject.toml; names and comments in both files stay. Tests: tests/project/test_requirements.py.
"""

import re
import subprocess
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
FILES = ("requirements.txt", "requirements-extra.txt")
PIN = re.compile(r"^([\w.-]+)==([\w.]+)", re.M)


def normalized(name: str) -> str:
    """Return the name of a package as uv.lock writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked_versions() -> dict[str, str]:
    """Return {normalized name: version} of all packages in uv.lock."""
    packages = tomllib.loads((REPOSITORY / "uv.lock").read_text(encoding="utf-8"))["package"]
    return {package["name"]: package["version"] for package in packages if "version" in package}


def with_pins(text: str, versions: dict[str, str]) -> str:
    """Return the text of a requirements file with these versions; names, comments and other lines stay."""
    return PIN.sub(lambda pin: f"{pin[1]}=={versions[normalized(pin[1])]}", text)


def main() -> None:
    subprocess.run(["uv", "lock", "--upgrade"], cwd=REPOSITORY, check=True)
    versions = locked_versions()
    for file in map(REPOSITORY.joinpath, FILES):
        file.write_text(with_pins(file.read_text(encoding="utf-8"), versions), encoding="utf-8")


if __name__ == "__main__":
    main()
