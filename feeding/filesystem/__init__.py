"""Files where users keep them: this host, HDFS, and whatever fsspec knows, behind one interface.

Start to read at `interface`; `choose.filesystem_for(path)` gives the one that a path belongs to.
"""
