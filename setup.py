"""Shim for tools that still call setup.py; pyproject.toml is the truth."""

from setuptools import setup

setup()
