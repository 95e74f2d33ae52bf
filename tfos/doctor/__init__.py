"""The examination of `tfos doctor`: driver, executors, Spark's settings, a directory on HDFS."""
