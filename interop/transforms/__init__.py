"""What data goes through on its way into and out of a buffer."""

from interop.transforms.chain import Compose
from interop.transforms.transform import Transform

__all__ = ["Compose", "Transform"]
