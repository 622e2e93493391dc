"""The storage backend `FbufFiles` of TransferQueue, and how a new run gets the rows of the one that was killed."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import ray
from omegaconf import DictConfig
from tensordict import NonTensorStack, TensorDict
from torch import Tensor
from transfer_queue.metadata import BatchMeta, extract_field_schema
from transfer_queue.storage.bootstrap import StorageBootstrapProvider
from transfer_queue.storage.managers import StorageManager, StorageManagerFactory
from transfer_queue.utils.zmq_utils import ZMQServerInfo

from interop.transfer_queue.queue_files import QueueFiles, Stored
from interop.transfer_queue.segments import Field

NAME = "FbufFiles"
_AT_ONCE = 128  # rows whose fields are read together for their schema


class Run:
    """The number of a run, in the configuration that the controller gives to all processes.

    A process that unpickles it enters the backend: so only the first one has to call `register`.
    """

    def __init__(self, generation: int) -> None:
        self.generation = generation

    def __reduce__(self) -> tuple[Any, ...]:
        return _run, (self.generation,)


def _run(generation: int) -> Run:
    enter()
    return Run(generation)


class FileStorageManager(StorageManager):
    """Puts, gets and clears rows in the files of a run. Each process writes and reads by itself: no server is between."""

    def __init__(self, controller_info: ZMQServerInfo, config: Mapping[str, Any], zmq_context: object = None) -> None:
        path, run = config.get("path"), config.get("run")
        if path is None or run is None:
            raise ValueError(
                f"{NAME} needs a configuration that transfer_queue.init() has completed, with path: a folder"
            )
        super().__init__(controller_info, config, zmq_context)
        self._files = QueueFiles(path, run.generation, **_options(config))

    async def put_data(
        self, data: TensorDict, metadata: BatchMeta, data_parser: Callable[[Any], Any] | None = None
    ) -> None:
        """Commit the data, and tell the controller. Keys and tags are committed with it."""
        if data_parser is not None:
            raise NotImplementedError(f"{NAME} stores what it is given: apply the data_parser before the put")
        if metadata.size == 0:
            return
        partition, indexes = metadata.partition_ids[0], metadata.global_indexes
        schema = extract_field_schema(data)  # first: it checks the rows of each field
        fields = {name: _field(data[name]) for name in schema}
        keys = await _controller().kv_retrieve_keys.remote(indexes, partition)
        await asyncio.get_running_loop().run_in_executor(
            None, self._files.put, partition, indexes, fields, keys or None, metadata.get_all_custom_meta()
        )
        await self.notify_data_update(partition, indexes, schema)

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """The fields that the metadata names. Tensors may be views of the files, and can be written to."""
        if metadata.size == 0 or not metadata.field_names:
            return TensorDict({}, batch_size=[metadata.size])
        return await asyncio.get_running_loop().run_in_executor(
            None, _read, self._files, metadata.global_indexes, metadata.field_names
        )

    async def clear_data(self, metadata: BatchMeta) -> None:
        """Remove rows: they are not there after a kill."""
        await asyncio.get_running_loop().run_in_executor(None, self._files.clear, metadata.global_indexes)

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Refused: the files survive a kill by themselves."""
        raise RuntimeError(
            f"{NAME} has no checkpoints: a run that is started with the same path goes on with all rows that were put and "
            "not cleared. Clear rows after the checkpoint of the trainer that has learnt from them"
        )

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Refused, as `save_checkpoint`."""
        raise RuntimeError(f"{NAME} has no checkpoints: start a run with the same path")

    def close(self) -> None:
        """Close sockets and files. The rows stay stored."""
        super().close()
        if hasattr(self, "_files"):  # the constructor of the base class may have failed, and __del__ calls this
            self._files.close()


def initialize(conf: DictConfig) -> dict[str, Any]:
    """Begin a run in the folder of the configuration, and tell its controller the rows that are stored there."""
    config = conf.backend[NAME]
    if not config.get("path"):
        raise ValueError(f"backend.{NAME} needs path: a folder that all machines of the run see")
    options, controller = _options(config), _controller()
    generation, stored = QueueFiles.begin(config.path, lambda rows: _allocated(controller, rows), **options)
    config.run = Run(generation)
    files = QueueFiles(config.path, generation, **options)
    try:
        for (partition, fields), group in _grouped(stored, lambda row: (row.partition, row.fields)):
            for first in range(0, len(group), _AT_ONCE):
                indexes = [row.index for row in group[first : first + _AT_ONCE]]
                schema = _by_index(extract_field_schema(_read(files, indexes, fields)), indexes)
                if not ray.get(controller.update_production_status.remote(partition, indexes, schema)):
                    raise RuntimeError(f"the controller did not take stored rows of partition {partition!r}")
        for partition, group in _grouped(stored, lambda row: row.partition):
            ray.get(controller.set_custom_meta.remote({partition: {row.index: row.tags for row in group}}))
    finally:
        files.close()
    return {"path": config.path, "generation": generation, "rows": len(stored)}


def enter() -> None:
    """Enter the backend in the registries of TransferQueue. Calls after the first one have no effect."""
    StorageManagerFactory.register(NAME)(FileStorageManager)
    StorageBootstrapProvider.register_provider(NAME)(initialize)


def _controller() -> Any:
    return ray.get_actor("TransferQueueController", namespace="transfer_queue")


def _options(config: Mapping[str, Any]) -> dict[str, bool]:
    return {"flush": bool(config.get("flush", False)), "allow_pickle": bool(config.get("allow_pickle", False))}


def _allocated(controller: Any, rows: Sequence[Stored]) -> list[int]:
    """An index of the controller for each row, in the order of the rows. Rows with a key get theirs under it."""
    found: dict[int, int] = {}
    for (partition, has_key), group in _grouped(rows, lambda row: (row.partition, row.key is not None)):
        if has_key:
            meta = controller.kv_retrieve_meta.remote([row.key for row in group], partition, create=True)
        else:
            fields = sorted({field for row in group for field in row.fields})
            meta = controller.get_metadata.remote(fields, partition, mode="insert", batch_size=len(group))
        found.update(zip((row.index for row in group), ray.get(meta).global_indexes, strict=True))
    return [found[row.index] for row in rows]


def _grouped(rows: Sequence[Stored], by: Callable[[Stored], Any]) -> list[tuple[Any, list[Stored]]]:
    return [(name, list(group)) for name, group in groupby(sorted(rows, key=by), key=by)]


def _by_index(schema: dict[str, dict[str, Any]], indexes: Sequence[int]) -> dict[str, dict[str, Any]]:
    """The schema as a notification has it: shapes of rows by index."""
    return {
        name: field | {"per_sample_shapes": dict(zip(indexes, field["per_sample_shapes"], strict=True))}
        if "per_sample_shapes" in field
        else field
        for name, field in schema.items()
    }


def _field(value: Field) -> Field:
    """The rows of a field: a tensor, or a list."""
    if isinstance(value, Tensor):
        return value
    return value.tolist() if isinstance(value, NonTensorStack) else list(value)


def _read(files: QueueFiles, indexes: Sequence[int], fields: Sequence[str]) -> TensorDict:
    found = files.get(indexes, fields)
    return TensorDict(
        {name: value if kind == "tensor" else NonTensorStack(*value) for name, (kind, value) in found.items()},
        batch_size=[len(indexes)],
    )
