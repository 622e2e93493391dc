"""What the compiler for CUDA is given, by the jaxlib of the CPU: nothing that asks the host or another stream.

A loop asks the host before each iteration, a sort is many kernels, and a slice that is written into a large array is handed
to another stream. Where one of them is left, the table says how many.
"""

import collections
import math
import re

import pytest

from tests.gpu.programs import BATCHES, CAPACITY, Program, programs

LEFT: dict[str, dict[str, int]] = {
    # A sort finds the earlier step of a shuffle that swapped with the same position.
    "Shuffled: sample": {"sort": 1},
    "Slices(Shuffled): sample": {"sort": 1},
    # One after the other: each item that is accepted raises the lowest rank.
    "HighestRanked: extend": {"while": 3},
    # Probing ends when all keys are found, which only the data says.
    "HashTable: insert": {"while": 4},
    "HashTable: update": {"while": 2},
    "HashTable: find": {"while": 2},
}


def asked(text: str) -> dict[str, int]:
    """How many loops, sorts and writes of slices into large arrays a lowered program has."""
    found = collections.Counter(re.findall(r"stablehlo\.(while|sort)\b", text))
    written = re.findall(r"stablehlo\.dynamic_update_slice .*: \(tensor<([\dx]+)x\w+>", text)
    sizes = [math.prod(int(size) for size in shape.split("x")) for shape in written]
    found["slice written"] = sum(size >= CAPACITY // 2 for size in sizes)
    return {name: count for name, count in found.items() if count}


SINGLE = [each for each in programs(min(BATCHES)) if "cycle" not in each.name]


@pytest.mark.parametrize("program", SINGLE, ids=str)
def test_no_operation_asks_the_host_or_another_stream(program: Program) -> None:
    assert asked(program.lowered().as_text()) == LEFT.get(program.name, {})


def test_the_count_finds_what_it_counts() -> None:
    loop = "  %1:2 = stablehlo.while(%iterArg = %c, %iterArg_0 = %arg0) : tensor<i32>, tensor<8xf32>\n"
    slices = "".join(
        f"  %2 = stablehlo.dynamic_update_slice %arg0, %1, %c : (tensor<{size}x4xf32>, tensor<2x4xf32>, tensor<i32>)\n"
        for size in (8, CAPACITY)
    )
    assert asked(loop + slices) == {"while": 1, "slice written": 1}


def test_what_is_left_is_named_as_it_is() -> None:
    assert LEFT.keys() <= {program.name for program in SINGLE}
