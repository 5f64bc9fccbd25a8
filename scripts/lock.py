"""Resolve the lock files: plain `name==version` lines that hold for every supported Python.

For each Python a fresh environment is made with the newest versions that pyproject.toml allows. Where Pythons need
different versions, the lines carry environment markers. Run it by `make lock`; with file names, only those are made.
"""

import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from find_python import find_python

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Lock:
    pythons: tuple[str, ...]
    extras: tuple[str, ...]
    """Of pyproject.toml, installed beside what the package itself needs."""


LOCKS = {
    "requirements.lock": Lock(pythons=("3.11", "3.12", "3.13"), extras=("dev",)),
    "requirements-maxtext.lock": Lock(pythons=("3.12", "3.13"), extras=("maxtext", "maxtext-text", "maxtext-test")),
}


def resolve(python: str, requirements: list[str]) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        pip = [f"{folder}/bin/python", "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", *requirements], check=True)
        frozen = subprocess.run([*pip, "freeze"], check=True, capture_output=True, text=True).stdout
    return dict(line.split("==") for line in frozen.splitlines())


def merge(resolved: dict[str, dict[str, str]]) -> list[str]:
    lines = []
    for name in sorted({name for pins in resolved.values() for name in pins}, key=str.lower):
        pythons_of: dict[str, list[str]] = {}
        for python, pins in resolved.items():
            if name in pins:
                pythons_of.setdefault(pins[name], []).append(python)
        for version, pythons in pythons_of.items():
            marker = " or ".join(f'python_version == "{python}"' for python in pythons)
            lines.append(f"{name}=={version}" + ("" if len(pythons) == len(resolved) else f" ; {marker}"))
    return lines


def write(name: str, lock: Lock) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements, extras = list(project["dependencies"]), list(lock.extras)
    for extra in extras:  # which grows: an extra may contain others, as ping-llm[train]
        for requirement in project["optional-dependencies"][extra]:
            if requirement.startswith("ping-llm["):
                extras += requirement.removeprefix("ping-llm[").removesuffix("]").split(",")
            else:
                requirements.append(requirement)
    resolved = {}
    for version in lock.pythons:
        if python := find_python(version):
            sys.stderr.write(f"resolving {name} for Python {version}\n")
            resolved[version] = resolve(python, requirements)
        else:
            sys.exit(f"Python {version} was not found; {name} must hold for {', '.join(lock.pythons)}")
    header = "# Resolved by `make lock` from pyproject.toml, for Python " + ", ".join(lock.pythons) + "."
    (ROOT / name).write_text("\n".join([header, *merge(resolved)]) + "\n")


def main() -> None:
    for name in sys.argv[1:] or LOCKS:
        write(name, LOCKS[name])


if __name__ == "__main__":
    main()
