"""When a push is applied and a pull is answered.

The modes asp, ssp, bsp and hybrid, and the gate.
"""
