"""A real HDFS on this host: Hadoop's NameNode and DataNodes as processes of their own.

`scripts/hdfs up` is its command, `LocalHdfs` of `cluster` what tests use.
"""
