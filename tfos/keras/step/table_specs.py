"""Tables of a model: its Embedding layers, and their tables' entries in the manifest.

Covers: which layers share a table, the rule that a table takes from the model's optimizer.
Does not: hold rows (ps), train them (tfos.keras.step.tables).      Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from ps.errors import PushError
from ps.manifest.rule_spec import RuleConfig
from ps.manifest.table_spec import TableSpec
from tfos.errors import UnsupportedModel
from tfos.keras.embedding.layer import Embedding, embeddings_in
from tfos.keras.embedding.sources import of_layers
from tfos.keras.embedding.table_settings import TableSettings, differences
from tfos.keras.step import optimizers


def embeddings_of(model: Any) -> tuple[Embedding, ...]:
    """Return the model's Embedding layers, nested ones included.

    Raises:
        UnsupportedModel: two layers of one table have different settings.
    """
    found = tuple(embeddings_in(model))
    by_table: dict[str, Embedding] = {}
    for layer in found:
        other = by_table.setdefault(layer.table, layer)
        settings = other.settings
        if differing := differences(settings, layer.settings, settings.field_names):
            raise UnsupportedModel(
                f"the layers {other.name!r} and {layer.name!r} share the table {layer.table!r} but "
                f"differ in {differing}; give both the same settings, or different tables"
            )
    return found


@contextmanager
def naming_layers(layers: Sequence[Embedding]) -> Iterator[None]:
    """Add the names of the model's layers to what servers refuse about a table.

    Raises:
        PushError: an error of the same class, with a longer message.
    """
    try:
        yield
    except PushError as error:
        own = sorted({layer.name for layer in layers if layer.table == error.details.get("table")})
        if not own:
            raise
        raise of_layers(error, own) from error


def table_specs(layers: Sequence[Embedding], optimizer: Any) -> tuple[TableSpec, ...]:
    """Return the manifest's entry of each table, by name.

    Args:
        layers: layers of one model.
        optimizer: the model's optimizer; tables without a rule of their own use its rule.

    Raises:
        UnsupportedModel: the optimizer has a setting that rows of a batch alone cannot follow.
        SettingsError: a setting of a table that cannot work.
    """
    settings = {layer.table: layer.settings for layer in layers}
    if any(each.rule is None for each in settings.values()):
        _check_lazy(optimizer)
    return tuple(
        _spec(layers, each, _rule_for_rows(name, layers, optimizer) if each.rule is None else None)
        for name, each in sorted(settings.items())
    )


def specs_of_rows(layers: Sequence[Embedding]) -> tuple[TableSpec, ...]:
    """Return the entry of each table for its rows alone: of a model that need not be compiled.

    Args:
        layers: layers of one model.
    """
    settings = {layer.table: layer.settings for layer in layers}
    return tuple(_spec(layers, each, None) for each in settings.values())


def _spec(
    layers: Sequence[Embedding], settings: TableSettings, default_rule: RuleConfig | None
) -> TableSpec:
    found = settings.spec(default_rule)
    return msgspec.structs.replace(found, id_source=_id_source(settings.name, layers))


def _id_source(table: str, layers: Sequence[Embedding]) -> str:
    """Return what the ids of a table are made of; "any" if its layers differ or do not know."""
    found = {layer.takes_text for layer in layers if layer.table == table}
    if len(found) > 1 or None in found:
        return "any"
    return "strings" if found == {True} else "integers"


def learn_id_sources(layers: Sequence[Embedding], specs: Sequence[TableSpec]) -> None:
    """Tell layers that were not called yet what their tables' ids are: they refuse others.

    Args:
        layers: layers of one model.
        specs: the servers' tables.
    """
    found = {spec.name: spec.id_source for spec in specs if spec.id_source != "any"}
    for layer in layers:
        if layer.takes_text is None and layer.table in found:
            layer.takes_text = found[layer.table] == "strings"


def _rule_for_rows(table: str, layers: Sequence[Embedding], optimizer: Any) -> RuleConfig:
    """Return the optimizer's rule with the clipping that a table's gradient gets."""
    inner = optimizers.unwrap(optimizer)
    decays = bool(inner.weight_decay) and _has_decay(table, layers, inner)
    rule = optimizers.rule_of(optimizer, consistency="async", decays=decays)
    limits = {
        name: float(limit) for name in ("clipvalue", "clipnorm") if (limit := getattr(inner, name))
    }
    return msgspec.structs.replace(rule, **limits)


def _has_decay(table: str, layers: Sequence[Embedding], inner: Any) -> bool:
    """Whether the rows of a table decay: `exclude_from_weight_decay` may name a layer's weight."""
    found = {
        layer.name: bool(inner._use_weight_decay(layer.anchor.value))
        for layer in layers
        if layer.table == table and layer.trainable and layer.anchor is not None
    }
    if len(set(found.values())) > 1:
        excluded = [name for name, decays in found.items() if not decays]
        raise UnsupportedModel(
            f"the layers {sorted(found)} share the table {table!r}, but exclude_from_weight_decay "
            f"names only the weights of {excluded}; exclude all of them, or give them tables of "
            "their own"
        )
    return all(found.values())


def _check_lazy(optimizer: Any) -> None:
    inner = optimizers.unwrap(optimizer)
    kind = type(inner).__name__
    if inner.global_clipnorm:
        raise UnsupportedModel(
            f"{kind}(global_clipnorm={inner.global_clipnorm}) needs the norm of all gradients, "
            "but rows of tables are clipped on their own. Use clipnorm, which for a table is the "
            "norm of its rows' gradients in a batch, or give each Embedding a rule of its own"
        )
    if inner.use_ema:
        raise UnsupportedModel(
            f"{kind}(use_ema=True) updates the averages of all rows at every step, but a table "
            "updates only the rows of a batch; drop use_ema, or give each Embedding a rule of "
            "its own"
        )
