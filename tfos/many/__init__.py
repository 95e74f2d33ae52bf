"""Many independent trainings on Spark's task slots: `tfos.map_train`."""
