"""Frames: their byte layout (`frame`), sending and receiving them over a stream (`frame_io`).

Public names: `frame.Sealer`, `frame.Opener`, `frame_io.FrameChannel`.
"""
