"""Paths and files of a run on local disks, HDFS and whatever fsspec serves."""
