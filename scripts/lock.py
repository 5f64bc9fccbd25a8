"""Resolve requirements.lock: plain `name==version` lines that hold for every supported Python found on this machine.

For each Python a fresh environment is made with the newest versions that pyproject.toml allows. Where Pythons need
different versions, the lines carry environment markers. Run it by `make lock`.
"""

import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.11", "3.12", "3.13")


def find_python(version: str) -> str | None:
    """A Python of this version: on the path, or among pyenv's."""
    if found := shutil.which(f"python{version}"):
        works = subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0
        if works:
            return found
    if not shutil.which("pyenv"):
        return None
    root = Path(subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=True).stdout.strip())
    candidates = sorted((root / "versions").glob(f"{version}.*/bin/python{version}"))
    return str(candidates[-1]) if candidates else None


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


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    resolved = {}
    for version in VERSIONS:
        if python := find_python(version):
            sys.stderr.write(f"resolving for Python {version}\n")
            resolved[version] = resolve(python, requirements)
        else:
            sys.exit(f"Python {version} was not found; the lock must hold for {', '.join(VERSIONS)}")
    header = "# Resolved by `make lock` from pyproject.toml, for Python " + ", ".join(VERSIONS) + "."
    (ROOT / "requirements.lock").write_text("\n".join([header, *merge(resolved)]) + "\n")


if __name__ == "__main__":
    main()
