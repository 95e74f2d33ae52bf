"""DataFrames are fed by Arrow: every kind of column, holes, what is refused before any job."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tfos import InputMode, TFCluster
from tfos.errors import FeedJobError, SettingsError
from tfos.feed.dataframe import FrameSource
from tfos.feed.request import FeedRequest

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(240, func_only=True),
    pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True),
]

FEED_TIMEOUT_S = 60.0
EPOCH = datetime.datetime(1970, 1, 1)


def keep(args, ctx):
    """Write every row that this worker took, plain."""
    ctx.ps_client()  # this test is about rows: nothing is learned

    def plain(value):
        if hasattr(value, "tolist"):
            return value.tolist()
        if hasattr(value, "asDict"):
            return {name: plain(part) for name, part in value.asDict().items()}
        return value.decode("latin-1") if isinstance(value, bytes) else value

    feed = ctx.get_data_feed()
    with Path(args, f"{ctx.task_index}.jsonl").open("w") as out:
        while not feed.should_stop():
            out.writelines(json.dumps(plain(row)) + "\n" for row in feed.next_batch(64))
            out.flush()


def inputs_of(batch):
    """What the model of `learn` takes, from columns."""
    import keras

    numbers = np.stack([batch["delay"], batch["distance"]], 1).astype("float32")
    texts = keras.ops.convert_to_tensor([str(text) for text in batch["carrier"]], "string")
    return {"carrier": texts, "numbers": numbers}


def learn(args, ctx):
    """Train on the columns of a DataFrame; the chief writes how well the model does; predict."""
    import keras
    import numpy as np

    from tfos.keras import Embedding

    keras.utils.set_random_seed(1)
    carrier = keras.Input((), dtype="string", name="carrier")
    numbers = keras.Input((2,), name="numbers")
    known = keras.layers.StringLookup(vocabulary=["AA", "DL", "UA"], output_mode="one_hot")
    vectors = Embedding(4, table="carrier", initializer="zeros")(carrier)
    both = keras.layers.Concatenate()([known(carrier), numbers, vectors])
    late = keras.layers.Dense(1, "sigmoid")(keras.layers.Dense(8, "relu")(both))
    model = keras.Model({"carrier": carrier, "numbers": numbers}, late)
    model.compile(keras.optimizers.Adam(0.05), "binary_crossentropy")
    ctx.distribute(model)
    data = ctx.dataset(
        32,
        feature_cols={"carrier": "carrier", "numbers": ["delay", "distance"]},
        label_cols="late",
        weight_col="weight",
    )
    model.fit(data, epochs=args["epochs"], verbose=0)
    ctx.ps_client().rendezvous("trained", b"", timeout_s=60)
    if ctx.is_chief:
        path = args["out"] + "/model.keras"
        ctx.export(model, path)
        exported = keras.models.load_model(path)
        zeros = np.zeros((4, 2), "float32")
        zeros[3, 0] = 3.0
        x = {
            "carrier": keras.ops.convert_to_tensor(["AA", "DL", "UA", "DL"], "string"),
            "numbers": keras.ops.convert_to_tensor(zeros),
        }
        found = exported(x).numpy()[:, 0]
        Path(args["out"], "found.json").write_text(json.dumps(found.tolist()))
        ctx.export(model, args["out"] + "/served", tables="beside")
        predicted = model.predict(inputs_of(args["asked"]), verbose=0)[:, 0]
        Path(args["out"], "predicted.json").write_text(json.dumps(predicted.tolist()))
    feed = ctx.get_data_feed(train_mode=False)
    while not feed.should_stop():
        batch = feed.next_arrays(16)
        if batch is not None:
            feed.batch_results(model.predict_on_batch(inputs_of(batch))[:, 0])


def predict_from(path: str, cache_dir: str):
    """Return what serves an export in a Spark task: (number, prediction) of each row."""

    def predict(batches):
        import pyarrow as pa

        from tfos.serving import load

        served = load(path, cache_dir, progress=False)
        for batch in batches:
            if batch.num_rows:
                columns = {name: batch[name].to_pylist() for name in batch.schema.names}
                found = served.predict(inputs_of(columns))[:, 0]
                yield pa.record_batch([batch["number"], pa.array(found)], ["number", "prediction"])

    return predict


class Kept:
    """Rows that workers wrote since the last look."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen: dict[Path, int] = {}

    def new(self) -> list[Any]:
        rows = []
        for path in self._directory.glob("*.jsonl"):
            lines = path.read_text().splitlines()
            rows += [json.loads(line) for line in lines[self._seen.get(path, 0) :]]
            self._seen[path] = len(lines)
        return rows


def all_kinds(session: Any) -> tuple[Any, list[dict[str, Any]]]:
    """A DataFrame with every kind of column in 7 partitions, some empty, and the rows expected."""
    from pyspark.ml.linalg import Vectors, VectorUDT
    from pyspark.sql import types as t

    when = datetime.datetime(2024, 2, 29, 12, 30, 1, 250)
    rows = [
        (
            i,
            i % 7,
            i / 4,
            i / 8,
            i % 2 == 0,
            f"täxt {i}",
            bytes([i % 256]) * (i % 3),
            [float(i), 1.5],
            list(range(i % 4)),
            [[i, 1, 2], [3, 4, 5]],
            (i, (f"s{i}",)),
            Decimal(i) / 100,
            when.date() + datetime.timedelta(days=i),
            when + datetime.timedelta(seconds=i),
            Vectors.sparse(4, {1: float(i)}) if i % 3 else Vectors.dense([i, 0, 1, 2]),
            [f"täg\n{j}" for j in range(i % 3)],
        )
        for i in range(300)
    ]
    inner = t.StructType([t.StructField("text", t.StringType())])
    schema = t.StructType(
        [
            t.StructField("id", t.LongType()),
            t.StructField("small", t.ByteType()),
            t.StructField("double", t.DoubleType()),
            t.StructField("single", t.FloatType()),
            t.StructField("flag", t.BooleanType()),
            t.StructField("text", t.StringType()),
            t.StructField("raw", t.BinaryType()),
            t.StructField("pair", t.ArrayType(t.FloatType())),
            t.StructField("ragged", t.ArrayType(t.IntegerType())),
            t.StructField("grid", t.ArrayType(t.ArrayType(t.IntegerType()))),
            t.StructField(
                "nest",
                t.StructType([t.StructField("n", t.IntegerType()), t.StructField("in", inner)]),
            ),
            t.StructField("price", t.DecimalType(10, 2)),
            t.StructField("day", t.DateType()),
            t.StructField("time.ntz", t.TimestampNTZType()),
            t.StructField("vector", VectorUDT()),
            t.StructField("texts", t.ArrayType(t.StringType())),
        ]
    )
    frame = (
        session.createDataFrame(rows, schema)
        .repartitionByRange(3, "id")
        .unionByName(session.createDataFrame([], schema).repartition(4))
    )
    wanted = [
        {
            **dict(zip(schema.names, row, strict=True)),
            "raw": row[6].decode("latin-1"),
            "nest": {"n": row[10][0], "in": {"text": row[10][1][0]}},
            "price": float(row[11]),
            "day": (row[12] - EPOCH.date()).days,
            "time.ntz": (row[13] - EPOCH) // datetime.timedelta(microseconds=1),
            "vector": row[14].toArray().tolist(),
        }
        for row in rows
    ]
    return frame, wanted


@pytest.fixture
def session(spark):
    from pyspark.sql import SparkSession

    return SparkSession(spark)


@pytest.mark.fault("F46")
def test_columns_arrive_as_they_were_and_what_cannot_is_refused(spark, session, tmp_path):
    from pyspark.sql import functions as f

    frame, wanted = all_kinds(session)
    limits = {
        key: session.conf.get(f"spark.sql.execution.arrow.{key}")
        for key in ("maxRecordsPerBatch", "maxBytesPerBatch")
    }
    with TFCluster.reserve(spark, 3, 1, input_mode=InputMode.SPARK) as cluster:
        cluster.start(keep, str(tmp_path))
        kept = Kept(tmp_path)

        def fed(frame: Any, **options: Any) -> list[Any]:
            report = cluster.train(frame, 1, FEED_TIMEOUT_S, **options)
            rows = kept.new()
            assert report is not None
            assert (report.fed_rows, report.trained_rows) == (len(rows), len(rows))
            return rows

        assert sorted(fed(frame), key=lambda row: row["id"]) == wanted
        assert sorted(fed(frame, seed=3), key=lambda row: row["id"]) == wanted

        # Columns by name, in the order asked for; names that Spark reads otherwise.
        rows = fed(frame, columns=["time.ntz", "id"])
        assert {tuple(row) for row in rows} == {("time.ntz", "id")}
        twice = frame.select(f.col("id").alias("A"), f.col("small").alias("a"))
        assert sorted(row["A"] for row in fed(twice)) == list(range(300))

        # Nothing to feed is no error.
        assert fed(frame.where("id < 0")) == []
        assert fed(session.createDataFrame([], "x int")) == []

        holes = session.createDataFrame(
            [(1, 0.5, "a"), (2, None, None), (None, float("nan"), "")], "n int, x double, s string"
        ).coalesce(1)
        with pytest.raises(FeedJobError, match=r"RowError: partition 0, row 2, column 'n': null"):
            cluster.train(holes, 1, FEED_TIMEOUT_S)
        kept.new()
        rows = fed(holes, nulls={"n": 0, "x": -1.0, "s": "?"})
        assert [(row["n"], row["s"]) for row in rows] == [(1, "a"), (2, "?"), (0, "")]
        assert [row["x"] for row in rows[:2]] == [0.5, -1.0]
        assert np.isnan(rows[2]["x"])
        rows = fed(holes.drop("s"), nulls=0)
        assert [row["n"] for row in rows] == [1, 2, 0]

        frames = [(text, make(session, f), options) for text, make, options in REFUSED]
        jobs = spark._jsc.sc().dagScheduler().numTotalJobs()
        for text, refused, options in frames:
            with pytest.raises(SettingsError, match=text):
                cluster.train(refused, 1, FEED_TIMEOUT_S, **options)
        assert spark._jsc.sc().dagScheduler().numTotalJobs() == jobs
        assert cluster.phase.name == "RUNNING"
    assert limits == {key: session.conf.get(f"spark.sql.execution.arrow.{key}") for key in limits}


def test_a_feed_task_that_waits_for_workers_is_not_ended_as_idle(session):
    """Spark ends a task of SQL whose process has sent nothing for a time, if it is set so."""
    setting = "spark.sql.execution.pyspark.udf.killOnIdleTimeout"
    session.conf.set(setting, "true")
    try:
        source = FrameSource(FeedRequest(data=session.range(3), feed="input", feed_timeout_s=1.0))
        assert source._query()._jdf.sparkSession().conf().get(setting) == "false"
        assert session.conf.get(setting) == "true"  # for the user's own tasks
    finally:
        session.conf.unset(setting)


@pytest.mark.long
def test_a_model_learns_from_columns(spark, session, tmp_path):
    carriers = ["AA", "DL", "UA"]
    rows = []
    for i in range(1200):
        carrier, delay = carriers[i % 3], None if i % 50 == 0 else (i * 37 % 100 - 50) / 20
        late = carrier == "AA" or (delay or 0.0) > 1
        # Rows of no weight say the opposite.
        rows.append(
            (carrier, delay, float(i % 7), not late if i % 5 == 0 else late, float(i % 5 != 0))
        )
    schema = "carrier string, delay double, distance float, late boolean, weight double"
    frame = session.createDataFrame(rows, schema).repartition(4)
    asked = [(i, [*carriers, "unseen"][i % 4], i % 9 / 4 - 1, float(i % 7)) for i in range(60)]
    names = ("number", "carrier", "delay", "distance")
    by_name = dict(zip(names, map(list, zip(*asked, strict=True)), strict=True))
    questions = session.createDataFrame(asked, list(names)).repartition(2)
    start = session.createDataFrame(
        [("UA", [0.5] * 4), ("far", [1.0, 2.0, 3.0, 4.0])], "id string, row array<float>"
    )
    with TFCluster.reserve(spark, 3, 1, input_mode=InputMode.SPARK) as cluster:
        cluster.start(learn, {"out": str(tmp_path), "epochs": 4, "asked": by_name})
        assert cluster.load_rows("carrier", start) == 2
        report = cluster.train(frame, 4, FEED_TIMEOUT_S, nulls={"delay": 0.0})
        assert report is not None
        assert (report.fed_rows, report.trained_rows) == (4800, 4800)
        assert cluster.load_rows("carrier", start) == 0
        columns = list(names[1:])
        answered = cluster.inference(
            questions, columns=columns, output="prediction float"
        ).collect()
        looked_up = cluster.lookup("carrier", [*carriers, "far", "unseen"])
        rows_of_table = {row.id: row.row for row in cluster.rows("carrier").collect()}
    found = json.loads((tmp_path / "found.json").read_text())
    assert [value > 0.5 for value in found] == [True, False, False, True]

    # Loaded rows were trained from where they began, or stay as they are.
    assert looked_up[3:].tolist() == [[1.0, 2.0, 3.0, 4.0], [0.0] * 4]
    assert sorted(rows_of_table.values()) == sorted(looked_up[:4].tolist())
    assert (looked_up[2] != 0.5).all()

    # The cluster, and what serves its export in a task, predict what the model does.
    predicted = json.loads((tmp_path / "predicted.json").read_text())
    served = questions.mapInArrow(
        predict_from(str(tmp_path / "served"), str(tmp_path / "cache")),
        "number bigint, prediction float",
    )
    for answers in (answered, served.collect()):
        by_number = {row.number: row.prediction for row in answers}
        np.testing.assert_allclose([by_number[i] for i in range(60)], predicted, rtol=1e-6)


REFUSED: list[tuple[str, Any, dict[str, Any]]] = [
    ("'y': the DataFrame has no such column: it has", lambda s, f: s.range(3), {"columns": ["y"]}),
    ("must be a list of names", lambda s, f: s.range(3), {"columns": "id"}),
    ("no columns to feed", lambda s, f: s.range(3).select(), {}),
    ("'id' exists twice", lambda s, f: s.range(3).select("id", "id"), {}),
    (
        r"'m' is map<string,int>.*F\.col",
        lambda s, f: s.range(3).select(f.expr("map('a', 1)").alias("m")),
        {},
    ),
    (
        r"'m' is interval day.*cast",
        lambda s, f: s.range(3).select(f.expr("interval '1' day").alias("m")),
        {},
    ),
    (
        r"'m\.v' is variant",
        lambda s, f: s.range(3).select(f.expr("struct(parse_json('1') as v)").alias("m")),
        {},
    ),
    (
        r"'m' is array<array<string>>.*to_json",
        lambda s, f: s.range(3).select(f.expr("array(array('a'))").alias("m")),
        {},
    ),
    ("names 'x', which is not fed", lambda s, f: s.range(3), {"nulls": {"x": 0}}),
    (r"0\.5 does not fit column id: long", lambda s, f: s.range(3), {"nulls": {"id": 0.5}}),
    ("inf does not fit column id: long", lambda s, f: s.range(3), {"nulls": float("inf")}),
    ("nulls must be 'error'", lambda s, f: s.range(3), {"nulls": None}),
    (
        "writeStream.foreachBatch",
        lambda s, f: s.readStream.format("rate").load(),
        {},
    ),
]
