"""Encoding of Python rows, arrays and pickled batches as columns of chunks.

Public names: `packer.Packer`, `arrays.ArrayPacker`, `pickled.PickledPacker`.
"""
