"""A durable storage backend for TransferQueue: rows that were put survive every kill. Needs the extra `queue`."""

from interop.transfer_queue.queue_files import OtherRunError, QueueFiles, Stored
from interop.transfer_queue.registering import register

__all__ = ["OtherRunError", "QueueFiles", "Stored", "register"]
