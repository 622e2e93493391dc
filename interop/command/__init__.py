"""The command `fbuf`, also `python -m interop`."""
