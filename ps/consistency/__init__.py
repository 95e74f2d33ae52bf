"""Consistency modes (asp, ssp, bsp, hybrid) and the gate that executes their decisions.

Public names: `gate.Gate`, `waiting.PendingPush`.
Lock order: the gate's `changed`, then one bucket's.
"""
