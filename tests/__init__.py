"""The tests. A change to one folder of the package is checked by the folder of the same name here."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
"""The repository's root."""
