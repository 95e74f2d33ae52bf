"""Params of spark.ml with their setters and getters.

Covers: a Param of a class, the two methods that users of spark.ml expect beside it.
Does not: have defaults or checks: the classes do.
Runs in: the driver. Imports pyspark inside a function only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

Owner = TypeVar("Owner")
Value = TypeVar("Value")
Taken = TypeVar("Taken", contravariant=True)
Found = TypeVar("Found", covariant=True)


class Setter(Protocol[Taken]):
    """A method that takes a value and returns its object."""

    def __get__(self, owner: Owner, kind: Any = None, /) -> Callable[[Taken], Owner]:
        """Return the method of an object."""


class Getter(Protocol[Found]):
    """A method that returns a value."""

    def __get__(self, owner: object, kind: Any = None, /) -> Callable[[], Found]:
        """Return the method of an object."""


def param(name: str, doc: str, convert: Callable[[Any], Any]) -> Any:
    """Return a Param, to be an attribute of a class.

    Args:
        name: the attribute's name.
        doc: what the Param says.
        convert: makes the value of what a user sets.
    """
    from pyspark.ml.param import Param, Params

    return Param(Params._dummy(), name, doc, typeConverter=convert)


def accessors(
    name: str, kind: type[Value], title: str | None = None
) -> tuple[Setter[Value], Getter[Value]]:
    """Return the setter and the getter of a Param, to be methods of its class.

    Args:
        name: the Param's name.
        kind: its value's kind.
        title: what follows `set` and `get`; None: the name, each of its words in capitals.
    """
    return setter(name, kind, title), getter(name, kind, title)


def setter(name: str, kind: type[Value], title: str | None = None) -> Setter[Value]:
    """Return the setter of a Param alone.

    Args:
        name: see `accessors`.
        kind: see `accessors`.
        title: see `accessors`.
    """

    def put(self: Any, value: Value) -> Any:
        return self._set(**{name: value})

    put.__name__ = put.__qualname__ = f"set{title or _title(name)}"
    put.__doc__ = f"Set `{name}`, and return this object."
    put.__annotations__ = {"value": kind}
    return cast("Setter[Value]", put)


def getter(name: str, kind: type[Value], title: str | None = None) -> Getter[Value]:
    """Return the getter of a Param alone.

    Args:
        name: see `accessors`.
        kind: see `accessors`.
        title: see `accessors`.
    """

    def get(self: Any) -> Any:
        return self.getOrDefault(getattr(self, name))

    get.__name__ = get.__qualname__ = f"get{title or _title(name)}"
    get.__doc__ = f"Return `{name}`."
    get.__annotations__ = {"return": kind}
    return cast("Getter[Value]", get)


def _title(name: str) -> str:
    return re.sub(r"(?:^|_)([a-z])", lambda found: found[1].upper(), name)
