"""A buffer that is read as one and written to in parts."""

from typing import Any, NoReturn

from fbuf.memory_plan import Share
from interop.buffers.replay_buffer import ReplayBuffer
from interop.storages.planning import of_members


class Unwritable(ReplayBuffer):
    """A `ReplayBuffer` that is read and sampled from, and refuses what only its members can do, before anything changes."""

    def add(self, data: Any) -> NoReturn:
        """RuntimeError: members are written to."""
        _refuse_write("add(data)")

    def extend(self, data: Any, *, update_priority: bool | None = None) -> NoReturn:
        """RuntimeError: members are written to."""
        _refuse_write("extend(data)")

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        _refuse_write("__setitem__(index, data), as in ensemble[i][index] = data")

    def write_all(self, data: Any, end: int | None = None) -> NoReturn:
        """RuntimeError: members are written to."""
        _refuse_write("write_all(data)")

    def update_(self, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Any = None) -> NoReturn:
        """RuntimeError: members are written to."""
        _refuse_write("update_(data)")

    def update_if_present(self, *args: Any, **kwargs: Any) -> NoReturn:
        """RuntimeError: members are written to."""
        _refuse_write("update_if_present(...)")

    def _edit(self, given: Any, index: Any = ..., dim: int = 0, adds: bool = False) -> NoReturn:
        _refuse_write("set_(key, value)")

    def memory_shares(self, data: Any) -> list[Share]:
        """Those of the members; data is for each of them, or a list or tuple of data for one each."""
        return of_members([member.memory_shares for member in self._members], data)

    def empty(self, empty_write_count: bool = True) -> NoReturn:
        """NotImplementedError: members are emptied."""
        raise NotImplementedError("an ensemble is not emptied as a whole: ensemble[i].empty()")

    def state_dict(self) -> dict[str, Any]:
        """NotImplementedError: members have a state."""
        raise NotImplementedError("an ensemble has no state of its own: ensemble[i].state_dict()")

    def load_state_dict(self, state_dict: Any) -> None:
        """NotImplementedError: members have a state."""
        raise NotImplementedError("an ensemble has no state of its own: ensemble[i].load_state_dict(...)")

    def read_all_in_order(self, end: int | None = None) -> NoReturn:
        """RuntimeError: each member has an order of its own."""
        raise RuntimeError("an ensemble has no one order of items: ensemble[i].read_all_in_order()")

    def set_storage(self, storage: Any, collate_fn: Any = None) -> NoReturn:
        """RuntimeError: members have storages."""
        raise RuntimeError("the storages of an ensemble are those of its members: ensemble[i].set_storage(...)")

    def set_sampler(self, sampler: Any) -> NoReturn:
        """RuntimeError: members have samplers; `sampler.p` and `sampler.num_buffer_sampled` can be set."""
        raise RuntimeError("the samplers of an ensemble are those of its members: ensemble[i].set_sampler(...)")

    def set_writer(self, writer: Any) -> NoReturn:
        """RuntimeError: members have writers."""
        raise RuntimeError("the writers of an ensemble are those of its members: ensemble[i].set_writer(...)")

    def __getattr__(self, name: str) -> Any:
        if name == "write_count":
            raise AttributeError("an ensemble counts no writes: ask its members, ensemble[i].write_count")
        return super().__getattr__(name)


def _refuse_write(call: str) -> NoReturn:
    raise RuntimeError(f"an ensemble cannot be written to: index the member first, ensemble[i].{call}")
