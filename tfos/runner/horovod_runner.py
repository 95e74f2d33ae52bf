"""Runner: HorovodRunner's form of `run`: returns rank 0's value; also without a cluster.

Covers: Runner.      Does not: start ranks (spark_run, local_run).
Runs in: the driver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from tfos.config import ClusterConfig
from tfos.errors import SettingsError, UnsupportedError
from tfos.runner.local_run import run_local
from tfos.runner.spark_run import check_time, run

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession


class Runner:
    """Runs a function on ranks, as HorovodRunner does.

    Args:
        np: above 0: number of ranks on the executors. Below 0: -np ranks as processes beside the
            driver, to try out a program.
        driver_log_verbosity: "all": every rank's output is shown in the driver's output.
        sc: SparkContext or classic SparkSession; None: the one that runs in this process.
        timeout_s: seconds that main may take once all ranks run; None: no limit.
        config: timeouts and limits of a run on the executors, and whether it shows the ranks'
            output. Processes beside the driver always write to its output.

    Raises:
        SettingsError: np is 0 or not an integer, or timeout_s is invalid.
        UnsupportedError: another verbosity.
    """

    def __init__(
        self,
        *,
        np: int,
        driver_log_verbosity: Literal["all"] = "all",
        sc: SparkContext | SparkSession | None = None,
        timeout_s: float | None = None,
        config: ClusterConfig | None = None,
    ) -> None:
        _check(np, driver_log_verbosity)
        check_time(timeout_s)
        self._timeout_s = timeout_s
        self._np = np
        self._sc = sc
        self._config = config

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Call `main(**kwargs)` on every rank and return what rank 0 returned.

        Args:
            main: may use `tfos.runner`; see tfos.run.
            **kwargs: arguments of main.

        Raises:
            SettingsError, NotPicklable, NotEnoughSlots: as in run.
            NodeFailedError, NoResultError, ShutdownTimeout: as in run.
        """
        if self._np < 0:
            return run_local(main, (), kwargs, -self._np, timeout_s=self._timeout_s)[0]
        options: dict[str, Any] = {"timeout_s": self._timeout_s, "config": self._config}
        return run(main, (), kwargs, self._np, sc=self._sc, **options)[0]


def _check(np: object, verbosity: str) -> None:
    if isinstance(np, bool) or not isinstance(np, int) or np == 0:
        raise SettingsError(
            f"np must be a whole number of ranks, got {np!r}: 4 is four on the executors, -4 four "
            "processes beside the driver"
        )
    if verbosity != "all":
        raise UnsupportedError(
            f"driver_log_verbosity={verbosity!r}: the output of ranks is shown whole ('all') or, "
            "of ranks on executors, by config=ClusterConfig(verbose=False), not at all"
        )
