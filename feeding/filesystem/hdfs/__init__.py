"""HDFS through hdfs-native: client, configuration, reading and writing."""
