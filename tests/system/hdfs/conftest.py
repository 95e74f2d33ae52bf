"""Fixtures of tests that need a real HDFS and whole nodes."""

from tests.support.nodes import bed as bed
