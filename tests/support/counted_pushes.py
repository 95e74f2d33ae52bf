"""A main_fun that pushes ones and tells at the end how many of them the servers have."""

from __future__ import annotations

from typing import Any


def push_until_told(args: dict[str, Any], ctx: Any) -> None:
    """Push ones until the file `end` is in args["root"]; then print what the servers hold."""
    import pathlib

    import numpy as np

    from ps.manifest.manifest import Add, GroupSpec, Hyper, Manifest, ParamSpec

    size = 10_000
    group = GroupSpec("trainable", "float32", Add(), (ParamSpec("w", (size,)),))
    manifest = Manifest(groups=(group,), bucket_bytes=4096, consistency=args["consistency"])
    client = ctx.ps_client()
    client.seed(manifest, {"trainable": np.zeros(size, np.float32)})
    client.attach()
    ones, values = {"trainable": np.ones(size, np.float32)}, {"trainable": np.empty(size, "f4")}
    root, acknowledged = pathlib.Path(args["root"]), 0
    while not (root / "end").exists():
        client.push_pull(ones, values, hyper=Hyper(0.1), rows=1)
        acknowledged += 1
        ctx.report_progress(acknowledged, acknowledged)
    (stats,) = client.stats()
    lost, step = stats.lost_updates, stats.restored_step
    least, most = int(values["trainable"].min()), int(values["trainable"].max())
    text = f"values {least} to {most} acknowledged {acknowledged} lost {lost} since {step}"
    print(text, flush=True)  # noqa: T201 - what the test reads at the driver
