"""The items of a run: names, pickles, digests; the digest of the function that trains them.

Covers: what a user may pass as items, what tells one set of items or one function from another.
Does not: touch Spark (tfos.many.groups does).      Threads: any; pure.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle

from tfos.errors import NotPicklable, SettingsError

_MAX_NAME_CHARS = 120
_MAX_FUNCTIONS = 200
_PLAIN = (str, int, float, bool)
_NO_CODE = {"__doc__", "__firstlineno__"}
"""Of a class: may change while what it does stays."""


@dataclass(frozen=True, slots=True)
class ListedItems:
    """The items of a run by their position, each with a name of its own."""

    names: tuple[str, ...]
    pickled: tuple[bytes, ...]

    @property
    def digest(self) -> str:
        """The same for the same items in the same order."""
        return digest_of(zip(self.names, self.pickled, strict=True))


def digest_of(items: Iterable[tuple[str, bytes]]) -> str:
    """Return the same for the same items in the same order.

    Args:
        items: name and pickle of each; of groups the keys alone, without a pickle, since rows have
            digests of their own.
    """
    found = hashlib.sha256()
    for name, data in items:
        found.update(name.encode() + b"\0" + hashlib.sha256(data).digest())
    return found.hexdigest()


def items_of(given: Iterable[Any] | Mapping[Any, Any]) -> ListedItems:
    """Return names and pickles.

    Args:
        given: items, or a mapping from their names.

    Raises:
        SettingsError: there is none, or names are equal.
        NotPicklable: names the item.
    """
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise SettingsError(
            "items must be a list of items, a mapping from names to items or a grouped DataFrame "
            f"(df.groupBy(...)), got {type(given).__qualname__}"
        )
    if isinstance(given, Mapping):
        pairs = [(shown_name(name), item) for name, item in given.items()]
    else:
        pairs = list(_named(given))
    names = tuple(name for name, _ in pairs)
    check_names(names)
    return ListedItems(names, tuple(_pickled(name, item) for name, item in pairs))


def check_names(names: tuple[str, ...]) -> None:
    """Refuse no items, and items with equal names."""
    if not names:
        raise SettingsError("there are no items to train; pass at least one")
    if len(set(names)) < len(names):
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise SettingsError(
            f"two items are named {twice!r}; pass a mapping from different names to items"
        )


def shown_name(value: Any) -> str:
    """Return a name as text of one line."""
    parts = value if isinstance(value, tuple) else (value,)
    text = ", ".join(str(part) for part in parts)
    return text[:_MAX_NAME_CHARS].replace("\n", " ")


def _named(given: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    items = list(given)
    plain = all(
        isinstance(each, _PLAIN)
        or (isinstance(each, tuple) and all(isinstance(part, _PLAIN) for part in each))
        for each in items
    )
    names = [shown_name(each) for each in items] if plain else []
    if len(set(names)) < len(items):
        names = [f"item {number}" for number in range(len(items))]
    yield from zip(names, items, strict=True)


def _pickled(name: str, item: Any) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(item)
        return data
    except Exception as error:
        raise NotPicklable(
            f"item {name!r} ({type(item).__qualname__}) cannot be pickled: {error}. Pass plain "
            "data and open files, sessions and connections inside the function."
        ) from error


def function_digest(function: Callable[..., Any]) -> str:
    """Return a digest of a function's code, its defaults and closure, and of what it names.

    Functions and classes of the same module count, and the module's plain values (numbers, texts,
    lists, sets and dicts of these); what other modules have does not.
    """
    found = hashlib.sha256()
    waiting: list[Any] = [function]
    seen: set[int] = set()
    while waiting and len(seen) < _MAX_FUNCTIONS:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        waiting += _feed(found, each)
    return found.hexdigest()


def _feed(found: Any, value: Any) -> list[Any]:
    """Add one value; return the functions that it refers to."""
    if isinstance(value, functools.partial):
        found.update(_digest_of((value.args, sorted(value.keywords.items()))))
        return [value.func]
    if isinstance(value, types.MethodType):
        found.update(_digest_of(vars(value.__self__) if hasattr(value.__self__, "__dict__") else 0))
        return [value.__func__]
    if isinstance(value, type):
        names = sorted(vars(value).keys() - _NO_CODE)
        members = [(name, vars(value)[name]) for name in names]
        found.update(repr((value.__qualname__, [_plain_text(pair) for pair in members])).encode())
        bases = [base for base in value.__bases__ if base.__module__ == value.__module__]
        return bases + [each for _, each in members if isinstance(each, types.FunctionType)]
    if not isinstance(value, types.FunctionType):
        found.update(_digest_of(getattr(value, "__dict__", repr(type(value)))))
        call = getattr(type(value), "__call__", None)  # noqa: B004 - the function itself is wanted
        return [call] if isinstance(call, types.FunctionType) else []
    found.update(value.__qualname__.encode())
    _feed_code(found, value.__code__)
    cells = [_content(cell) for cell in value.__closure__ or ()]
    data = [*cells, *(value.__defaults__ or ()), *sorted((value.__kwdefaults__ or {}).items())]
    functions = [each for each in data if isinstance(each, types.FunctionType)]
    found.update(_digest_of([each for each in data if not isinstance(each, types.FunctionType)]))
    known = value.__globals__
    named = [(name, known[name]) for name in _names_in(value.__code__) if name in known]
    found.update(repr([_plain_text(pair) for pair in named]).encode())
    return functions + [
        each
        for _, each in named
        if isinstance(each, types.FunctionType | type) and each.__module__ == value.__module__
    ]


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code looks up, also in functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _plain_text(value: Any) -> str:
    """Return plain data as text, the same in every process; empty for anything else inside it."""
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(_plain_text, value))})"
    if isinstance(value, set | frozenset):
        return f"set({', '.join(sorted(map(_plain_text, value)))})"
    if isinstance(value, dict):
        return f"dict({', '.join(map(_plain_text, value.items()))})"
    return repr(value) if type(value) in (*_PLAIN, bytes, complex, type(None)) else ""


def _feed_code(found: Any, code: types.CodeType) -> None:
    found.update(code.co_code)
    found.update(repr((code.co_names, code.co_varnames)).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _feed_code(found, constant)
        elif isinstance(constant, frozenset):
            found.update(repr(sorted(map(repr, constant))).encode())
        else:
            found.update(repr(constant).encode())


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _digest_of(value: Any) -> bytes:
    try:
        return hashlib.sha256(cloudpickle.dumps(value)).digest()
    except Exception:  # noqa: BLE001 - the run itself names what cannot be pickled
        return b""
