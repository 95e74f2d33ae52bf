"""The job files of `tfos submit`, and the line of spark-submit that runs such a job."""
