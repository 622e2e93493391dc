"""Numbers for logs: how often the items of a buffer are drawn, how old they are then, and which are never drawn."""

from interop.metrics.meter import Meter

__all__ = ["Meter"]
