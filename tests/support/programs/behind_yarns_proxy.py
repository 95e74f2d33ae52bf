"""A training whose page and TensorBoard are asked for through the ResourceManager's own proxy.

behind_yarns_proxy.py           prints what each request got, as one line of JSON behind TOLD

The proxy forwards to what an application has registered as its tracking URL. Of a Spark
application that is Spark's page; so this program registers others, without containers.
"""

from __future__ import annotations

import http.client
import json
import sys
from contextlib import closing
from typing import Any

from tests.support.programs.trains_on_yarn import main_fun
from tests.support.waiting import wait_until
from tfos import InputMode, TFCluster
from tfos.watch.page_app import _PAGE

TOLD = "told: "
WAIT_S = 60.0


class Tracked:
    """An application of YARN that is nothing but a tracking URL."""

    def __init__(self, sc: Any, url: str) -> None:
        yarn = sc._jvm.org.apache.hadoop.yarn
        conf = yarn.conf.YarnConfiguration(sc._jsc.hadoopConfiguration())
        self._client = yarn.client.api.YarnClient.createYarnClient()
        self._master = yarn.client.api.AMRMClient.createAMRMClient()
        for each in (self._client, self._master):
            each.init(conf)
        self._client.start()
        context = self._client.createApplication().getApplicationSubmissionContext()
        launch = sc._jvm.java.lang.Class.forName(
            "org.apache.hadoop.yarn.api.records.ContainerLaunchContext"
        )
        context.setAMContainerSpec(yarn.util.Records.newRecord(launch))
        context.setResource(yarn.api.records.Resource.newInstance(128, 1))
        context.setUnmanagedAM(True)
        self.id = context.getApplicationId()
        self._client.submitApplication(context)
        wait_until(lambda: self._client.getAMRMToken(self.id) is not None, "its token", WAIT_S)
        user = sc._jvm.org.apache.hadoop.security.UserGroupInformation.getCurrentUser()
        user.addToken(self._client.getAMRMToken(self.id))
        self._master.start()
        self._master.registerApplicationMaster("127.0.0.1", 0, url)
        self._address = conf.get("yarn.resourcemanager.webapp.address")
        self._end = yarn.api.records.FinalApplicationStatus.SUCCEEDED

    def lead_to(self, url: str) -> None:
        """Change the tracking URL."""
        self._master.updateTrackingUrl(url)
        self._master.allocate(0.5)

    def ask(
        self, path: str, method: str = "GET", **headers: str
    ) -> tuple[int, dict[str, str], str]:
        """Return status, headers and body of an answer to a request for this application."""
        return self.ask_of(str(self.id), path, method, **headers)

    def ask_of(
        self, application: str, path: str, method: str = "GET", **headers: str
    ) -> tuple[int, dict[str, str], str]:
        """Ask the proxy for any application; what is returned is not followed."""
        connection = http.client.HTTPConnection(self._address, timeout=WAIT_S)
        try:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, f"/proxy/{application}{path}", headers=sent)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, found, answer.read().decode(errors="replace")
        finally:
            connection.close()

    def close(self) -> None:
        """End it."""
        self._master.unregisterApplicationMaster(self._end, "", "")
        self._master.stop()
        self._client.stop()


def ask_for_page(through: Tracked, query: str) -> dict[str, Any]:
    """Return what the page answers through the proxy."""
    status, headers, text = through.ask(f"/?{query}")
    state = through.ask(f"/state.json?{query}")
    log = through.ask(f"/log.json?{query}&node=worker%3A0")
    token = query.partition("=")[2]
    return {
        "page": [status, text == _PAGE, headers.get("content-security-policy", "")],
        "state": [state[0], json.loads(state[2])["phase"] if state[0] == 200 else state[2]],
        "log": [log[0], json.loads(log[2]).get("node") if log[0] == 200 else log[2]],
        "stop": through.ask("/stop", "POST", X_Tfos_Token=token)[0],
        "without token": through.ask("/state.json")[0],
    }


def ask_for_tensorboard(through: Tracked) -> dict[str, Any]:
    """Return what TensorBoard answers through the proxy."""
    status, _, text = through.ask("/")
    scripts = [each.removeprefix("./") for each in text.split('"') if "index.js" in each]
    return {
        "page": [status, "tb-relative-root" in text],
        "scripts": [through.ask(f"/{each}")[0] for each in scripts],
        "read": through.ask("/data/environment")[0],
        "posted": through.ask("/data/plugin/timeseries/timeSeries", "POST")[0],
    }


def main() -> None:
    """Train, ask, stop."""
    from pyspark import SparkContext

    with SparkContext() as sc:
        cluster = TFCluster.reserve(
            sc, 2, 1, input_mode=InputMode.SPARK, page_port=0, tensorboard=True
        )
        with cluster:
            cluster.start(main_fun)
            cluster.train(sc.parallelize(range(200), 2), num_epochs=1)
            page, board = cluster.page_url(), cluster.tensorboard_url()
            assert page is not None
            assert board is not None
            url, _, query = page.partition("?")
            with closing(Tracked(sc, url)) as through:
                told: dict[str, Any] = {"page": ask_for_page(through, query)}
                through.lead_to(board)
                told["tensorboard"] = ask_for_tensorboard(through)
                status, _, text = through.ask_of(sc.applicationId, "/jobs/")
                told["spark"] = [status, "Spark Jobs" in text]
        sys.stdout.write(f"{TOLD}{json.dumps(told)}\n")


if __name__ == "__main__":
    main()
