"""Priorities in checkpoints and state dicts."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch

import fbuf
from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch, Fields
from interop.checkpoint.rule import Rule
from interop.checkpoint.stateful import Entries
from interop.data import bridge
from interop.host import compiled
from interop.samplers import kept_priorities

_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


def saved(sampler: Any, state: fbuf.PrioritizedState | None) -> dict[str, Any]:
    """A saved tree of a sampler in which no priorities wait: what was given, of which all else follows."""
    filled = sampler._filled
    told = {
        "max_capacity": sampler._max_capacity,
        "capacity": sampler._max_capacity if state is None else state.tree.capacity,
        "alpha": sampler._alpha,
        "beta": sampler._beta,
        "eps": sampler.rule.eps,
        "reduction": sampler.reduction,
        "new_items": sampler.rule.new_items,
    }
    if state is None:
        empty = np.zeros(0, sampler.rule.dtype)
        return {**told, "priorities": empty, "highest": float(sampler._highest), "highest_slot": -1, "refused": 0}
    return {
        **told,
        "priorities": np.array(state.priorities)[:filled],
        "highest": float(np.asarray(state.highest)),
        "highest_slot": int(np.asarray(state.highest_slot)),
        "refused": int(np.asarray(state.refused)),
    }


def fresh(sampler: Any, capacity: int) -> fbuf.PrioritizedState:
    """The state of no items over so many slots, where the priorities are."""
    alpha: Any = np.asarray(sampler._alpha, sampler.rule.dtype)
    with bridge.exact():
        empty = dataclasses.replace(sampler._fresh(sampler.rule, capacity), alpha=alpha)
        made: fbuf.PrioritizedState = jax.device_put(empty, bridge.jax_device(sampler.device))
        return made


def follow_device(sampler: Any, storage: Any) -> None:
    """Have the priorities where the storage is, if nothing else was asked for."""
    device = getattr(storage, "device", None)
    if sampler._wanted_device is None and isinstance(device, torch.device) and bridge.jax_device(device) is not None:
        sampler._apply()  # what waits, waits for a state on the CPU
        sampler._wanted_device = device
        if sampler._state is not None:  # it was loaded before anything was known of the storage
            with bridge.exact():
                sampler._state = jax.device_put(sampler._state, bridge.jax_device(device))


def loading(sampler: Any, entries: Entries, rule: Rule) -> Callable[[], None]:
    """Check a saved tree against a sampler, and build its state; what is returned puts it in."""
    given, filled = _priorities(entries)
    alpha, beta = entries.number("alpha", 0), entries.number("beta", 0)
    eps, reduction = entries.number("eps", 0), entries.text("reduction")
    highest, refused = entries.number("highest", 0), entries.whole("refused", most=2**32 - 1)
    slot, new_items = entries.whole("highest_slot", -1, max(filled - 1, -1)), entries.text("new_items")
    try:
        chosen = dataclasses.replace(sampler.rule, eps=eps)
        dataclasses.replace(chosen, alpha=alpha, new_items=new_items)  # which checks them
    except (TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"the parameters of a {type(sampler).__name__}: {error}") from error
    if given.dtype != np.dtype(chosen.dtype) and not rule.cast:
        entries.refuse(f"its priorities are {given.dtype}, here they are {chosen.dtype} (cast=True casts them)")
    with np.errstate(over="ignore"):
        values, top = given.astype(chosen.dtype), np.asarray(highest, chosen.dtype)[()]
    if not (np.isfinite(values).all() and np.isfinite(top)):
        entries.refuse(f"its priorities are not finite in {chosen.dtype}")
    if new_items != chosen.new_items:
        entries.refuse(
            f"max_priority_within_buffer is {new_items == 'highest_stored'} there and "
            f"{chosen.new_items == 'highest_stored'} here"
        )
    elif new_items == "highest_ever" and filled and values.max() > top:
        raise entries.wrong("highest", "the highest of all priorities", highest)
    capacity = _capacity(sampler, entries, filled)
    entries.parameter("alpha", alpha, sampler._alpha)
    entries.parameter("beta", beta, sampler._beta)
    entries.parameter("eps", eps, sampler.rule.eps)
    entries.parameter("reduction", reduction, sampler.reduction)
    entries.settle()  # before anything is built
    state = None
    if filled:
        sampler.refuse_a_stranger()
        known = {"priorities": values, "highest": top, "highest_slot": slot, "refused": refused}
        state = refilled(sampler, known, capacity, chosen, alpha)

    def put() -> None:
        with sampler._lock:
            sampler.rule = chosen if chosen != sampler.rule else sampler.rule
            sampler._alpha, sampler.beta, sampler.reduction = alpha, beta, reduction
            sampler._state, sampler._filled, sampler._highest = state, filled, top
            sampler._waiting.clear()
            sampler._refusals.forget()
            kept_priorities.keep_all(sampler)

    return put


def refilled(
    sampler: Any, saved: Mapping[str, Any], capacity: int, rule: fbuf.Prioritized, alpha: float
) -> fbuf.PrioritizedState:
    """The state of saved priorities. Its sums are computed anew, which gives the same bits."""
    priorities = np.full(capacity, -1, rule.dtype)
    priorities[: len(saved["priorities"])] = saved["priorities"]
    exponent: Any = np.asarray(alpha, rule.dtype)
    device = bridge.jax_device(sampler.device)
    with bridge.exact():
        state = jax.device_put(sampler._fresh(rule, capacity), device)
        state = compiled.refill(rule, state, priorities, exponent)
        rest = {
            "highest": np.asarray(saved["highest"], rule.dtype),
            "highest_slot": np.int32(saved["highest_slot"]),
            "refused": np.uint32(saved["refused"]),
        }
        return dataclasses.replace(state, **jax.device_put(rest, device))


def _priorities(entries: Entries) -> tuple[np.ndarray, int]:
    """As they were given, -1 where no item is, and how many."""
    found = entries.array("priorities", shape=(None,))
    if found.dtype not in _FLOATS:
        raise entries.wrong("priorities", "an array of float32 or float64", found)
    given = np.array(found)
    if given.size and not (((given >= 0) | (given == -1)) & (given < np.inf)).all():
        raise entries.wrong("priorities", "finite and at least 0, or -1", given)
    return given, given.size


def _capacity(sampler: Any, entries: Entries, filled: int) -> int:
    """Slots that the new state has."""
    most, capacity = entries.whole("max_capacity", 1, 2**31 - 1), entries.whole("capacity", 1, 2**31 - 1)
    if filled > capacity:
        raise entries.wrong("priorities", f"at most {capacity}", filled)
    here: int = sampler._max_capacity
    if sampler._state is not None:
        here = max(here, sampler._state.tree.capacity)
    if most == sampler._max_capacity:  # a storage of several item dims may hold a few more items than it was asked for
        if capacity > here + here // 2 + 2**16:
            raise entries.wrong("capacity", f"about {here}", capacity)
        return max(here, capacity)
    if filled > here:
        entries.refuse(
            f"it has priorities of {filled} items in a max_capacity of {most}, here max_capacity is {sampler._max_capacity}"
        )
    return here


# ------------------------------------------------------------------ state dicts


def told(state: dict[str, Any]) -> dict[str, Any]:
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


def asked(sampler: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The state of such a dict; of one that has weights only, (priority + eps) ** alpha, these are turned back."""
    fields = Fields(given, f"the state of a {type(sampler).__name__}")
    if "_schema_version" not in fields:
        raise CheckpointMismatch(
            f"the state of a {type(sampler).__name__} has priorities; found the entries {sorted(map(str, given))[:12]}"
        )
    if (version := fields.whole("_schema_version")) != 1:
        raise CheckpointMismatch(f"the state of a {type(sampler).__name__} has the version {version}, known is 1")
    own = {"reduction": sampler.reduction, "new_items": sampler.rule.new_items, "refused": 0}
    names = ("alpha", "beta", "eps", "reduction", "new_items", "refused")
    found = {name: fields.any(f"_{name}") if f"_{name}" in fields or name not in own else own[name] for name in names}
    sums, minima = fields.array("_sum_tree", shape=(None,)), fields.array("_min_tree", shape=(None,))
    if "_priorities" in fields:
        found["priorities"] = fields.any("_priorities")
    else:
        found["priorities"] = _turned_back(fields, np.asarray(sums), np.asarray(minima))
    most = fields.any("_max_capacity") if "_max_capacity" in fields else sampler._max_capacity
    found |= {"max_capacity": most, "capacity": fields.any("_capacity") if "_capacity" in fields else most}
    highest, slot = fields.items("_max_priority", 2)
    highest = np.asarray(1.0 if highest is None else highest)
    slot = np.asarray(-1 if slot is None else slot)
    if highest.size != 1 or highest.dtype.kind not in "fiu" or slot.size != 1 or slot.dtype.kind not in "iu":
        raise fields.wrong("_max_priority", "a priority and the slot of its item", given["_max_priority"])
    found |= {"highest": float(highest.reshape(())), "highest_slot": int(slot.reshape(()))}
    if found["new_items"] == "highest_ever":
        found["highest_slot"] = -1
    return found


def _turned_back(fields: Fields, sums: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Priorities of weights; -1 where there is no item, which the minima tell."""
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
