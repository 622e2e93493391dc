"""A Minari dataset as a replay buffer: what do its conversion, its next construction and a batch take?

    python benchmarks/torch_datasets.py [--quick] [--json FILE]

10^6 steps of 17 float64 observations and 6 actions, in HDF5 files of 1,000 episodes, and episodes of JPEG images; both
are written by minari. Each conversion runs in a process of its own, which has converted a small dataset before: imports
are not counted. Its anonymous memory is sampled every few milliseconds. torchrl 0.14 leaves zeros in the place of the
rows, so it stands here twice: as it is, and with the rows written afterwards. Pillow decodes the same JPEG images out of
memory, and does nothing else.
"""

import argparse
import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import h5py
import measure
import minari
import numpy as np
from PIL import Image

import interop
from interop.datasets import MinariExperienceReplay
from interop.datasets.minari_data import MinariSource

STEPS = 1000  # of an episode
BATCH = 256
IMAGE = (96, 96, 3)
MIB = 1 << 20
WRITTEN = ", written"  # torchrl 0.14 writes no rows: its conversion, and then as many rows to files

# ---------------------------------------------------------------------- the datasets


def made(name: str, episodes: int, steps: int, image: bool = False) -> str:
    """Write a dataset into the folder of minari. Returns its id."""
    rng, dataset_id = np.random.default_rng(0), f"bench/{name}-v0"
    infinite = np.full(17, np.inf)
    seen = gymnasium.spaces.Box(0, 255, IMAGE, np.uint8) if image else gymnasium.spaces.Box(-infinite, infinite)

    def observations() -> Any:
        if not image:
            return rng.normal(size=(steps + 1, 17))
        row, column = np.ogrid[: IMAGE[0], : IMAGE[1], :1][:2]
        waves = rng.uniform(0.02, 0.2, (2, steps + 1, 1, 1, 3))
        return (127 + 60 * (np.sin(row * waves[0]) + np.cos(column * waves[1]))).astype(np.uint8)

    buffers = [
        minari.data_collector.EpisodeBuffer(
            id=episode,
            observations=observations(),
            actions=rng.uniform(-1, 1, (steps, 6)).astype(np.float32),
            rewards=rng.normal(size=steps),
            terminations=np.zeros(steps, bool),
            truncations=np.arange(steps) == steps - 1,
            infos={},
        )
        for episode in range(episodes)
    ]
    spaces = {"observation_space": seen, "action_space": gymnasium.spaces.Box(-1, 1, (6,))}
    minari.create_dataset_from_buffers(dataset_id, buffers, data_format="hdf5", **spaces)
    return dataset_id


# ---------------------------------------------------------------------- what is measured


def loader(name: str) -> Callable[..., Any]:
    return (
        MinariExperienceReplay
        if name == measure.OURS
        else measure.rival("torchrl.data.datasets").MinariExperienceReplay
    )


def anonymous() -> int:
    """Bytes of this process that are not in files."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


class Peak:
    """The most anonymous memory while it is entered, above what there was before."""

    def __enter__(self) -> "Peak":
        self.before = self.most = anonymous()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self.most = max(self.most, anonymous())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def mib(self) -> float:
        return (self.most - self.before) / MIB


def inside(name: str, *ids: str) -> None:
    """The child: converts a small dataset to import what it needs, then a large one, and prints the numbers of each."""
    for dataset_id in ids:
        with tempfile.TemporaryDirectory(dir=os.environ["MINARI_DATASETS_PATH"]) as root, Peak() as peak:
            start = time.perf_counter()
            made = loader(name.removesuffix(WRITTEN))(dataset_id, BATCH, root=root, load_from_local_minari=True)
            if name.endswith(WRITTEN):
                made[:].clone().memmap(f"{root}/written")
            seconds = time.perf_counter() - start
        print(json.dumps([seconds, peak.mib]))


def converted(name: str, small: str, large: str) -> tuple[float, float]:
    """Seconds, and MiB of anonymous memory, of a conversion in a process of its own."""
    command = [sys.executable, __file__, "--inside", name, small, large]
    found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout
    seconds, mib = json.loads(found.splitlines()[-1])
    return seconds, mib


def conversions(contenders: list[str], small: str, large: str, rounds: int) -> tuple[measure.Timing, dict[str, float]]:
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    peaks: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name in contenders if turn % 2 else contenders[::-1]:
            seconds, mib = converted(name, small, large)
            taken[name].append(seconds)
            peaks[name].append(mib)
    values = {f"MiB of anonymous memory, conversion, {name}": max(each) for name, each in peaks.items()}
    return measure.of_rounds("conversion", taken), values


def constructed_again(contenders: list[str], dataset_id: str, root: pathlib.Path, quick: bool) -> list[measure.Timing]:
    """Of a dataset that is converted: the construction, and the batches of what was constructed."""
    with contextlib.redirect_stderr(io.StringIO()):  # a bar
        made = {
            name: loader(name)(dataset_id, BATCH, root=root / name, load_from_local_minari=True) for name in contenders
        }
    again = {
        name: lambda name=name: loader(name)(dataset_id, BATCH, root=root / name, download=False) for name in contenders
    }
    rows = made[measure.OURS][:]
    storage = interop.LazyMemmapStorage(len(rows), scratch_dir=root / "plain")
    plain = interop.TensorDictReplayBuffer(storage=storage, batch_size=BATCH)
    plain.extend(rows)
    samples = {name: each.sample for name, each in made.items()} | {"plain": plain.sample}
    return [
        measure.compare("construction of what is converted", again, quick=quick),
        measure.compare(f"sample {BATCH}", samples, quick=quick),
    ]


def images(dataset_id: str, root: pathlib.Path, quick: bool) -> list[measure.Timing]:
    """JPEG episodes beside the decoding alone: read as rows, and converted to files that are flushed."""
    path, source = pathlib.Path(os.environ["MINARI_DATASETS_PATH"], dataset_id, "data"), MinariSource(dataset_id)
    with h5py.File(path / "main_data.hdf5") as file:
        encoded = [bytes(each) for episode in file.values() for each in episode["observations"][()]]

    def pillow() -> None:
        for each in encoded:
            np.asarray(Image.open(io.BytesIO(each)))

    def read() -> None:
        for part in source.parts(path):
            for _ in source.read(part):
                pass

    def convert() -> None:
        MinariExperienceReplay(dataset_id, BATCH, root=root, load_from_local_minari=True)

    title = f"{len(encoded)} JPEG images"
    return [
        measure.compare(f"{title}, episodes read as rows", {measure.OURS: read, "Pillow": pillow}, quick=quick),
        measure.compare(f"{title}, whole conversion", {measure.OURS: convert, "Pillow": pillow}, quick=quick),
    ]


def main() -> int:
    parser = measure.arguments("A Minari dataset as a replay buffer")
    parser.add_argument("--inside", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.inside:
        inside(*options.inside)
        return 0
    contenders = [measure.OURS] + ["torchrl"] * (measure.rival("torchrl.data.datasets") is not None)
    episodes, rounds, pictures = (20, 2, 4) if options.quick else (1000, 5, 20)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MINARI_DATASETS_PATH"] = folder
        small, large = made("small", 10, 10), made("large", episodes, STEPS)
        pixels = made("pixels", pictures, 100, image=True)
        written = [name + WRITTEN for name in contenders[1:]]
        timing, values = conversions(contenders + written, small, large, rounds)
        root = pathlib.Path(folder, "converted")
        timings = [timing, *constructed_again(contenders, large, root, options.quick)]
        timings += images(pixels, root / "pixels", options.quick)
    values["ms: construction of what is converted"] = timings[1].us[measure.OURS] / 1000
    measure.report(f"a Minari dataset of {episodes * STEPS} steps", timings, values, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
