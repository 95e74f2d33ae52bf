"""HDFS through hdfs-native: client, configuration, reading and writing.

Public name: `filesystem.HdfsFileSystem`.
"""
