"""Tables like those of OpenML, and the ARFF files that it offers of them."""

from pathlib import Path

import numpy as np
import pandas as pd

NAMES = ("adult_num", "adult_onehot", "mushroom_num", "mushroom_onehot", "covertype", "shuttle", "magic")


def make(folder: Path, rng: np.random.Generator, name: str = "adult_num") -> pd.DataFrame:
    """The ARFF file of a dataset. Returns its table, of which the last column is the target."""
    frame = table(name, rng)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"% {name}", f"@RELATION {name}", ""]
    for column in frame:
        kind = "REAL" if frame[column].dtype.kind == "f" else f"{{{','.join(map(repr, frame[column].cat.categories))}}}"
        lines.append(f"@ATTRIBUTE '{column}' {kind}")
    rows = [",".join("?" if pd.isna(value) else repr(value) for value in row) for row in frame.to_numpy(object)]
    (folder / f"{name}.arff").write_text("\n".join([*lines, "@DATA", *rows]) + "\n")
    return frame


def table(name: str, rng: np.random.Generator, rows: int = 30) -> pd.DataFrame:
    """A table with the kinds of columns that the dataset has."""

    def category(*values: str) -> pd.Categorical:
        return pd.Categorical(np.array([*values, *rng.choice(values, rows - len(values))], object), sorted(set(values)))

    if name.startswith("mushroom"):
        odor = category("n", "a", "f")
        odor[3] = None
        return pd.DataFrame({"odor": odor, "veil": category("p"), "class": category("e", "p")})
    numbers = {"first": rng.normal(3, 2, rows), "second": rng.uniform(size=rows)}
    if not name.startswith("adult"):
        return pd.DataFrame({**numbers, "class": category("1", "10", "2")})
    jobs, work = category("Sales", "Craft repair", "Tech"), category("Private", "Self, own", "State")
    jobs[4] = work[7] = None
    return pd.DataFrame(
        {"age": category("0", "1"), **numbers, "work": work, "occupation": jobs, "class": category("x", "y")}
    )
