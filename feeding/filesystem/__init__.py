"""File systems: this host, HDFS, and every scheme of fsspec, behind one interface.

Public names: `interface.FileSystem`, `registry.filesystem_for`, `config.FileSystemConfig`.
Lock order: none of the locks here is held while another one is taken.
"""
