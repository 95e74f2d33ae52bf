"""What a job file says of a cluster reaches reserve() through Spark's settings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfos.config import ClusterConfig
from tfos.driver.job_settings import applied, of_job
from tfos.errors import SettingsError
from tfos.files.inputs import NAME, InputFiles
from tfos.slots.resources import Resources, RoleResources
from tfos.topology import plan

NODES = plan(3, 1)
CORES = st.one_of(st.none(), st.integers(1, 64))
MEMORY = st.sampled_from([None, "8g", "512m"])


@given(
    st.builds(Resources, cores=CORES, memory=MEMORY),
    st.builds(Resources, cores=CORES, memory=MEMORY, gpus=st.sampled_from([None, 0, 2])),
    st.sampled_from([None, "spread", "pack"]),
    st.lists(
        st.builds(
            InputFiles,
            name=st.from_regex(NAME, fullmatch=True).filter(str.isascii),
            path=st.sampled_from(["hdfs:///a b,c=d", "/x", "s3://b/*.csv"]),
            mode=st.sampled_from(["list", "download"]),
            share=st.sampled_from(["part", "all"]),
        ),
        unique_by=lambda each: each.name,
        max_size=3,
    ),
    st.sampled_from(["", "hdfs:///out"]),
)
def test_what_is_written_is_what_is_read(ps, workers, placement, inputs, output):
    conf = dict(of_job(RoleResources(ps, workers, placement), inputs, output))
    resources, config = applied({**conf, "spark.x": "y"}, RoleResources(), ClusterConfig(), NODES)
    assert (resources.ps or Resources(), resources.workers or Resources()) == (ps, workers)
    assert resources.placement == placement
    assert config.inputs == tuple(sorted(inputs, key=lambda each: each.name))
    assert config.output == (output or None)


def test_a_calls_own_arguments_come_first():
    said = RoleResources(None, Resources(cores=4), "pack")
    conf = dict(of_job(said, [InputFiles(name="a", path="/a")], "/out"))
    own = ClusterConfig(inputs=(InputFiles(name="b", path="/b"),), output="/own")
    resources, config = applied(conf, RoleResources(None, Resources(gpus=1), "spread"), own, NODES)
    assert resources == RoleResources(None, Resources(gpus=1), "spread")
    assert config == own


@pytest.mark.parametrize("nodes", [plan(2, 0), plan(3, 1, driver_ps_nodes=True)])
def test_a_jobs_clusters_without_servers_on_executors_leave_its_servers_resources_out(nodes):
    conf = dict(of_job(RoleResources(Resources(cores=2), Resources(cores=4))))
    resources, _ = applied(conf, RoleResources(), ClusterConfig(), nodes)
    assert resources == RoleResources(None, Resources(cores=4))
    resources.check(nodes, "gpu")
    own = RoleResources(Resources(cores=1))
    resources, _ = applied(conf, own, ClusterConfig(), nodes)
    with pytest.raises(SettingsError, match="ps_resources="):
        resources.check(nodes, "gpu")


@pytest.mark.parametrize("cores", [None, 4])
def test_a_jobs_clusters_that_hide_gpus_leave_its_gpus_out(cores):
    conf = dict(of_job(RoleResources(None, Resources(cores=cores, gpus=1))))
    config = ClusterConfig(gpu_resource=None)
    resources, _ = applied(conf, RoleResources(), config, NODES)
    assert resources == RoleResources(None, Resources(cores=cores) if cores else None)
    own = RoleResources(None, Resources(gpus=1))  # the call's own are not what it left open
    assert applied(conf, own, config, NODES)[0] == own


def test_tensorflows_servers_take_the_jobs_resources_too():
    conf = dict(of_job(RoleResources(Resources(cores=2))))
    resources, _ = applied(conf, RoleResources(), ClusterConfig(), plan(4, 1, ps="tensorflow"))
    assert resources.ps == Resources(cores=2)


def test_without_settings_everything_is_as_it_was():
    resources, config = RoleResources(), ClusterConfig()
    assert applied({"spark.master": "yarn"}, resources, config, NODES) == (resources, config)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("workers.core", "4", "unknown setting spark.tfos.workers.core; did you mean spark.tfos.w"),
        ("ps.gpus", "1", "unknown setting spark.tfos.ps.gpus"),
        ("zzzzz", "1", "unknown setting spark.tfos.zzzzz; known are ps.cores"),
        ("workers.cores", "four", "spark.tfos.workers.cores=four must be a whole number"),
        ("workers.cores", "0", "cores=...) must be an int >= 1"),
        ("workers.memory", "much", "memory=...) must be a size"),
        ("inputs.a.mode", "list", "spark.tfos.inputs.a.path is missing"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(name, value, text):
    with pytest.raises(SettingsError) as refused:
        applied({f"spark.tfos.{name}": value}, RoleResources(), ClusterConfig(), NODES)
    assert text in str(refused.value)


def test_a_wrong_mode_is_refused_with_what_is_allowed():
    conf = {"spark.tfos.inputs.a.path": "/a", "spark.tfos.inputs.a.mode": "copy"}
    with pytest.raises(SettingsError, match="mode of input 'a' must be 'list' or 'download'"):
        applied(conf, RoleResources(), ClusterConfig(), NODES)
