"""Priorities in checkpoints and state dicts."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

import fbuf
from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch
from interop.checkpoint.state import Entries, LoadOptions
from interop.host.priorities import Priorities, PriorityValues

_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


@dataclasses.dataclass(frozen=True)
class LoadedPriorities:
    """A saved tree that was checked."""

    rule: fbuf.Prioritized
    capacity: int
    alpha: float
    beta: float
    reduction: str
    values: PriorityValues


def tree_of(parameters: Mapping[str, Any], priorities: Priorities) -> dict[str, Any]:
    """The tree of a checkpoint: parameters of the sampler, and the priorities as given."""
    values = priorities.values
    slot = None if values.highest_slot < 0 else values.highest_slot
    own = {f"_{name}": value for name, value in parameters.items()}
    highest = {"_max_priority": [values.highest, slot], "_priorities": values.given}
    return {"_schema_version": 1, **own, **highest}


def trees(state: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The documented entries that are computed from the others: weights, and weights for minima, of all slots."""
    values = state["_priorities"]
    sums = np.zeros(max(state["_max_capacity"], values.size), values.dtype)
    minima = np.full_like(sums, np.finfo(values.dtype).max)
    has_item = values >= 0
    base = values[has_item] + values.dtype.type(state["_eps"])
    with np.errstate(over="ignore"):
        weight = np.where(base > 0, base ** values.dtype.type(state["_alpha"]), 0)
    sums[: values.size][has_item] = minima[: values.size][has_item] = np.minimum(weight, np.finfo(values.dtype).max)
    return {"_sum_tree": sums, "_min_tree": minima}


def checked(
    entries: Entries, options: LoadOptions, here: Mapping[str, Any], priorities: Priorities
) -> LoadedPriorities:
    """Check a saved tree against the parameters and priorities of the sampler that loads it.

    Without "_priorities" these are computed from the weights, (priority + eps) ** alpha.
    """
    if "_schema_version" not in entries:
        raise CheckpointMismatch(
            f"{entries.where} has priorities; found the entries {sorted(map(str, entries.all()))[:12]}"
        )
    if (version := entries.whole("_schema_version")) != 1:
        raise CheckpointMismatch(f"{entries.where} has the version {version}, known is 1")
    alpha, beta, eps = (entries.number(name, 0) for name in ("_alpha", "_beta", "_eps"))
    reduction, new_items = (
        entries.text(f"_{name}") if f"_{name}" in entries else here[name] for name in ("reduction", "new_items")
    )
    highest, slot = _highest(entries)
    values = _priorities(entries, highest)
    if highest is None:
        highest = float(values.max(initial=1.0))
    if slot >= max(values.size, 1):
        raise entries.wrong("_max_priority", f"the slot of one of {values.size} items", slot)
    slot = -1 if new_items == "highest_ever" else slot
    try:
        rule = dataclasses.replace(priorities.rule, eps=eps)
        dataclasses.replace(rule, alpha=alpha, new_items=new_items)  # type: ignore[arg-type]  # this checks them
    except (TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"the parameters of a prioritized sampler: {error}") from error
    if values.dtype != np.dtype(rule.dtype) and not options.cast:
        entries.refuse(f"its priorities are {values.dtype}, here they are {rule.dtype} (cast=True casts them)")
    with np.errstate(over="ignore"):
        values = values.astype(rule.dtype)
        top = np.asarray(highest, rule.dtype)[()]
    if not (np.isfinite(values).all() and np.isfinite(top)):
        entries.refuse(f"its priorities are not finite in {rule.dtype}")
    if new_items != rule.new_items:
        entries.refuse(
            f"max_priority_within_buffer is {new_items == 'highest_stored'} there and "
            f"{rule.new_items == 'highest_stored'} here"
        )
    elif new_items == "highest_ever" and values.size and values.max() > top:
        raise entries.wrong("_max_priority", "the highest of all priorities", highest)
    if "_capacity" in entries:  # in checkpoints of earlier versions
        entries.any("_capacity")
    most = entries.whole("_max_capacity", 1, 2**31 - 1) if "_max_capacity" in entries else here["max_capacity"]
    if most != here["max_capacity"] and values.size > priorities.capacity:
        entries.refuse(
            f"it has priorities of {values.size} items in a max_capacity of {most}, here max_capacity is "
            f"{here['max_capacity']}"
        )
    # Storages of several item dims hold a few items more than max_capacity.
    capacity = max(priorities.capacity, values.size)
    for name, value in (("alpha", alpha), ("beta", beta), ("eps", eps), ("reduction", reduction)):
        entries.parameter(name, value, here[name])
    return LoadedPriorities(rule, capacity, alpha, beta, reduction, PriorityValues(values, float(top), slot))


def _highest(entries: Entries) -> tuple[float | None, int]:
    """The highest priority, and the slot of its item or -1. They are saved as numbers, arrays of one value, or None."""
    highest, slot = entries.items("_max_priority", 2)
    top = np.asarray(1.0 if highest is None else highest)
    at = np.asarray(-1 if slot is None else slot)
    fits = top.size == at.size == 1 and top.dtype.kind in "fiu" and at.dtype.kind in "iu"
    if not fits or not 0 <= top.item() < np.inf or at.item() < -1:
        raise entries.wrong("_max_priority", "a priority and the slot of its item", [highest, slot])
    return None if highest is None else float(top.item()), int(at.item())


def _priorities(entries: Entries, highest: float | None) -> np.ndarray:
    """A copy of the priorities, -1 where no item is."""
    sums, minima = (entries.any(name) if name in entries else None for name in ("_sum_tree", "_min_tree"))
    if "_priorities" not in entries and sums is not None and minima is not None:
        computed = _from_weights(entries)
        if highest is None:
            return computed
        return np.where(np.isclose(computed, highest), computed.dtype.type(highest), computed)
    stored = entries.array("_priorities", shape=(None,))
    if stored.dtype not in _FLOATS:
        raise entries.wrong("_priorities", "an array of float32 or float64", stored)
    values = np.array(stored)
    if values.size and not (((values >= 0) | (values == -1)) & (values < np.inf)).all():
        raise entries.wrong("_priorities", "finite and at least 0, or -1", values)
    return values


def _from_weights(entries: Entries) -> np.ndarray:
    """Priorities computed from weights; -1 for slots without an item."""
    sums, minima = (np.asarray(entries.array(name, shape=(None,))) for name in ("_sum_tree", "_min_tree"))
    if sums.dtype not in _FLOATS or minima.dtype not in _FLOATS or sums.shape != minima.shape:
        raise entries.wrong("_sum_tree", "weights like those of the minima", sums)
    if not (np.isfinite(sums).all() and (sums >= 0).all()):
        raise entries.wrong("_sum_tree", "finite and at least 0", sums)
    alpha = entries.number("_alpha", 0)
    eps = entries.number("_eps", 0)
    has_item = minima < np.finfo(np.float32).max
    count = int(np.flatnonzero(has_item)[-1]) + 1 if has_item.any() else 0
    sums = sums[:count]
    has_item = has_item[:count]
    with np.errstate(over="ignore", divide="ignore"):
        values = np.maximum(sums.astype(np.float64) ** (1 / alpha) - eps, 0) if alpha else (sums > 0) * 1.0
    return np.where(has_item, values, -1).astype(sums.dtype)
