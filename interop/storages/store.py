"""Items in the memory of a key-value server, such as Redis."""

from interop.data.arguments import whole
from interop.engine.places.server import Store
from interop.storages.tensors import TensorStorage


class StoreStorage(TensorStorage):
    """Like `LazyTensorStorage`, with the rows in a server that speaks the protocol of Redis. Needs the extra `store`.

    An item is one value in the server. A write is one transaction of it: all of its rows change, or none. A read of a batch
    is a command for each 1,024 items. Reads are copies. Text, and rows of unlike sizes, stay in this process.

        >>> rb = ReplayBuffer(storage=StoreStorage(1000, host="localhost", port=6379), batch_size=32)
        >>> rb.extend(TensorDict({"obs": torch.randn(10, 4), "action": torch.randn(10, 2)}, [10]))
        >>> batch = rb.sample()

    The rows belong to this storage: they are deleted when it is, and when the process ends; a process that is killed leaves
    its keys, "fbuf:..." by default. Save them with `dumps`. A copy of the buffer has rows of its own. Other processes
    cannot use the storage.

    Args:
        max_size: capacity in items.
        backend: the name of the server in messages, such as "dragonfly" or "keydb".
        host, port, db: where the server is, and the number of its database.
        compilable: keep the length local to this process.
        store_kwargs: `prefix`, what the names of keys begin with; `client`, a `redis.Redis` to use instead of these
            arguments; others are those of `redis.Redis`, such as `unix_socket_path` and `password`.

    ImportError without the package `redis`. Writes: ConnectionError if no server answers. Reads: RuntimeError if the
    server has lost an item, since it evicts keys or was flushed.
    """

    def __init__(
        self,
        max_size: int,
        *,
        backend: str = "redis",
        host: str = "localhost",
        port: int = 6379,
        db: int = 0,
        compilable: bool = False,
        **store_kwargs: object,
    ) -> None:
        prefix = str(store_kwargs.pop("prefix", "fbuf"))
        client = store_kwargs.pop("client", None)
        port, db = whole("port", port), whole("db", db, least=0)
        options = {} if client is not None else {"host": host, "port": port, "db": db, **store_kwargs}
        self._begin(Store(backend, prefix, client, options), max_size, 1, compilable)
