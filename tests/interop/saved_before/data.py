"""The rows that are written, each of which follows from its number."""

import torch
from tensordict import NonTensorData, TensorDict, tensorclass

from tests.interop.saved_before.case import Rows


@tensorclass
class Step:
    """Rows of a class."""

    obs: torch.Tensor
    id: torch.Tensor


def _obs(ids: torch.Tensor) -> torch.Tensor:
    return torch.stack([ids / 2, -(ids % 3)], -1).float()


def plain(first: int, count: int) -> TensorDict:
    ids = torch.arange(first, first + count)
    return TensorDict({"obs": _obs(ids), "id": ids}, [count])


def nested(first: int, count: int) -> TensorDict:
    """Dtypes of every size, some below another key."""
    ids = torch.arange(first, first + count)
    entries = {"half": (ids / 4).bfloat16(), "on": ids % 2 == 1, "byte": (ids * 37 % 251).to(torch.uint8)}
    below = TensorDict({**entries, "wave": torch.complex(ids.float(), -ids.float())}, [count])
    return TensorDict({"id": ids.to(torch.int16), "obs": _obs(ids).double(), "next": below}, [count])


def wide(first: int, count: int) -> TensorDict:
    """Rows of 64 KiB, so that a checkpoint of them has several files."""
    ids = torch.arange(first, first + count)
    return TensorDict({"id": ids, "pixels": ids[:, None].to(torch.uint8).expand(-1, 1 << 16).clone()}, [count])


def long_texts(first: int, count: int) -> list[object]:
    """Texts that a checkpoint has in files of their own."""
    return [{"text": f"é{number}" * 3000, "number": number} for number in range(first, first + count)]


def tensors(first: int, count: int) -> torch.Tensor:
    return _obs(torch.arange(first, first + count))


def trees(first: int, count: int) -> object:
    ids = torch.arange(first, first + count)
    return {"x": _obs(ids), "pair": (ids, [ids.to(torch.float16)])}


def trees_by_item(first: int, count: int) -> list[object]:
    return [{"x": each, "pair": (each[0], [each[1:]])} for each in tensors(first, count)]


def classes(first: int, count: int) -> object:
    ids = torch.arange(first, first + count)
    return Step(obs=_obs(ids), id=ids, batch_size=[count])  # type: ignore[call-arg]


def episodes(first: int, count: int) -> TensorDict:
    """Episodes of four steps."""
    ids = torch.arange(first, first + count)
    return TensorDict({"id": ids, "episode": ids // 4}, [count])


def ended(first: int, count: int) -> TensorDict:
    """The same, with their ends marked."""
    ids = torch.arange(first, first + count)
    done = (ids % 4 == 3)[:, None]
    return TensorDict({"id": ids, "next": TensorDict({"reward": ids[:, None].float(), "done": done}, [count])}, [count])


def prompts(first: int, count: int) -> TensorDict:
    """Pairs of completions of one prompt, that come one after the other."""
    ids = torch.arange(first, first + count)
    return TensorDict({"id": ids, "prompt_id": ids // 4 * 2 + ids % 2}, [count])


def versions(first: int, count: int) -> TensorDict:
    ids = torch.arange(first, first + count)
    return TensorDict({"id": ids, "policy_version": ids // 4}, [count])


def ranked(first: int, count: int) -> TensorDict:
    ids = torch.arange(first, first + count)
    return TensorDict({"id": ids, "rank": (7 * ids % 13 + ids / 64).float()}, [count])


def lanes(first: int, count: int) -> TensorDict:
    """Two lanes side by side, [lanes, time]."""
    ids = torch.arange(first, first + count) + torch.tensor([[0], [1000]])
    return TensorDict({"obs": _obs(ids), "episode": ids // 4}, [2, count])


def frames(first: int, count: int) -> TensorDict:
    """Stacks of two frames; episodes of four steps."""
    ids = torch.arange(first, first + count)
    step, start = ids % 4, ids - ids % 4
    numbers = 10 * start[:, None] + (step[:, None] + torch.arange(-1, 2)).clamp(min=0)
    done = (step == 3)[:, None]
    below = TensorDict({"pixels": numbers[:, 1:].clone(), "done": done}, [count])
    return TensorDict({"pixels": numbers[:, :-1].clone(), "id": ids, "next": below}, [count])


def frames_of_lanes(first: int, count: int) -> TensorDict:
    one = frames(first, count)
    other = one.clone()
    other["pixels"] += 1000
    other["next", "pixels"] += 1000
    return torch.stack([one, other])


def texts(first: int, count: int) -> TensorDict:
    """Texts of other lengths, some empty and some beyond ASCII."""
    ids = torch.arange(first, first + count)
    found = TensorDict({"id": ids}, [count])
    found["prompt"] = [("é" * (number % 3) + f" {number}" * (number % 4))[: number % 7] for number in ids.tolist()]
    return found


def values(first: int, count: int) -> TensorDict:
    """Other values of Python."""
    ids = torch.arange(first, first + count)
    kinds = [None, 1, 2.5, "text", b"\x00", [1, "a"], {"k": [True]}]
    made = [TensorDict({"id": number, "value": NonTensorData(kinds[number % 7])}) for number in ids]
    return torch.stack(made)


def ragged(first: int, count: int) -> TensorDict:
    """Rows of no to four tokens."""
    ids = torch.arange(first, first + count)
    rows = [torch.arange(number % 5) + 10 * number for number in ids.tolist()]
    return TensorDict({"id": ids, "tokens": torch.nested.nested_tensor(rows, layout=torch.jagged)}, [count])


def unlike(first: int, count: int) -> list[TensorDict]:
    """Tensordicts of other shapes, and with other keys."""
    numbers = range(first, first + count)
    return [
        TensorDict({"x": torch.full((number % 3 + 1,), number), **({"y": torch.ones(1)} if number % 2 else {})})
        for number in numbers
    ]


def objects(first: int, count: int) -> list[object]:
    """Plain values, and tensors in them."""
    kinds: list[object] = [None, "é", b"\xff", 2**70, -0.0, True, (1, [2, {"k": torch.arange(3)}]), 1.5 + 2j]
    return [
        [number, kinds[number % len(kinds)]] if number % 8 != 7 else number for number in range(first, first + count)
    ]


def pickled(first: int, count: int) -> list[object]:
    return [{number, -1} if number % 2 else frozenset([number]) for number in range(first, first + count)]


def walks(first: int, count: int) -> TensorDict:
    """Transitions with goals; episodes of four steps."""
    ids = torch.arange(first, first + count)
    place, done = ids[:, None].float(), (ids % 4 == 3)[:, None]
    goal = torch.full_like(place, -1.0)
    after = {"achieved_goal": place + 1, "desired_goal": goal.clone(), "reward": goal.clone(), "done": done}
    return TensorDict({"desired_goal": goal, "achieved_goal": place, "next": TensorDict(after, [count])}, [count])


def ted(first: int, count: int) -> TensorDict:
    """The TED format: episodes of four steps."""
    ids = torch.arange(first, first + count)
    done = (ids % 4 == 3)[:, None]
    flags = {name: torch.zeros_like(done) for name in ("done", "terminated", "truncated")}
    start = 5 * (ids // 4)  # an episode has one more observation than steps
    observations = (start + ids % 4)[:, None] + torch.zeros(2)
    after = {"obs": observations + 1, "reward": ids[:, None].float(), "done": done, "terminated": done.clone()}
    below = TensorDict({**after, "truncated": torch.zeros_like(done)}, [count])
    found = {"obs": observations, "action": ids, "collector": TensorDict({"traj_ids": ids // 4}, [count])}
    return TensorDict({**found, **flags, "next": below}, [count])


def ted_of_lanes(first: int, count: int) -> TensorDict:
    one = ted(first, count)
    other = one.clone()
    other["obs"] += 1000
    other["next", "obs"] += 1000
    other["collector", "traj_ids"] += 1000
    return torch.stack([one, other])


def newer(rows: Rows, key: str) -> Rows:
    """Rows with one more key."""

    def made(first: int, count: int) -> object:
        data = rows(first, count)
        assert isinstance(data, TensorDict)
        data[key] = torch.arange(first, first + count)[:, None] / 4
        return data

    return made
