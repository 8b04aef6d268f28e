"""Logits that are never stored: see `chunk.py`."""
