"""What every class of settings does alike: a wrong value is refused by its field and itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from feeding.config import FeedConfig
from feeding.errors import FeedSettingsError
from feeding.filesystem.config import FileSystemConfig
from feeding.formats.csv.options import CsvRequest
from feeding.formats.text.lines import LineLimits
from feeding.reading.bad_records import BadData
from ps.checkpoint.score import Score
from ps.client.saving.saver import SaveOptions
from ps.config import ServerSettings
from ps.errors import PSSettingsError
from ps.manifest.initializer_spec import Constant, RandomNormal, RandomUniform, TruncatedNormal
from ps.manifest.manifest import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Ftrl,
    GroupSpec,
    Hyper,
    Manifest,
    ParamSpec,
    RMSprop,
)
from ps.manifest.table_spec import Admission, TableSpec
from tfos.config import Checkpoints, ClusterConfig, Restarts
from tfos.errors import SettingsError
from tfos.files.inputs import InputFiles
from tfos.keras.step.settings import Settings
from tfos.slots.resources import Resources

SECONDS = (0, -1.0, math.nan, math.inf, "soon", None, True)
COUNT = (0, -1, 1.5, "9", True)
COUNT_OR_ZERO = COUNT[1:]
FLAG = (1, "yes", None)
CHOICE = ("", "Fail", 1)
NUMBER = (math.nan, math.inf)
MOMENTUM = (-0.1, 1.5, math.nan)


class Case(NamedTuple):
    """One class: an accepted call, and for each field the values that are refused."""

    kind: type
    error: type[ValueError]
    accepted: Mapping[str, Any]
    wrong: Mapping[str, tuple[Any, ...]]
    unchecked: Mapping[str, str] = {}
    """Fields without a wrong value here, with the reason."""
    shown_as: Mapping[str, str] = {}
    """What users call a field, where that is another name."""


OTHER_TESTS = "what it holds is checked by its own class"
DECODED = "its type is checked where the message is decoded"
CASES = (
    Case(
        ClusterConfig,
        SettingsError,
        {},
        {
            **{
                field.name: SECONDS
                for field in dataclasses.fields(ClusterConfig)
                if field.name.endswith("_s")
            },
            **{
                field.name: FLAG
                for field in dataclasses.fields(ClusterConfig)
                if field.type == "bool"
            },
            "max_inflight_bytes": COUNT,
            "node_limit_bytes": COUNT_OR_ZERO,
            "threads_per_node": COUNT_OR_ZERO,
            "gpu_resource": ("", "a b", 0),
            "busy_gpus": CHOICE,
            "save_on_interrupt": ("relative/place", "", 7, True),
            "inputs": ("/data", [InputFiles(name="a", path="/a")], ({"name": "a"},)),
            "output": ("relative/place", "", 7, True),
            "checkpoints": ("/saves", 7),
            "restarts": (None, 1, {"workers": 1}),
            "integrity": CHOICE,
            "security": CHOICE,
        },
    ),
    Case(
        Resources,
        SettingsError,
        {},
        {"cores": COUNT, "memory": ("8 gigs", 8, "0m"), "gpus": COUNT_OR_ZERO},
    ),
    Case(
        InputFiles,
        SettingsError,
        {"name": "train", "path": "/data"},
        {"name": ("", "a b", "1", 7), "path": ("", 7, None), "mode": CHOICE, "share": CHOICE},
    ),
    Case(
        Restarts,
        SettingsError,
        {},
        {"workers": COUNT_OR_ZERO, "ps": COUNT_OR_ZERO, "on_poison": CHOICE},
    ),
    Case(
        Checkpoints,
        SettingsError,
        {"directory": "/saves"},
        {
            "directory": ("relative/place", 7, None, Path("saves")),
            "every_s": SECONDS,
            "timeout_s": SECONDS,
            "every_steps": COUNT_OR_ZERO,
            "every_batches": COUNT_OR_ZERO,
            "keep": COUNT,
            "keep_best": ("", "a\nb", "x" * 201, 7, "val_fun"),
            "best_mode": (*CHOICE, None),
            "full_every": COUNT,
            "resume": FLAG,
            "resume_epochs": FLAG,
        },
    ),
    Case(
        Settings,
        SettingsError,
        {},
        {
            "consistency": CHOICE,
            "reduction": CHOICE,
            "on_nonfinite": CHOICE,
            "compression": CHOICE,
            "staleness_aware": FLAG[:-1],
            "staleness_bound": (4,),
            "pipeline": (-1, 1000, 1.0, True),
        },
    ),
    Case(
        Settings,
        SettingsError,
        {"consistency": "ssp", "staleness_bound": 1},
        {"staleness_bound": (None, -1, 1.0, True, "1")},
    ),
    Case(
        FeedConfig,
        FeedSettingsError,
        {},
        {
            "chunk_rows": COUNT,
            "chunk_bytes": (*COUNT, 1 << 40),
            "max_chunk_bytes": COUNT,
            "max_inflight_bytes": COUNT,
            "feed_timeout_s": SECONDS,
            "starve_timeout_s": SECONDS,
            "connect_timeout_s": SECONDS,
        },
    ),
    Case(
        FileSystemConfig,
        FeedSettingsError,
        {},
        {
            "call_timeout_s": SECONDS,
            "patience_s": SECONDS,
            "range_bytes": COUNT,
            "ranges_in_flight": COUNT,
        },
    ),
    Case(
        LineLimits,
        FeedSettingsError,
        {},
        {"max_line_bytes": COUNT, "max_gzip_ratio": COUNT, "block_bytes": COUNT},
    ),
    Case(
        BadData,
        FeedSettingsError,
        {"action": "skip"},
        {"action": CHOICE, "max_skipped": COUNT_OR_ZERO},
        shown_as={"action": "on_bad_data"},
    ),
    Case(
        CsvRequest,
        FeedSettingsError,
        {},
        {
            "columns": ("name", [1]),
            "header": ("name", [], [1], ["a", 1], ["a", "a"]),
            "delimiter": ("", "ab", '"', "\n", "\u20ac", 7),
            "escape": ("", "ab", '"', ",", "\n", "\u20ac", 7),
        },
        {"quoted_newlines": "any truth value will do", "nulls": "checked with the columns"},
    ),
    Case(
        ServerSettings,
        PSSettingsError,
        {"rank": 0, "num_servers": 2, "num_workers": 1},
        {
            "rank": (-1, 2, 0.0, "0", True),
            "num_servers": COUNT,
            "num_workers": COUNT,
            "on_lost": CHOICE,
        },
    ),
    Case(
        SaveOptions,
        PSSettingsError,
        {},
        {
            "keep": COUNT,
            "full_every": (*COUNT, None),
            "nobody_trains": FLAG,
            "score": (0.5, "loss"),
            "generations": (1, [1], (0.5,)),
        },
    ),
    Case(
        Score,
        PSSettingsError,
        {"metric": "val_loss", "value": 0.5, "higher_is_better": False},
        {
            "metric": ("", "a\nb", "x" * 201, None),
            "value": (*NUMBER, -math.inf, "1", None, True),
            "higher_is_better": FLAG,
        },
    ),
    *(
        Case(kind, PSSettingsError, {}, dict.fromkeys(kind.__struct_fields__, NUMBER))
        for kind in (Constant, RandomUniform, RandomNormal, TruncatedNormal)
    ),
    Case(RandomUniform, PSSettingsError, {"maxval": 0.0}, {"minval": (1.0,)}),
    Case(RandomNormal, PSSettingsError, {}, {"stddev": (-1.0,)}),
    Case(TruncatedNormal, PSSettingsError, {}, {"stddev": (-1.0,)}),
    Case(
        Admission,
        PSSettingsError,
        {},
        {
            "min_count": (0, 65_536, 1.5, "9", True),
            "probability": (0.0, 1.5, math.nan, "1"),
            "unknown": CHOICE,
        },
    ),
    Case(
        SGD,
        PSSettingsError,
        {},
        {
            "momentum": MOMENTUM,
            "weight_decay": (-0.1, math.nan),
            "clipvalue": (-1.0, math.nan),
            "clipnorm": (-1.0, math.nan),
            "global_clipnorm": (-1.0, math.nan),
            "ema_momentum": MOMENTUM,
            "ema_overwrite_frequency": (1,),
            "nesterov": FLAG,
        },
    ),
    Case(SGD, PSSettingsError, {"ema_momentum": 0.9}, {"ema_overwrite_frequency": (0, 1 << 54)}),
    Case(Adam, PSSettingsError, {}, {"beta_1": (-0.1, 1.0), "beta_2": (1.0,), "epsilon": (-1.0,)}),
    Case(
        RMSprop,
        PSSettingsError,
        {},
        {"rho": MOMENTUM, "momentum": MOMENTUM, "epsilon": (-1.0, math.inf)},
    ),
    Case(Adadelta, PSSettingsError, {}, {"rho": MOMENTUM, "epsilon": (-1.0,)}),
    Case(
        Adagrad, PSSettingsError, {}, {"initial_accumulator_value": (-1.0,), "epsilon": (math.nan,)}
    ),
    Case(
        Ftrl,
        PSSettingsError,
        {},
        {
            "learning_rate_power": (1.0, -17.0),
            "l1_regularization_strength": (-1.0,),
            "l2_regularization_strength": (-1.0,),
            "l2_shrinkage_regularization_strength": (math.inf,),
            "beta": (-1.0,),
        },
    ),
    Case(
        TableSpec,
        PSSettingsError,
        {"name": "t", "dim": 4, "rule": SGD()},
        {
            "name": ("", 7),
            "dim": (*COUNT, 1 << 40),
            "dtype": CHOICE,
            "row_steps": FLAG,
            "id_kind": CHOICE,
            "id_source": CHOICE,
            "rule": ("adam", None),
            "initializer": ("zeros", None),
            "admission": ({"min_count": 2}, None),
            "unseen": (0.5, ("a",)),
            "seed": (-1, 1 << 63),
            "segments": (0, 1 << 20),
            "max_id": (-1, 1 << 63),
            "max_rows": (0, -5, "5"),
            "max_bytes": (0, 1.5),
            "ttl_s": (0.0, -1.0, math.nan, "5"),
            "when_full": ("lru", *CHOICE),
            "learning_rate_multiplier": (-1.0, math.nan, "1", None),
        },
    ),
    Case(
        Manifest,
        PSSettingsError,
        {"groups": ()},
        {
            "bucket_bytes": (0, 100, 1 << 40),
            "staleness_bound": (-1, 3, 1 << 40),
        },
        {
            **dict.fromkeys(("groups", "tables"), OTHER_TESTS),
            **dict.fromkeys(("consistency", "reduction"), DECODED),
            "staleness_aware": DECODED,
        },
    ),
    Case(
        Manifest,
        PSSettingsError,
        {"groups": (), "consistency": "sync"},
        {"staleness_aware": (True,), "staleness_bound": (1,)},
    ),
    Case(
        GroupSpec,
        PSSettingsError,
        {"name": "g", "dtype": "float64", "rule": SGD(), "params": (ParamSpec("w", (1,)),)},
        {"compression": ("int8",)},
        {
            **dict.fromkeys(("name", "dtype"), DECODED),
            **dict.fromkeys(("rule", "params"), OTHER_TESTS),
        },
    ),
    Case(
        Hyper,
        PSSettingsError,
        {"learning_rate": 0.1},
        {"learning_rate": (*NUMBER, 1e39)},
        {"scalars": "tests/ps/dense: of the group's rule"},
    ),
)
OF_A_RULE = (Adam, RMSprop, Adadelta, Adagrad, Ftrl)
"""The other fields of these are those of SGD."""
REFUSALS = [
    pytest.param(case, name, value, id=f"{case.kind.__name__}-{name}-{value!r}")
    for case in CASES
    for name, values in case.wrong.items()
    for value in values
]


@pytest.mark.parametrize(("case", "name", "value"), REFUSALS)
def test_a_wrong_value_is_refused_by_its_field_and_itself(case, name, value):
    case.kind(**case.accepted)
    with pytest.raises(case.error) as refused:
        case.kind(**{**case.accepted, name: value})
    assert case.shown_as.get(name, name) in str(refused.value)
    assert repr(value) in str(refused.value) or str(value) in str(refused.value)


def _fields(kind: Any) -> set[str]:
    if issubclass(kind, msgspec.Struct):
        return set(kind.__struct_fields__)
    return {field.name for field in dataclasses.fields(kind) if field.init}


@pytest.mark.parametrize("kind", {case.kind: None for case in CASES if case.kind not in OF_A_RULE})
def test_no_field_is_forgotten(kind):
    of_it = [case for case in CASES if case.kind is kind]
    assert _fields(kind) == {name for case in of_it for name in (*case.wrong, *case.unchecked)}
