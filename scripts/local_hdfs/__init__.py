"""A real HDFS on this host, and YARN beside it: Hadoop's daemons as processes of their own.

`scripts/hdfs up` and `scripts/yarn up` are its commands, `LocalHdfs` of `cluster` and `LocalYarn`
of `yarn` what tests use.
"""
