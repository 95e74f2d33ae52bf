"""Digests of values and functions: the same in every process that runs the same program.

Covers: sets in any order; classes and functions of the program itself, by their code, also inside
what wraps them; Keras' objects by their configuration and weights.
Does not: read what other modules define (a digest has only its name).      Threads: any; pure.

cloudpickle's bytes are not a digest: each process numbers a class of `__main__` differently in
them, orders the texts of a set by another hash, and dates Keras' objects. Whatever a function
reaches counts by its value, at any depth, except what the process itself creates: the state of
random number generators, the seeds that Keras draws, the environment.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import cloudpickle

from tfos.many.keras_state import keras_state
from tfos.many.wrappers import code_behind, held_by, wrapped_in

_PLAIN = frozenset({str, int, float, bool, bytes, complex, type(None)})
_NO_CODE = {
    "__annotations_cache__",
    "__doc__",
    "__firstlineno__",
    "__slotnames__",
    "__static_attributes__",
}
"""Attributes of a class that may change without changing its behaviour; pickling adds
`__slotnames__`."""
_MAX_PARTS = 1_000_000
"""Number of parts of a value that are followed at every place, about a second. A graph of a few
objects may have too many paths to follow."""
_RANDOM = ("random", "numpy.random", "tensorflow.python.ops.stateful_random_ops")
"""Modules whose objects are generators: without a seed they differ in each process."""


def value_digest(value: Any) -> bytes:
    """Return a digest of a value.

    Raises:
        Exception: any error of a part that cannot be pickled.
    """
    walk = _Walk(frozenset({"__main__"}), has_generators=True)
    walk.put(walk.pickled(value))
    return walk.finished()


def function_digest(function: Callable[..., Any]) -> str:
    """Return a digest of a function's code, its defaults and closure, and of what it names.

    Functions and classes of the same module count, also wrapped ones; so do the module's values.
    Those of other modules count by name. A value that cannot be pickled, such as a lock, counts by
    its type, as do random number generators and the environment.

    Args:
        function: a function, class, method, partial or callable object.
    """
    walk = _Walk(frozenset({"__main__", str(code_behind(function).__module__)}))
    if isinstance(function, types.MethodType):
        walk.put(walk.state(function.__func__), walk.state(function.__self__))
    else:
        walk.put(walk.state(function))
    return walk.finished().hex()


class _Walk:
    """One digest: every function and class of the program once, numbered as they are met.

    Args:
        modules: modules whose functions and classes count by their code.
        has_generators: whether generators count by their state, because the user chose them.
        outer: the walk that met the set that contains this member.
    """

    def __init__(
        self,
        modules: frozenset[str],
        *,
        has_generators: bool = False,
        outer: _Walk | None = None,
    ) -> None:
        self.has_generators = has_generators
        self._modules = modules
        self._found = hashlib.sha256()
        self._numbers: dict[int, int] = dict(outer._numbers) if outer is not None else {}
        self._met: list[Any] = []
        """Keeps numbered objects alive: another object could get the same id."""
        self._waiting: deque[Any] = deque()
        self._open: set[int] = set(outer._open) if outer is not None else set()
        """Ids of objects in progress, which may contain themselves."""

    def put(self, *parts: object) -> None:
        """Add parts whose `repr` is the same in every process."""
        self._found.update(repr(parts).encode(errors="surrogatepass"))

    def finished(self) -> bytes:
        """Add the waiting parts; return the digest."""
        while self._waiting:
            each = self._waiting.popleft()
            if isinstance(each, type):
                self._put_class(each)
            else:
                self._put_function(each)
        return self._found.digest()

    def pickled(self, value: Any) -> bytes:
        """Return a digest of a value's pickle; its functions and classes wait.

        A part at two places equals two equal parts, except in a value that contains itself or has
        more than `_MAX_PARTS`.
        """
        try:
            return self._pickled(value, has_memo=False)
        except Exception:  # noqa: BLE001 - of what no pickle takes, the second attempt raises it
            return self._pickled(value, has_memo=True)

    def _pickled(self, value: Any, *, has_memo: bool) -> bytes:
        found = hashlib.sha256()
        file = types.SimpleNamespace(write=found.update)
        _DigestPickler(file, self, has_memo=has_memo).dump(value)
        return found.digest()

    def state(self, value: Any) -> bytes:
        """Return a digest of a value; if it cannot be pickled, of its parts, else of its type.

        Locks, files and connections are not data: no later process has the same ones.
        """
        try:
            return self.pickled(value)
        except Exception:  # noqa: BLE001 - whatever a class raises that refuses to be pickled
            parts = () if id(value) in self._open else tuple(self._parts(value))
        self._open.add(id(value))
        try:
            found = [self.reference(type(value)), *map(self.state, parts)]
        finally:
            self._open.discard(id(value))
        return hashlib.sha256(repr(found).encode()).digest()

    def inside(self, value: Any, parts: dict[str, Any]) -> bytes:
        """Return a digest of a value's representation, which may lead to the value itself.

        Args:
            value: the value; it is not pickled.
            parts: its parts that count.
        """
        if id(value) in self._open:
            return b"again"
        self._open.add(id(value))
        try:
            return self.state(parts)
        finally:
            self._open.discard(id(value))

    def reference(self, value: types.FunctionType | type) -> tuple[object, ...]:
        """Return the representation of a function or class; its code waits if it counts."""
        number = self._numbers.get(id(value))
        if number is None and self.is_named(value):
            return "named", value.__module__, value.__qualname__
        if number is None:
            number = self._numbers[id(value)] = len(self._numbers)
            self._met.append(value)
            self._waiting.append(value)
        return "code", number

    def is_named(self, value: Any) -> bool:
        """Whether its name represents it: every process finds it in its module."""
        module = getattr(value, "__module__", None)
        if module in self._modules:
            return False
        found: Any = sys.modules.get(str(module))
        for part in str(getattr(value, "__qualname__", "")).split("."):
            found = getattr(found, part, None)
        return found is value

    def of_set(self, members: Iterable[Any], name: str, mark: int) -> tuple[object, ...]:
        """Return the representation of a set, whatever the order of its members.

        Args:
            members: members of the set.
            name: name of its class.
            mark: its id.
        """
        if mark in self._open:
            return name, "again"
        self._open.add(mark)
        try:
            return name, sorted(map(self._of_member, members))
        finally:
            self._open.discard(mark)

    def _of_member(self, value: Any) -> str:
        if type(value) in _PLAIN:
            return repr(value)
        inner = _Walk(self._modules, has_generators=self.has_generators, outer=self)
        inner.put(inner.pickled(value))
        return inner.finished().hex()

    def is_own(self, value: Any) -> bool:
        """Whether the class of this object is the program's own."""
        return type(value).__module__ in self._modules

    def _put_class(self, value: type) -> None:
        self.put(value.__qualname__, self.reference(type(value)))
        self.put(*map(self.reference, value.__bases__))
        self._put_named((name, vars(value)[name]) for name in sorted(vars(value).keys() - _NO_CODE))

    def _put_function(self, value: types.FunctionType) -> None:
        self.put(value.__qualname__, _code_parts(value.__code__))
        defaults = (*(value.__defaults__ or ()), *sorted((value.__kwdefaults__ or {}).items()))
        cells = tuple(_content(cell) for cell in value.__closure__ or ())
        self.put(*map(self.state, (*cells, *defaults)))
        known = value.__globals__
        # What a wrapper of another module names or keeps belongs to that module, whatever name it
        # has taken over: a count of calls, for example.
        if {value.__module__, known.get("__name__", value.__module__)} <= self._modules:
            own = sorted(vars(value).keys() - {"__wrapped__"})
            self._put_named((name, vars(value)[name]) for name in own)
            names = dict.fromkeys(_names_in(value.__code__))
            self._put_named((name, known[name]) for name in names if name in known)

    def _put_named(self, named: Iterable[tuple[str, Any]]) -> None:
        for name, each in named:
            self.put(name, self.state(each))

    def _parts(self, value: Any) -> Iterable[Any]:
        if isinstance(value, list | tuple):
            return value
        if isinstance(value, dict):
            return value.items()
        if isinstance(value, types.MethodType):
            return value.__func__, value.__self__
        if isinstance(value, functools.partial):
            return value.func, value.args, value.keywords
        return _attributes(value) if self.is_own(value) else ()


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Return an object's attributes by name, also in the slots of its classes."""
    found: list[tuple[str, Any]] = []
    # A __getattr__ of the class, as a proxy has it, may raise anything for what is not set.
    with contextlib.suppress(AttributeError):
        found += object.__getattribute__(value, "__dict__").items()
    for each in type(value).__mro__:
        for name, kind in vars(each).items():
            if isinstance(kind, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # not set
                    found.append((name, kind.__get__(value)))
    return found


class _DigestPickler(cloudpickle.Pickler):  # type: ignore[misc]  # it ships no types
    """Pickles a representation of each object whose bytes differ between processes.

    Args:
        file: takes the bytes.
        walk: walk of the digest.
        has_memo: whether a repeated object is written as its number. Otherwise an object that
            contains itself raises, as does one with more than `_MAX_PARTS`.
    """

    def __init__(self, file: Any, walk: _Walk, *, has_memo: bool) -> None:
        super().__init__(file, protocol=5)
        self._walk = walk
        self.fast = not has_memo
        self._parts = itertools.count() if not has_memo else itertools.repeat(0)

    def persistent_id(self, value: Any) -> Any:
        """Return the representation of a set, module, function or class; None: its own bytes."""
        if next(self._parts) >= _MAX_PARTS:
            raise OverflowError(f"more than {_MAX_PARTS} parts")
        if isinstance(value, str | bytes) and type(value) in _PLAIN:
            return _text_number(value)
        if type(value) in _PLAIN:
            return None
        if isinstance(value, set | frozenset):
            return self._walk.of_set(value, type(value).__qualname__, id(value))
        if isinstance(value, types.ModuleType):
            return "module", value.__name__
        if isinstance(value, types.FunctionType | type):
            return self._walk.reference(value)
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Return how to pickle an object that is not plain data."""
        if isinstance(obj, TypeVar):
            return tuple, (("TypeVar", obj.__name__, obj.__bound__, obj.__constraints__),)
        if callable(obj) and hasattr(obj, "__qualname__") and self._walk.is_named(obj):
            return tuple, (("named", obj.__module__, obj.__qualname__),)
        if not self._walk.is_own(obj) and (wrapped := wrapped_in(obj)):
            return tuple, ((type(obj), *wrapped, self._walk.inside(obj, held_by(obj))),)
        if not self._walk.has_generators and _is_of_process(type(obj)):
            own = vars(obj).items() if self._walk.is_own(obj) else ()
            return tuple, ((type(obj), [each for each in own if each[0] != "gauss_next"]),)
        if type(obj).__qualname__ == "Broadcast" and type(obj).__module__.startswith("pyspark."):
            return tuple, ((type(obj), obj.value),)  # its pickle is a number
        if (parts := keras_state(obj, self._walk.is_own)) is not None:
            return tuple, ((type(obj), self._walk.inside(obj, parts)),)
        return super().reducer_override(obj)


def _text_number(value: str | bytes) -> int:
    """Return a number for a text or bytes: pickle writes it whole each time.

    Pickle writes "again" for a text that it has met, so equal values would differ by the texts
    that they share.
    """
    is_text = isinstance(value, str)
    data = value.encode(errors="surrogatepass") if isinstance(value, str) else value
    return 2 * int.from_bytes(hashlib.sha256(data).digest()) + is_text


def _is_of_process(kind: type) -> bool:
    """Whether objects of a class hold what the process creates: a generator, the environment."""
    modules = [f"{base.__module__}." for base in kind.__mro__]
    return issubclass(kind, os._Environ) or any(
        module.startswith(f"{each}.") for module in modules for each in _RANDOM
    )


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code looks up, also in functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _code_parts(code: types.CodeType) -> tuple[object, ...]:
    """Return the content of code, as parts whose `repr` is the same in every process."""
    names = (code.co_names, code.co_varnames, code.co_freevars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    return (code.co_code, code.co_exceptiontable, names, counts, *map(_constant, code.co_consts))


def _constant(value: Any) -> object:
    if isinstance(value, types.CodeType):
        return _code_parts(value)
    if isinstance(value, frozenset):
        return "frozenset", sorted(repr(_constant(each)) for each in value)
    return tuple(map(_constant, value)) if isinstance(value, tuple) else value


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
