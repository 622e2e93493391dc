"""What data goes through on its way into and out of a buffer."""

from interop.transforms.chain import Compose

__all__ = ["Compose"]
