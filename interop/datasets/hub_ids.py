"""The ids of the datasets on a hub, which is asked when they are first used."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, overload


class _Printer(Protocol):
    """What IPython passes to `_repr_pretty_`."""

    def text(self, text: str) -> object: ...


class HubIds(Sequence[str]):
    """The ids as a sequence; `list(ids)` is a list of them.

    The first use of its contents asks the hub, once. Access to the attribute, `repr`, `help` and tab completion do not: they
    would wait for the network, or without one for all its retries. `print` and a notebook show the ids.
    """

    def __init__(self, ask: Callable[[], Sequence[str]], hub: str) -> None:
        self._ask = ask
        self._hub = hub
        self._answer: list[str] | None = None

    def _ids(self) -> list[str]:
        if self._answer is None:
            self._answer = [*self._ask()]
        return self._answer

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        return self._ids()[place]

    def __len__(self) -> int:
        return len(self._ids())

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (list, HubIds)):
            return self is other or self._ids() == [*other]
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as of lists

    def __add__(self, more: list[str]) -> list[str]:
        return self._ids() + more

    def __repr__(self) -> str:
        return f"<ids of the datasets of {self._hub}: list(...) asks for them>" if self._answer is None else str(self)

    def __str__(self) -> str:
        return repr(self._ids())

    def _repr_pretty_(self, printer: _Printer, cycle: bool) -> None:  # of IPython, which shows values
        printer.text(str(self))


class AskedIds:
    """A class attribute: each access is a new `HubIds`, so that later accesses see new datasets."""

    def __init__(self, ask: Callable[[], Sequence[str]], hub: str) -> None:
        self.ask = ask
        self.hub = hub

    def __get__(self, instance: object, owner: type) -> HubIds:
        return HubIds(self.ask, self.hub)
