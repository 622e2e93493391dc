"""Groups of completions as plain lists: what a PromptGroupSampler must agree with."""

from typing import Any


class GroupModel:
    """Groups of `size` rows of one id, each served `most` times."""

    def __init__(self, size: int, most: int | None = None) -> None:
        self.size, self.most = size, most
        self.groups: list[dict[str, Any]] = []

    def write(self, slot: int, id_: Any) -> None:
        for group in self.groups:
            if slot in group["slots"]:
                group["slots"].remove(slot)
                group["broken"] = True
        fitting = [each for each in self.groups if each["id"] == id_ and not each["broken"]]
        if not fitting or len(fitting[-1]["slots"]) == self.size:
            fitting.append({"number": len(self.groups), "id": id_, "slots": [], "broken": False, "uses": 0})
            self.groups.append(fitting[-1])
        fitting[-1]["slots"].append(slot)

    def edit(self, slot: int, id_: Any) -> None:
        """A row that is stored gets this id."""
        if not any(slot in each["slots"] and each["id"] == id_ for each in self.groups):
            self.write(slot, id_)

    def ready(self) -> list[dict[str, Any]]:
        whole = [each for each in self.groups if len(each["slots"]) == self.size and not each["broken"]]
        return [each for each in whole if self.most is None or each["uses"] < self.most]

    def check(self, slots: list[int], info: dict[Any, Any]) -> None:
        """A batch: different groups that are ready, each whole and in its order; counts a use of each."""
        parts = [slots[at : at + self.size] for at in range(0, len(slots), self.size)]
        drawn = [next(each for each in self.ready() if each["slots"] == part) for part in parts]
        assert len({each["number"] for each in drawn}) == len(drawn)
        assert info["group_number"].tolist() == [each["number"] for each in drawn for _ in range(self.size)]
        for each in drawn:
            each["uses"] += 1
        assert ("group_uses" in info) == (self.most is not None)
        if self.most is not None:
            assert info["group_uses"].tolist() == [each["uses"] for each in drawn for _ in range(self.size)]
