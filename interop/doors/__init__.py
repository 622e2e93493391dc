"""`from_fbuf`: the torch API over a functional buffer, whose calls are jitted programs of `fbuf` on any device."""

from interop.doors.functional_buffer import FunctionalReplayBuffer, from_fbuf

__all__ = ["FunctionalReplayBuffer", "from_fbuf"]
