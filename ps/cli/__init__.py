"""Commands of `python -m ps` and `python -m ps.server`, and the sentences that explain them.

The command `tfos` offers those of `python -m ps` too; it takes names and sentences from here and
imports a command's module only when that is run.
"""

COMMANDS = {
    "inspect": "Print what each checkpoint in a directory holds and whether it is whole.",
    "export": "Write one checkpoint's parameters for numpy.load.",
    "stats": "Print what running servers have counted.",
    "warm": "Compile all kernels into a cache directory.",
}
"""By name, in the order in which they are listed: one sentence each."""

SECRET_FILE_HELP = "File of mode 0600 with the cluster's secret."
CLUSTER_ID_HELP = "Name of the cluster, the same for all its processes."
INTEGRITY_HELP = (
    "What is authenticated on TCP, the same for all processes: headers (header), all bytes "
    "(payload), or all bytes between two hosts (auto, the default)."
)
