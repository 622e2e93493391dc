"""Ids of datasets on a hub: a list in use, and no request before."""

import operator

import pytest

from interop.datasets.hub_ids import AskedIds


def test_the_hub_is_asked_once_at_the_first_use() -> None:
    asked: list[int] = []

    def ask() -> list[str]:
        asked.append(1)
        return ["a", "b"]

    class Replay:
        available_datasets = AskedIds(ask, "a hub")

    ids = Replay.available_datasets
    assert "a hub" in repr(ids) and asked == []
    assert len(ids) == 2 and ids[0] == "a" and ids[1:] == ["b"] and "b" in ids and [*ids] == ["a", "b"]
    assert (
        sorted(ids, reverse=True) == ["b", "a"]
        and ids == ["a", "b"]
        and ids != ["a"]
        and operator.add(ids, ["c"]) == ["a", "b", "c"]
    )
    assert str(ids) == repr(ids) == "['a', 'b']" and len(asked) == 1
    assert str(Replay().available_datasets) == "['a', 'b']" and len(asked) == 2
    with pytest.raises(TypeError, match="unhashable"):
        hash(ids)


def test_an_error_of_the_hub_is_raised_at_the_use() -> None:
    def ask() -> list[str]:
        raise ConnectionError("no network")

    class Replay:
        available_datasets = AskedIds(ask, "a hub")

    ids = Replay.available_datasets
    with pytest.raises(ConnectionError, match="no network"):
        len(ids)
