"""The items of a run: their names, pickles and digests.

Covers: the forms in which a user may pass items.
Does not: touch Spark (tfos.many.groups does).      Threads: any; pure.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import cloudpickle

from tfos.errors import NotPicklable, SettingsError
from tfos.many.digests import value_digest

_MAX_NAME_CHARS = 120
_OTHER_NAMES = "pass a mapping from different names to items"
_PLAIN = (str, Number)  # numpy's numbers, too


@dataclass(frozen=True, slots=True)
class ListedItems:
    """The items of a run by their position, each with its own name."""

    names: tuple[str, ...]
    values: tuple[Any, ...]
    pickled: tuple[bytes, ...]

    @property
    def digests(self) -> tuple[str, ...]:
        """Digest of each item's value; the same in every process.

        Raises:
            NotPicklable: names the item.
        """
        return tuple(map(_digest, self.names, self.values))


def digest_of(items: Iterable[tuple[str, str]]) -> str:
    """Return a digest: equal for the same items in the same order.

    Args:
        items: name and digest of each; for groups only the keys, with empty digests, since their
            rows may change.
    """
    found = hashlib.sha256()
    for name, digest in items:
        found.update(f"{name}\0{digest}\0".encode())
    return found.hexdigest()


def check_kind(given: object) -> None:
    """Refuse what is no list or mapping of items.

    Raises:
        SettingsError: says what to pass.
    """
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise SettingsError(
            "items must be a list of items, a mapping from names to items or a grouped DataFrame "
            f"(df.groupBy(...)), got {type(given).__qualname__}"
        )
    if type(given).__module__.startswith("pandas."):
        raise SettingsError(
            f"items is a pandas {type(given).__qualname__}, which iterates over names or cells: "
            "pass df.to_dict('records'), dict(list(df.groupby(key))) or series.to_list()"
        )


def items_of(given: Iterable[Any] | Mapping[Any, Any]) -> ListedItems:
    """Return the items with names and pickles.

    Args:
        given: items, or a mapping from their names.

    Raises:
        SettingsError: there are no items, or names are equal.
        NotPicklable: names the item.
    """
    if isinstance(given, Mapping):
        pairs = [(shown_name(name), item) for name, item in given.items()]
    else:
        pairs = list(_named(given))
    names = tuple(name for name, _ in pairs)
    check_names(names)
    pickled = tuple(_pickled(name, item) for name, item in pairs)
    return ListedItems(names, tuple(item for _, item in pairs), pickled)


def check_names(names: tuple[str, ...], advice: str = _OTHER_NAMES) -> None:
    """Refuse an empty list of items, and items with equal names.

    Args:
        names: names of all items.
        advice: how to give them other names.
    """
    if not names:
        raise SettingsError("there are no items to train; pass at least one")
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise SettingsError(f"{count} items are named {name!r}; {advice}")


def shown_name(value: Any) -> str:
    """Return a name as text of one line."""
    parts = value if isinstance(value, tuple) else (value,)
    text = ", ".join(str(part) for part in parts)
    # A file name that is not UTF-8 has characters that no message and no JSON can carry.
    shown = text.encode(errors="backslashreplace").decode()
    if len(shown) > _MAX_NAME_CHARS or shown != text:
        # A hash tells shortened or rewritten names apart.
        rest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]
        shown = f"{shown[: _MAX_NAME_CHARS - 9]}~{rest}"
    return shown.replace("\n", " ")


def _named(given: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    items = list(given)
    plain = all(
        isinstance(each, _PLAIN)
        or (isinstance(each, tuple) and all(isinstance(part, _PLAIN) for part in each))
        for each in items
    )
    names = [shown_name(each) for each in items] if plain else []
    names = _told_apart(names)
    if len(set(names)) < len(items):
        names = [f"item {number}" for number in range(len(items))]
    yield from zip(names, items, strict=True)


def _told_apart(names: Sequence[str]) -> list[str]:
    """Return names in which the second `x` is `x (2)`: the other results keep their names."""
    counts: Counter[str] = Counter()
    found = []
    for name in names:
        counts[name] += 1
        number = f" ({counts[name]})" if counts[name] > 1 else ""
        found.append(f"{name[: _MAX_NAME_CHARS - len(number)]}{number}" if number else name)
    return found


def _pickled(name: str, item: Any) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(item)
        return data
    except Exception as error:
        raise NotPicklable(
            f"item {name!r} ({type(item).__qualname__}) cannot be pickled: {error}. Pass plain "
            "data and open files, sessions and connections inside the function."
        ) from error


def _digest(name: str, item: Any) -> str:
    try:
        return value_digest(item).hex()
    except Exception as error:
        raise NotPicklable(
            f"results_dir: item {name!r} ({type(item).__qualname__}) cannot be compared with an "
            f"earlier run's: {error}. Pass plain data, or leave results_dir out"
        ) from error
