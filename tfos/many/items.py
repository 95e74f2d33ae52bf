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


@dataclass(frozen=True, slots=True)
class ListedItems:
    """The items of a run by their position, each with a name of its own."""

    names: tuple[str, ...]
    pickled: tuple[bytes, ...]

    @property
    def digest(self) -> str:
        """The same for the same items in the same order."""
        found = hashlib.sha256()
        for name, data in zip(self.names, self.pickled, strict=True):
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
    """Return a digest of a function's code, its defaults and closure, and of what it calls.

    Functions of the same module that it calls count; those of other modules do not.
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
    called = (value.__globals__.get(name) for name in value.__code__.co_names)
    return functions + [
        each
        for each in called
        if isinstance(each, types.FunctionType) and each.__module__ == value.__module__
    ]


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
