"""Operators of the project's own, each with its plain reference in PyTorch."""
