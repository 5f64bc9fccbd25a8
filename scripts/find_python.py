"""Print a Python of one of the given versions, the first that is found: `python3 scripts/find_python.py 3.12 3.13`."""

import shutil
import subprocess
import sys
from pathlib import Path


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


if __name__ == "__main__":
    python = next(filter(None, map(find_python, sys.argv[1:])), None)
    if python is None:
        sys.exit(1)
    sys.stdout.write(f"{python}\n")
