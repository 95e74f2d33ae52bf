"""Field texts: `help()` of a record shows the text that stands below each of its fields.

Covers: the decorator `with_field_texts` for dataclasses and msgspec's Structs.
Does not: check that fields have texts (tests.architecture).
Threads: any; a second reading of the source gives the same text.

Python keeps no docstrings of fields. Nodes import these classes a thousand times and nobody reads
their help there, so the source is read when somebody asks.
"""

from __future__ import annotations

from typing import Any, TypeVar

Record = TypeVar("Record", bound=type[Any])


class _DocWithFields:
    """Stands for a class's `__doc__`: its docstring, then its fields."""

    def __init__(self, kind: type[Any], doc: str) -> None:
        self._kind = kind
        self._doc = doc

    def __get__(self, instance: object, owner: type[Any] | None = None) -> str:
        if owner is not self._kind:
            return self._doc
        texts = field_texts(self._kind)
        if not texts:
            return self._doc
        lines = [f"    {name}: {text}" for name, text in texts.items()]
        return "\n".join([self._doc.rstrip(), "", "    Fields:", *(f"    {x}" for x in lines)])


def with_field_texts(kind: Record) -> Record:
    """Let `help(kind)` show the texts of the fields."""
    if kind.__doc__:  # none with python -OO
        kind.__doc__ = _DocWithFields(kind, kind.__doc__)  # type: ignore[assignment]  # lazy
    return kind


def field_texts(kind: type[Any]) -> dict[str, str]:
    """Return the text below each field of a record, one line each, by name; {} without a source."""
    import ast
    import inspect
    import textwrap

    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return {}
    record = tree.body[0]
    texts: dict[str, str] = {}
    if not isinstance(record, ast.ClassDef):
        return texts
    for field, text in zip(record.body, record.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            texts[field.target.id] = " ".join(str(text.value.value).split())
    return texts
