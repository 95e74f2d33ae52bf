"""A job at a driver without Spark."""

from tests.support.watched_job import bed as bed
