"""Consistency modes (asp, ssp, bsp, hybrid) and the gate that executes their decisions."""
