"""The manifests of docs/kubernetes.md have the shape that Kubernetes takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

PAGE = (Path(__file__).parents[2] / "docs/kubernetes.md").read_text()
MANIFESTS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
PODS = [each for each in MANIFESTS if each["kind"] == "Pod"]


def fields(required: str = "", **properties: Any) -> dict[str, Any]:
    """An object with these fields and no other: a misspelt one is ignored by Kubernetes."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def several(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


NAME = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"}
USER = {"type": "integer", "minimum": 1}
TRUTH = {"type": "boolean"}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
QUANTITY = {"type": "string", "pattern": "^[1-9][0-9]*([KMGT]i?)?$"}
PATH = {"type": "string", "pattern": "^/"}
POD_SECURITY = fields(
    "runAsNonRoot runAsUser seccompProfile",
    runAsNonRoot=TRUTH,
    runAsUser=USER,
    runAsGroup=USER,
    fsGroup=USER,
    seccompProfile=fields("type", type={"enum": ["RuntimeDefault", "Localhost", "Unconfined"]}),
)
CONTAINER_SECURITY = fields(
    "allowPrivilegeEscalation capabilities",
    allowPrivilegeEscalation=TRUTH,
    readOnlyRootFilesystem=TRUTH,
    capabilities=fields("drop", drop=several({"type": "string"})),
)
CONTAINER = fields(
    "name securityContext volumeMounts",
    name=NAME,
    securityContext=CONTAINER_SECURITY,
    volumeMounts=several(fields("name mountPath", name=NAME, mountPath=PATH)),
)
EMPTY = fields(medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY)
POD = fields(
    "apiVersion kind spec",
    apiVersion={"const": "v1"},
    kind={"const": "Pod"},
    spec=fields(
        "containers volumes",
        terminationGracePeriodSeconds={"type": "integer", "minimum": 0},
        securityContext=POD_SECURITY,
        containers=several(CONTAINER),
        volumes=several(fields("name emptyDir", name=NAME, emptyDir=EMPTY)),
    ),
)
SERVICE = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "v1"},
    kind={"const": "Service"},
    metadata=fields("name", name=NAME, namespace=NAME),
    spec=fields(
        "clusterIP selector ports",
        clusterIP={"const": "None"},
        selector={"type": "object", "additionalProperties": {"type": "string"}},
        ports=several(fields("name port", name=NAME, port=PORT)),
    ),
)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=[each["kind"] for each in MANIFESTS])
def test_a_manifest_has_the_fields_of_its_kind(manifest):
    jsonschema.validate(manifest, {"Pod": POD, "Service": SERVICE}[manifest["kind"]])


def test_each_mount_is_of_a_volume_and_each_volume_is_mounted():
    assert len(PODS) == 2
    for pod in PODS:
        (container,) = pod["spec"]["containers"]
        mounts = [each["name"] for each in container["volumeMounts"]]
        assert mounts == [each["name"] for each in pod["spec"]["volumes"]]


def test_a_field_that_kubernetes_does_not_know_is_found():
    pod = {**PODS[0], "spec": {**PODS[0]["spec"], "volume": []}}
    with pytest.raises(jsonschema.ValidationError, match="'volume' was unexpected"):
        jsonschema.validate(pod, POD)


def test_the_commands_name_the_services_ports():
    (service,) = (each for each in MANIFESTS if each["kind"] == "Service")
    name = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
    assert f"spark.driver.host={name}" in PAGE
    for port in service["spec"]["ports"]:
        assert re.search(rf"[pP](ort|ORT)={port['port']}\b", PAGE)
