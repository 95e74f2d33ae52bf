"""The recommenders by spark-submit, as users run them, beside a baseline in one process."""

from __future__ import annotations

import pytest

from tests.support.spark_submit import ROOT, number, submit

PROGRAMS = ROOT / "examples" / "recommender"

pytestmark = [
    pytest.mark.long,
    pytest.mark.process,
    pytest.mark.spark,
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize(
    ("program", "flags"),
    [
        ("deepfm.py", ("--flights", "12000")),
        ("wide_deep.py", ("--flights", "12000")),
        ("criteo_synth.py", ("--rows", "60000", "--num_ids", "26000")),
    ],
)
def test_the_cluster_predicts_about_as_well_as_one_process(program, flags, tmp_path):
    common = ("--epochs", "2", "--batch_size", "128")
    output = submit(PROGRAMS / program, *flags, *common, master="local[4]", cwd=tmp_path)
    alone = number(output, r"plain Keras in one process: AUC (0\.\d+)")
    assert number(output, r"test AUC: (0\.\d+)") > max(0.6, alone - 0.05)


def test_a_run_that_saves_goes_on_and_its_export_is_served(tmp_path):
    common = ("--flights", "6000", "--batch_size", "128", "--model_dir", str(tmp_path / "run"))
    begun = submit(
        PROGRAMS / "deepfm.py", *common, "--epochs", "1", master="local[4]", cwd=tmp_path
    )
    served = ("--epochs", "2", "--export_dir", str(tmp_path / "model"))
    output = submit(PROGRAMS / "deepfm.py", *common, *served, master="local[4]", cwd=tmp_path)
    loss = r"epoch 1 of .* loss (\d\.\d+)"
    assert number(output, loss) < number(begun, loss) - 0.05
    assert number(output, r"at most (\d\.\de.\d+) from the cluster's predictions") < 1e-6


def test_two_towers_on_a_cluster_find_more_liked_films_than_a_guess(tmp_path):
    output = submit(PROGRAMS / "two_tower.py", master="local[4]", cwd=tmp_path)
    assert number(output, r"two towers on the cluster: recall@20 (0\.\d+)") > 0.32
