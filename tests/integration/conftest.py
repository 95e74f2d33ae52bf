"""Fixtures of tests that run several of our processes together."""

from tests.node_bed import bed as bed
