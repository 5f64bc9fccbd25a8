"""Functions that Numba compiles to machine code, once for each machine.

A kernel states the types of its arguments, so it is compiled (or, from the second time on, loaded from the cache) when
its module is imported, and there is one version of it. Importing such a module costs half a second for Numba itself:
modules that are used without making batches import kernels where they call them.
"""

import ast
import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import numba
import numba.core.cgutils
import numba.extending
import numpy.typing as npt

from ping_llm.core.console import err

Array = npt.NDArray[Any]
Function = TypeVar("Function", bound=Callable[..., Any])

_numba: Any = numba  # its own annotations know too little of what it compiles
types: Final = _numba.types
cgutils: Final = _numba.core.cgutils
carray: Final = _numba.carray

_OPTIONS: Final = {"nogil": True, "error_model": "numpy"}


def kernel(*arguments: Any, returns: Any = types.void) -> Callable[[Function], Function]:
    """Compile a function for arguments of these types. It releases the GIL while it runs."""

    def decorate(function: Function) -> Function:
        # Numba looks up a cached function by its name and the time of its file, but a change in another file whose code
        # is compiled into it must count as well. So a checksum of all of them is part of the name.
        version = source_version(Path(function.__code__.co_filename))
        function.__qualname__ = f"{function.__name__}_{version}"
        signature = returns(*arguments)
        try:
            compiled = _numba.njit(signature, cache=True, **_OPTIONS)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            compiled = _numba.njit(signature, **_OPTIONS)(function)  # there is no folder to write to
        if not compiled.stats.cache_hits:
            _say_that_it_takes_a_while()
            folder = compiled.stats.cache_path
            for path in Path(folder).glob(f"*.{function.__name__}_*.nb?") if folder else ():
                if version not in path.name:  # outdated
                    path.unlink(missing_ok=True)
        return compiled

    return decorate


def part_of_kernels(function: Function) -> Function:
    """Mark a function as called by kernels only: it is compiled into them."""
    return _numba.njit(function, forceinline=True, **_OPTIONS)


@cache
def _say_that_it_takes_a_while() -> None:
    err.print("compiling the input pipeline for this machine: once, and it takes some 20 seconds")


@cache
def source_version(file: Path, root: Path = Path(__file__).parents[2]) -> str:
    """A checksum of a source file and of all files below `root` that it imports, directly or not.

    Code and constants that are compiled into a kernel come from there and from nowhere else.
    """
    sources, new = {file}, [file]
    while new:
        found = {module for module in _imports(new.pop(), root) if module not in sources}
        sources |= found
        new += found
    digest = hashlib.sha256()
    for source in sorted(sources):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


@cache
def _imports(file: Path, root: Path) -> list[Path]:
    """The modules below `root` that a file imports, anywhere in it."""
    paths = []
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            paths += [root.joinpath(*name.name.split(".")) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = file.parents[node.level - 1] if node.level else root
            module = base.joinpath(*(node.module or "").split("."))
            paths += [module, *(module / name.name for name in node.names)]
    return [found for path in paths for found in (path.with_suffix(".py"), path / "__init__.py") if found.is_file()]


def mapped(kind: Any) -> Any:
    """The type of a read-only column, such as one of the memory-mapped row index."""
    return types.Array(kind, 1, "C", readonly=True)


@_numba.extending.intrinsic  # type: ignore[untyped-decorator]
def pointer(_context: Any, address: Any) -> Any:
    """A pointer from an integer address, for `carray`: a kernel may read too many arrays to take them as arguments."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@_numba.extending.intrinsic  # type: ignore[untyped-decorator]
def prefetch(_context: Any, address: Any) -> Any:
    """Start loading the memory at an address into the CPU's cache, without waiting. Any address is allowed."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], cgutils.voidptr_t)
        number = cgutils.ir.IntType(32)
        kind = cgutils.ir.FunctionType(cgutils.ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, keep_near, data = number(0), number(3), number(1)
        builder.call(function, [pointer, read, keep_near, data])

    return types.void(types.int64), generate
