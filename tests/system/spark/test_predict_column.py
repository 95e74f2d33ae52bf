"""A saved model as a function of columns, and over the rows of a frame, without a cluster.

Spark's threads are enough: each further Python worker of executors would load TensorFlow.
"""

import pytest
from pyspark.errors import PySparkException

from tests.support.saved_linear import saved
from tfos import predict_column
from tfos.errors import SettingsError
from tfos.predict.column import predicted_by

__all__ = ["saved"]

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(240, func_only=True),
    pytest.mark.parametrize("spark", ["local[4]"], indirect=True),
]


def frame_of(sql, num_rows, partitions=1):
    """Rows in as many partitions as Python workers are to load TensorFlow."""
    return sql.range(num_rows, numPartitions=partitions).selectExpr(
        "id", "array(float(id), 1f, 2f) as x", "map(id, id) as unfed"
    )


def test_a_saved_model_is_a_function_of_columns(sql, saved):
    from pyspark.ml.linalg import Vectors
    from pyspark.sql import functions as f

    frame = frame_of(sql, 200).withColumn("s", f.struct("x"))
    predict, both = predict_column(saved, outputs="y"), predict_column(saved)
    answered = frame.select("*", predict("x"))
    assert answered.dtypes[-1] == ("prediction", "array<float>")
    rows = answered.collect()
    assert [tuple(row)[:-1] for row in rows] == [tuple(row) for row in frame.collect()]
    assert [row.prediction[0] for row in rows] == [row.id + 4.0 for row in rows]
    several = frame.select(both(f.col("s.x")).alias("both"))
    assert several.dtypes == [("both", "struct<y:array<float>,p:array<float>>")]
    assert [row.both.y for row in several.collect()] == [row.prediction for row in rows]
    numbers = frame.select(predict("id", f.lit(1), f.col("x")[2]))
    assert numbers.collect() == answered.select("prediction").collect()
    sql.udf.register("ends", predict.udf("id", "b", "c"))
    frame.select("id", "x").createOrReplaceTempView("rows_of_ends")
    answers = sql.sql("select ends(id, 1, x[2]) as prediction from rows_of_ends")
    assert answers.collect() == numbers.collect()
    with pytest.raises(PySparkException, match=r"1 arguments are given, but .* takes 3"):
        sql.sql("select ends(id) from rows_of_ends").collect()
    vectors = sql.createDataFrame([(Vectors.sparse(3, {1: 5.0}),)], ["v"]).coalesce(1)
    assert vectors.select(predict("v")).first()[0] == [6.0]
    assert frame.filter("id < 0").select(predict("x")).collect() == []


def test_a_bad_row_names_its_partition_row_and_column(sql, saved):
    predict = predict_column(saved, outputs=["y"])
    holes = frame_of(sql, 100, 2).selectExpr("if(id = 70, null, x) as features")
    with pytest.raises(PySparkException) as caught:
        holes.select(predict("features")).collect()
    assert "partition 1, row 20, column 'features': null; F.coalesce" in str(caught.value)


@pytest.mark.long
def test_what_no_model_can_answer_is_refused_at_once(saved, monkeypatch):
    for asked, text in (
        ({"inputs": "z"}, r"inputs \['z'\] are named, but the model .* has x float32\[3\]"),
        ({"outputs": ["z"]}, r"outputs \['z'\] are named, but the model .* has p float32\[1\], y"),
        ({"batch_size": 0}, "batch_size must be an int >= 1, got 0"),
    ):
        with pytest.raises(SettingsError, match=text):
            predict_column(saved, **asked)
    with pytest.raises(SettingsError, match=r"no \.keras file and no export is at /none\.keras"):
        predict_column("/none.keras")
    with pytest.raises(SettingsError, match=r"0 columns .*, but the model .* takes x float32"):
        predict_column(saved)()
    monkeypatch.setattr("tfos.predict.column.arrow_udf", lambda: None)
    with pytest.raises(SettingsError, match=r"needs Spark 4\.1, .*; this is 4\."):
        predict_column(saved)


@pytest.mark.parametrize("has_arrow_udf", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_saved_model_answers_the_rows_of_a_frame(sql, saved, monkeypatch, has_arrow_udf):
    """As `TFCluster.inference(model=)` asks it to."""
    if not has_arrow_udf:  # as with Spark 4.0
        monkeypatch.setattr("tfos.feed.dataframe_inference.arrow_udf", lambda: None)
    frame = frame_of(sql, 60)
    rows = predicted_by(frame, saved, None, None, "error").orderBy("id").collect()
    assert [(row.id, row.y[0]) for row in rows] == [(i, i + 4.0) for i in range(60)]
    answered = predicted_by(frame, saved, ["x"], None, "error")
    assert answered.columns == [*frame.columns, "y", "p"]


def test_vectors_of_a_parquet_file_are_answered(sql, saved, tmp_path):
    from pyspark.ml.functions import array_to_vector

    path = str(tmp_path / "vectors")
    frame_of(sql, 60).withColumn("v", array_to_vector("x")).write.parquet(path)
    answered = predicted_by(sql.read.parquet(path), saved, ["v"], None, "error")
    assert [(row.v[0], row.y[0]) for row in answered.orderBy("id").collect()] == [
        (i, i + 4.0) for i in range(60)
    ]


def test_what_a_model_cannot_answer_of_a_frame_is_refused_at_once(sql, spark, saved):
    frame = frame_of(sql, 60)
    for columns, output, nulls, text in (
        (["q"], None, "error", r"'q': the DataFrame has no such column: it has"),
        (None, "a", "error", r"output='a', but the model .* has the outputs \['y', 'p'\]"),
        (None, None, 0, "nulls=0, output=None with model="),
    ):
        with pytest.raises(SettingsError, match=text):
            predicted_by(frame, saved, columns, output, nulls)
    with pytest.raises(
        SettingsError, match=r"must be a Spark DataFrame, got .*RDD; use data\.toDF"
    ):
        predicted_by(spark.parallelize([1]), saved, None, None, "error")
