"""Functions that Numba compiles to machine code, once for each machine.

A kernel states the types of its arguments, so it is compiled (or, from the second time on, loaded from the cache) when
its module is imported, and there is one version of it. Importing such a module costs half a second for Numba itself:
modules that are used without making batches import kernels where they call them.
"""

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
intrinsic: Final = _numba.extending.intrinsic

_OPTIONS: Final = {"nogil": True, "error_model": "numpy"}

_PACKAGE: Final = Path(__file__).parent.parent
_SOURCES: Final = (
    "core/*.py",
    "tokens/*.py",
    "rows/format.py",
    "rows/kernels.py",
    "batches/*.py",
)
"""Where kernels are, and the constants that are compiled into them."""


@cache
def _version() -> str:
    digest = hashlib.sha256()
    for pattern in _SOURCES:
        for path in sorted(_PACKAGE.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@cache
def _say_that_it_takes_a_while() -> None:
    err.print("compiling the input pipeline for this machine: once, and it takes some 20 seconds", soft_wrap=True)


def _remove_outdated(folder: str | None, name: str) -> None:
    """Other versions of a function that is in the cache now."""
    for path in Path(folder).glob(f"*.{name}_*.nb?") if folder else ():
        if _version() not in path.name:
            path.unlink(missing_ok=True)


def kernel(*arguments: Any, returns: Any = types.void) -> Callable[[Function], Function]:
    """Compile a function for arguments of these types. Other threads go on while it runs."""

    def decorate(function: Function) -> Function:
        # Numba finds a cached function by its name and its own file, but a change of another file that is compiled into
        # it must also give a new one. So the version of all is part of the name.
        function.__qualname__ = f"{function.__name__}_{_version()}"
        signature = returns(*arguments)
        try:
            compiled = _numba.njit(signature, cache=True, **_OPTIONS)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            compiled = _numba.njit(signature, **_OPTIONS)(function)  # there is no folder to write to
        if not compiled.stats.cache_hits:
            _say_that_it_takes_a_while()
            _remove_outdated(compiled.stats.cache_path, function.__name__)
        return compiled

    return decorate


def part_of_kernels(function: Function) -> Function:
    """A function that only kernels call: it is compiled into them."""
    return _numba.njit(function, forceinline=True, **_OPTIONS)


def column(kind: Any) -> Any:
    """The type of an array of numbers that lie side by side."""
    return types.Array(kind, 1, "C")


def table(kind: Any) -> Any:
    return types.Array(kind, 2, "C")


def mapped(kind: Any) -> Any:
    """The type of a column that must not be written to, such as one of the row index."""
    return types.Array(kind, 1, "C", readonly=True)


def _pointer(_context: Any, address: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


pointer: Any = intrinsic(_pointer)
"""A pointer from a number, for `carray`: the arrays that a kernel reads may be too many to be arguments."""

carray: Any = _numba.carray


def _prefetch(_context: Any, address: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], cgutils.voidptr_t)
        number = cgutils.ir.IntType(32)
        kind = cgutils.ir.FunctionType(cgutils.ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, keep_near, data = number(0), number(3), number(1)
        builder.call(function, [place, read, keep_near, data])

    return types.void(types.int64), generate


prefetch: Any = intrinsic(_prefetch)
"""Begin to load what is at an address into the cache, and go on. It may be any address: this never fails."""
