"""The backend, entered in TransferQueue where that is installed."""


def register() -> None:
    """Enter the backend `FbufFiles` in TransferQueue, for this process. Calls after the first one have no effect.

    Call it in the process that calls `transfer_queue.init(conf)` first. The others, which join its run, do it by themselves.
    The configuration of the backend:

    - `path`: a folder, on a file system that all machines of the run see.
    - `flush`, False by default: wait for the disk at each put. Without it rows survive every kill of processes; with it also
      a loss of power.
    - `allow_pickle`, False by default: pickle values that are neither tensors, arrays nor plain values.

    `init` with a folder that has rows gives them to the new controller: all that were put and not cleared, with their keys
    and tags, as rows that nobody has consumed. Processes of an earlier run get an `OtherRunError` when they write.

    Raises:
        ImportError: TransferQueue is not installed.

    See also:
        https://github.com/Ascend/TransferQueue
    """
    try:
        import transfer_queue  # noqa: F401
    except ImportError as error:
        raise ImportError("the backend needs TransferQueue: pip install 'fbuf[queue]'") from error
    from interop.transfer_queue import backend

    backend.enter()
