"""Compiled kernels: a change of any file whose code or constants are compiled in gives a new version."""

from pathlib import Path

import numpy as np
import pytest

from ping_llm.core import draws, randomness
from ping_llm.core.compiled import Array, kernel, source_version, types

FILES = {
    "package/kernels.py": "import package.direct\nfrom package import module\nfrom package.names import NAME\n",
    "package/direct.py": "from . import beside\n",
    "package/module.py": "def later():\n    from package.deep.inner import VALUE\n",
    "package/names/__init__.py": "NAME = 1\n",
    "package/beside.py": "import package.kernels\nX = 1\n",  # a cycle
    "package/deep/inner.py": "from ..above import Y\nVALUE = 1\n",
    "package/above.py": "import numpy as np\nY = 1\n",
    "package/unrelated.py": "Z = 1\n",
}


@pytest.mark.parametrize("changed", FILES)
def test_the_version_covers_all_that_is_imported_directly_or_not(tmp_path: Path, changed: str) -> None:
    versions = []
    for copy, text in (("before", ""), ("after", "# changed\n")):
        for name, content in FILES.items():
            path = tmp_path / copy / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content + text * (name == changed))
        versions.append(source_version(tmp_path / copy / "package/kernels.py", tmp_path / copy))
    assert (versions[0] == versions[1]) == (changed == "package/unrelated.py")


@kernel(types.uint64[::1], types.uint64[::1], types.float64[::1])
def mix_each(words: Array, mixed: Array, drawn: Array) -> None:
    for i in range(len(words)):
        mixed[i] = draws.extend(words[i], i)
        drawn[i] = draws.uniform(words[i])


def test_compiled_draws_are_those_of_numpy() -> None:
    words = np.concatenate([randomness.key(3, np.arange(1000)), np.array([0, 1, 2**63, 2**64 - 1], np.uint64)])
    mixed, drawn = np.empty_like(words), np.empty(len(words))
    mix_each(words, mixed, drawn)
    assert np.array_equal(mixed, randomness.extend(words, np.arange(len(words))))
    assert np.array_equal(drawn, randomness.uniform(words))
