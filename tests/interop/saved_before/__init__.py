"""Data that an earlier version of the library saved, and what it held and did next: see `write.py`."""
