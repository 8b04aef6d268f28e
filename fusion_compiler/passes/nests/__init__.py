"""Chains of reductions that become one loop nest each: see `attention.py`."""
