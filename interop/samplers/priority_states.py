"""Priorities in checkpoints and state dicts."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

import fbuf
from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch, Fields
from interop.checkpoint.rule import Rule
from interop.checkpoint.stateful import Entries
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


def saved(parameters: Mapping[str, Any], held: Priorities) -> dict[str, Any]:
    """A saved tree: parameters of the sampler, and the priorities as given, of which all else follows."""
    values = held.values
    highest = {"highest": values.highest, "highest_slot": values.highest_slot, "refused": 0}
    return {**parameters, "capacity": held.capacity, "priorities": values.given, **highest}


def checked(entries: Entries, options: Rule, here: Mapping[str, Any], held: Priorities) -> LoadedPriorities:
    """Check a saved tree against the parameters and priorities of the sampler that loads it."""
    given = _priorities(entries)
    alpha, beta = entries.number("alpha", 0), entries.number("beta", 0)
    eps, reduction = entries.number("eps", 0), entries.text("reduction")
    highest, _ = entries.number("highest", 0), entries.whole("refused", most=2**32 - 1)
    slot, new_items = entries.whole("highest_slot", -1, max(given.size - 1, -1)), entries.text("new_items")
    try:
        rule = dataclasses.replace(held.rule, eps=eps)
        dataclasses.replace(rule, alpha=alpha, new_items=new_items)  # type: ignore[arg-type]  # this checks them
    except (TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"the parameters of a prioritized sampler: {error}") from error
    if given.dtype != np.dtype(rule.dtype) and not options.cast:
        entries.refuse(f"its priorities are {given.dtype}, here they are {rule.dtype} (cast=True casts them)")
    with np.errstate(over="ignore"):
        given, top = given.astype(rule.dtype), np.asarray(highest, rule.dtype)[()]
    if not (np.isfinite(given).all() and np.isfinite(top)):
        entries.refuse(f"its priorities are not finite in {rule.dtype}")
    if new_items != rule.new_items:
        entries.refuse(
            f"max_priority_within_buffer is {new_items == 'highest_stored'} there and "
            f"{rule.new_items == 'highest_stored'} here"
        )
    elif new_items == "highest_ever" and given.size and given.max() > top:
        raise entries.wrong("highest", "the highest of all priorities", highest)
    capacity = _capacity(entries, given.size, here["max_capacity"], held.capacity)
    for name, value in (("alpha", alpha), ("beta", beta), ("eps", eps), ("reduction", reduction)):
        entries.parameter(name, value, here[name])
    return LoadedPriorities(rule, capacity, alpha, beta, reduction, PriorityValues(given, float(top), slot))


def _priorities(entries: Entries) -> np.ndarray:
    """A copy of the priorities, -1 where no item is."""
    found = entries.array("priorities", shape=(None,))
    if found.dtype not in _FLOATS:
        raise entries.wrong("priorities", "an array of float32 or float64", found)
    given = np.array(found)
    if given.size and not (((given >= 0) | (given == -1)) & (given < np.inf)).all():
        raise entries.wrong("priorities", "finite and at least 0, or -1", given)
    return given


def _capacity(entries: Entries, size: int, max_capacity: int, here: int) -> int:
    """How many slots to load into."""
    most, capacity = entries.whole("max_capacity", 1, 2**31 - 1), entries.whole("capacity", 1, 2**31 - 1)
    if size > capacity:
        raise entries.wrong("priorities", f"at most {capacity}", size)
    if most == max_capacity:  # a storage of several item dims may hold a few more items than it was asked for
        if capacity > here + here // 2 + 2**16:
            raise entries.wrong("capacity", f"about {here}", capacity)
        return max(here, capacity)
    if size > here:
        entries.refuse(
            f"it has priorities of {size} items in a max_capacity of {most}, here max_capacity is {max_capacity}"
        )
    return here


# ------------------------------------------------------------------ state dicts


def as_dict(state: dict[str, Any]) -> dict[str, Any]:
    """The documented entries, and as `_priorities` what these values were made of."""
    given, capacity = state["priorities"], state["max_capacity"]
    sums = np.zeros(max(capacity, given.size), given.dtype)
    minima = np.full_like(sums, np.finfo(given.dtype).max)
    held = given >= 0
    base = given[held] + given.dtype.type(state["eps"])
    with np.errstate(over="ignore"):
        weight = np.where(base > 0, base ** given.dtype.type(state["alpha"]), 0)
    sums[: given.size][held] = minima[: given.size][held] = np.minimum(weight, np.finfo(given.dtype).max)
    rest = {
        f"_{name}": state[name] for name in ("alpha", "beta", "eps", "reduction", "new_items", "refused", "capacity")
    }
    return {
        "_schema_version": 1,
        **rest,
        "_max_capacity": capacity,
        "_max_priority": [state["highest"], None if state["highest_slot"] < 0 else state["highest_slot"]],
        "_sum_tree": sums,
        "_min_tree": minima,
        "_priorities": given,
    }


def of_dict(given: Mapping[str, Any], here: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The saved tree of such a dict; from weights alone, (priority + eps) ** alpha, the priorities are computed."""
    fields = Fields(given, f"the state of a {name}")
    if "_schema_version" not in fields:
        raise CheckpointMismatch(
            f"the state of a {name} has priorities; found the entries {sorted(map(str, given))[:12]}"
        )
    if (version := fields.whole("_schema_version")) != 1:
        raise CheckpointMismatch(f"the state of a {name} has the version {version}, known is 1")
    own = {"reduction": here["reduction"], "new_items": here["new_items"], "refused": 0}
    names = ("alpha", "beta", "eps", "reduction", "new_items", "refused")
    found = {each: fields.any(f"_{each}") if f"_{each}" in fields or each not in own else own[each] for each in names}
    sums, minima = fields.array("_sum_tree", shape=(None,)), fields.array("_min_tree", shape=(None,))
    if "_priorities" in fields:
        found["priorities"] = fields.any("_priorities")
    most = fields.any("_max_capacity") if "_max_capacity" in fields else here["max_capacity"]
    found |= {"max_capacity": most, "capacity": fields.any("_capacity") if "_capacity" in fields else most}
    highest, slot = fields.items("_max_priority", 2)
    highest = np.asarray(1.0 if highest is None else highest)
    slot = np.asarray(-1 if slot is None else slot)
    if highest.size != 1 or highest.dtype.kind not in "fiu" or slot.size != 1 or slot.dtype.kind not in "iu":
        raise fields.wrong("_max_priority", "a priority and the slot of its item", given["_max_priority"])
    found |= {"highest": float(highest.reshape(())), "highest_slot": int(slot.reshape(()))}
    if "priorities" not in found:
        computed, top = _given_of(fields, np.asarray(sums), np.asarray(minima)), found["highest"]
        found["priorities"] = np.where(np.isclose(computed, top), computed.dtype.type(top), computed)
    if found["new_items"] == "highest_ever":
        found["highest_slot"] = -1
    return found


def _given_of(fields: Fields, sums: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Priorities computed from weights; -1 where the minima say that there is no item."""
    if sums.dtype not in _FLOATS or minima.dtype not in _FLOATS or sums.shape != minima.shape:
        raise fields.wrong("_sum_tree", "weights like those of the minima", sums)
    if not (np.isfinite(sums).all() and (sums >= 0).all()):
        raise fields.wrong("_sum_tree", "finite and at least 0", sums)
    alpha, eps = fields.number("_alpha", 0), fields.number("_eps", 0)
    held = minima < np.finfo(np.float32).max
    count = int(np.flatnonzero(held)[-1]) + 1 if held.any() else 0
    sums, held = sums[:count], held[:count]
    with np.errstate(over="ignore", divide="ignore"):
        given = np.maximum(sums.astype(np.float64) ** (1 / alpha) - eps, 0) if alpha else (sums > 0) * 1.0
    return np.where(held, given, -1).astype(sums.dtype)
