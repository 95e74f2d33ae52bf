"""Job settings: what a job file says of a cluster, in Spark's settings `spark.tfos.*`.

Covers: their names, from texts to resources, inputs and output; a call's own arguments come first.
Does not: read or write job files (tfos.submit), check the values against the cluster
(tfos.slots.resources, tfos.config).
Runs in: the driver; `tfos submit`.      Pure.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfos.config import ClusterConfig
from tfos.errors import SettingsError
from tfos.files.inputs import NAME, InputFiles
from tfos.slots.resources import PS_NODES, Resources, RoleResources, group_of
from tfos.topology import Plan

PREFIX = "spark.tfos."
_ROLE_FIELDS = {
    "ps": ("cores", "memory"),
    "workers": ("cores", "memory", "gpus"),
}
_INPUT = re.compile(rf"inputs\.({NAME.pattern})\.(path|mode|share)")
_KNOWN = (
    *(f"{role}.{field}" for role, fields in _ROLE_FIELDS.items() for field in fields),
    *("placement", "output", "inputs.NAME.path", "inputs.NAME.mode", "inputs.NAME.share"),
)


def of_job(
    resources: RoleResources, inputs: Sequence[InputFiles] = (), output: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield the settings that state these values; what is not stated is left out.

    Args:
        resources: resources of the roles.
        inputs: the job's inputs.
        output: the job's output; empty: none.
    """
    for role, fields in _ROLE_FIELDS.items():
        asked = getattr(resources, role) or Resources()
        for field in fields:
            if (value := getattr(asked, field)) is not None:
                yield f"{PREFIX}{role}.{field}", str(value)
    if resources.placement:
        yield f"{PREFIX}placement", resources.placement
    for each in inputs:
        for field in ("path", "mode", "share"):
            yield f"{PREFIX}inputs.{each.name}.{field}", getattr(each, field)
    if output:
        yield f"{PREFIX}output", output


def applied(
    conf: Mapping[str, str], resources: RoleResources, config: ClusterConfig, plan: Plan
) -> tuple[RoleResources, ClusterConfig]:
    """Return a call's resources and configuration, filled in by the settings where it is silent.

    A job's settings are for all of its clusters. Those of `ps` do not apply to a cluster without
    servers on executors, nor `workers.gpus` to one whose workers see none.

    Args:
        conf: Spark's settings.
        resources: the call's resources.
        config: the call's config.
        plan: the call's nodes.

    Raises:
        SettingsError: a setting is unknown, or its value is refused.
    """
    found = stated(conf)
    if not found:
        return resources, config
    if config.gpu_resource is None:
        found.pop("workers.gpus", None)
    of_servers = _role("ps", found)
    if not any(group_of(node) == PS_NODES for node in plan.on_executors):
        of_servers = None
    filled = RoleResources(
        ps=resources.ps or of_servers,
        workers=resources.workers or _role("workers", found),
        placement=resources.placement or found.get("placement"),  # type: ignore[arg-type]
    )
    inputs = config.inputs or tuple(_inputs(found))
    output = config.output or found.get("output")
    return filled, dataclasses.replace(config, inputs=inputs, output=output)


def stated(conf: Mapping[str, str]) -> dict[str, str]:
    """Return what Spark's settings say of a job's clusters, by the names after PREFIX.

    Args:
        conf: Spark's settings.

    Raises:
        SettingsError: one of them is unknown.
    """
    found = {key[len(PREFIX) :]: value for key, value in conf.items() if key.startswith(PREFIX)}
    for name in found:
        if name not in _KNOWN and not _INPUT.fullmatch(name):
            near = difflib.get_close_matches(name, _KNOWN, n=1)
            advice = (
                f"did you mean {PREFIX}{near[0]}?" if near else f"known are {', '.join(_KNOWN)}"
            )
            raise SettingsError(f"unknown setting {PREFIX}{name}; {advice}")
    return found


def _role(role: str, found: Mapping[str, str]) -> Resources | None:
    stated: dict[str, Any] = {}
    for field in _ROLE_FIELDS[role]:
        value = found.get(f"{role}.{field}")
        if value is None:
            continue
        if field != "memory" and not value.isdigit():
            raise SettingsError(f"{PREFIX}{role}.{field}={value} must be a whole number.")
        stated[field] = value if field == "memory" else int(value)
    return Resources(**stated) if stated else None


def _inputs(found: Mapping[str, str]) -> Iterator[InputFiles]:
    tables: dict[str, dict[str, Any]] = {}
    for name, value in found.items():
        if match := _INPUT.fullmatch(name):
            tables.setdefault(match[1], {})[match[2]] = value
    for name, fields in sorted(tables.items()):
        if "path" not in fields:
            raise SettingsError(f"{PREFIX}inputs.{name}.path is missing: a path or URL.")
        yield InputFiles(name=name, **fields)
