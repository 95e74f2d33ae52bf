"""inference() of DataFrames: their rows come back with result columns, in order, in any batches."""

import pytest
from pyspark.errors import PySparkException

from tfos import InputMode, TFCluster
from tfos.errors import NodeFailedError, SettingsError

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(240, func_only=True),
    pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True),
]

NUM_ROWS = 500


def answer(args, ctx):
    """Answer as the rows' own column `how` says; every row of a batch says the same."""
    import numpy as np

    feed = ctx.get_data_feed(train_mode=False)
    while not feed.should_stop():
        batch = feed.next_arrays(args["batch"])
        if batch is None:
            continue
        names, how, x = sorted(batch), batch["how"][0], batch["x"]
        if how == "vectors":
            feed.batch_results(np.stack([x.sum(axis=1), np.full(len(x), len(x))], axis=1))
        elif how == "named":
            feed.batch_results({"columns": np.array([" ".join(names)] * len(x)), "sum": x.sum(1)})
        elif how == "rows":
            feed.batch_results([(int(row.sum()), "text") for row in x])
        elif how == "filled":
            filled = batch["missing.x"] + x.sum(axis=1)
            feed.batch_results({"sum": filled, "text_given": batch["text"]})
        elif how == "too few":
            feed.batch_results(x[1:])


def frame_of(sql, how, num_rows=NUM_ROWS, partitions=4):
    return sql.range(num_rows, numPartitions=partitions).selectExpr(
        "id",
        f"'{how}' as how",
        "array(float(id), 1f, 2f) as x",
        "map(id, id) as unfed",
        "if(id % 3 = 0, null, 'name') as missing",
    )


@pytest.fixture(scope="module")
def cluster(spark):
    with TFCluster.reserve(spark, 2, num_ps=0, input_mode=InputMode.SPARK) as cluster:
        cluster.start(answer, {"batch": 40})
        yield cluster


def test_rows_keep_their_columns_and_order_and_get_results(sql, cluster):
    frame = frame_of(sql, "vectors").union(frame_of(sql, "vectors", 0))
    answered = cluster.inference(frame, columns=["how", "x"])
    assert answered.columns == [*frame.columns, "prediction"]
    assert answered.schema["prediction"].dataType.simpleString() == "array<float>"
    rows, given = answered.collect(), frame.collect()
    assert [row[:-1] for row in rows] == [tuple(row) for row in given]
    assert [row.prediction[0] for row in rows] == [row.id + 3.0 for row in given]
    # Batches cross those of Arrow, 23 rows, and end with their partition.
    assert {int(row.prediction[1]) for row in rows} >= {40}
    assert sum(1 / row.prediction[1] for row in rows) < NUM_ROWS / 40 + 4


@pytest.mark.long
@pytest.mark.parametrize("has_arrow_udf", [True, False])
def test_several_result_columns_by_name_and_by_place(sql, cluster, monkeypatch, has_arrow_udf):
    if not has_arrow_udf:  # as with Spark 4.0
        monkeypatch.setattr("tfos.feed.dataframe_inference.arrow_udf", lambda: None)
    named = cluster.inference(
        frame_of(sql, "named", 50), columns=["x", "how"], output="sum double, columns string"
    )
    assert [(row["sum"], row["columns"]) for row in named.orderBy("id").collect()] == [
        (row + 3.0, "how x") for row in range(50)
    ]
    by_place = cluster.inference(
        frame_of(sql, "rows", 50).select("how", "x"), output="total long, kind string"
    )
    assert [tuple(row)[-2:] for row in by_place.collect()] == [(i + 3, "text") for i in range(50)]


def test_vectors_are_answered(sql, cluster):
    from pyspark.ml.linalg import Vectors

    given = [(i, "vectors", Vectors.dense(i, 1.0)) for i in range(30)]
    frame = sql.createDataFrame(given, ["id", "how", "x"])
    answered = cluster.inference(frame, columns=["how", "x"])
    assert [row.prediction[0] for row in answered.orderBy("id").collect()] == [
        i + 1.0 for i in range(30)
    ]
    assert answered.select("x").collect() == frame.select("x").collect()


def frame_with_holes(sql, partitions=4):
    """Columns whose names any query would misread, and a hole in every third row."""
    frame = frame_of(sql, "filled", 60, partitions).selectExpr(
        "id", "how", "x", "if(id % 3 = 0, null, id) as hole", "missing as text", "id as ID"
    )
    return frame.toDF("i.d", "how", "x", "missing.x", "text", "I.D")


def test_missing_values_are_filled_for_main_fun_and_stay_in_the_frame(sql, cluster):
    frame = frame_with_holes(sql)
    answered = cluster.inference(
        frame,
        columns=["x", "missing.x", "how", "text"],
        nulls={"missing.x": -1, "text": "none"},
        output="sum double, text_given string",
    )
    assert answered.columns == ["i.d", "how", "x", "missing.x", "text", "I.D", "sum", "text_given"]
    rows = answered.collect()
    assert [tuple(row)[:-2] for row in rows] == [tuple(row) for row in frame.collect()]
    for i, row in enumerate(rows):
        hole = i % 3 == 0
        assert row["missing.x"] == (None if hole else i)
        assert tuple(row)[-2:] == ((-1 if hole else i) + i + 3, "none" if hole else "name")


def test_missing_values_are_refused_by_name_unless_filled(sql, cluster):
    frame = frame_with_holes(sql, 1)  # Spark repeats each task that fails
    answered = cluster.inference(frame, columns=["x", "missing.x", "how"])
    with pytest.raises(PySparkException, match=r"column 'missing\.x'"):
        answered.collect()


@pytest.mark.long
@pytest.mark.fault("F38")
def test_results_that_do_not_fit_fail_the_action_by_name(sql, cluster):
    frame = frame_of(sql, "vectors", 20, 1)
    answered = cluster.inference(frame, columns=["how", "x"], output="prediction int")
    with pytest.raises(PySparkException) as caught:
        answered.collect()
    assert "ResultTypeError: results for column 'prediction'" in str(caught.value)
    assert "are float64[2], expected int32" in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"columns": ["x", "y"]}, r"columns=\['x', 'y'\]: 'y': the DataFrame has no such column"),
        ({"columns": ["x", "x"]}, "column 'x' exists twice"),
        ({}, "column 'unfed' is map<bigint,bigint>, which a feed cannot carry"),
        ({"columns": []}, "select at least one"),
        ({"columns": ["x"], "nulls": {"id": 0}}, r"nulls= names 'id', which is not fed: \['x'\]"),
        ({"output": "X"}, "has a column 'X', but the DataFrame has one already"),
        ({"output": "a int, b"}, "'a int, b' names no columns"),
        ({"output": "a date"}, "'a' is date; results can be boolean, tinyint, .* or arrays of"),
        ({"output": "a array<string>"}, "'a' is array<string>; results can be"),
        ({"output": ["a"]}, "output must be a string or a StructType, got list"),
    ],
)
def test_what_does_not_fit_the_frame_is_refused_at_once(sql, cluster, asked, text):
    with pytest.raises(SettingsError, match=text):
        cluster.inference(frame_of(sql, "vectors"), **asked)


def test_options_of_frames_are_refused_for_rdds(spark, cluster):
    with pytest.raises(SettingsError, match="are for a DataFrame"):
        cluster.inference(spark.parallelize([1]), output="a int")


@pytest.mark.fault("F38")
def test_too_few_results_end_action_and_cluster_with_both_numbers(spark, sql):
    cluster = TFCluster.reserve(spark, 2, num_ps=0, input_mode=InputMode.SPARK)
    try:
        cluster.start(answer, {"batch": 40})
        answered = cluster.inference(frame_of(sql, "too few", 100, 1), columns=["how", "x"])
        with pytest.raises(PySparkException):
            answered.collect()  # Spark shows its last attempt, when the worker is gone
        with pytest.raises(NodeFailedError, match="returned 39 results for 40 rows"):
            cluster.shutdown()
    finally:
        cluster.abort("the test is over")
