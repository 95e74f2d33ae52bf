"""Namespace: a program's arguments as attributes, from any kind of source. Pure."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfos.errors import SettingsError


class Namespace:
    """Arguments as attributes; `name in args` says whether there is one.

    A Namespace of a list iterates over its words and equals it, so that parsers accept it as the
    list.

    Args:
        d: a dict, a Namespace, an argparse.Namespace; or a list, which becomes `argv`.

    Raises:
        SettingsError: anything else.
    """

    argv: list[str] | None = None

    def __init__(self, d: Any) -> None:
        kinds = (Mapping, Sequence, argparse.Namespace, Namespace)
        if isinstance(d, str) or not isinstance(d, kinds):
            raise SettingsError(
                f"arguments must be a dict, a list, a Namespace or an argparse.Namespace, got "
                f"{type(d).__qualname__}"
            )
        if isinstance(d, Mapping):
            self.__dict__.update(d)
        elif isinstance(d, Sequence):
            self.argv = list(d)
        else:
            self.__dict__.update(vars(d))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __iter__(self) -> Iterator[str]:
        return iter(self.argv or vars(self))

    def __contains__(self, name: object) -> bool:
        return name in vars(self)

    def __eq__(self, other: object) -> bool:
        if self.argv and isinstance(other, list):
            return self.argv == other
        return isinstance(other, Namespace) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return repr(self.argv) if self.argv else f"Namespace({vars(self)})"
