"""Fixtures of tests that run several of our processes together."""

from tests.support.nodes import bed as bed
