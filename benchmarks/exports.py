"""Datasets of a buffer: what do `to_lerobot` and `to_hub_folder` cost beside the codec alone, and reading the images again?

    python benchmarks/exports.py [--quick] [--json FILE]

Rows of 17 + 6 numbers in episodes of 200 steps: the rival is one Parquet file of the same columns by pyarrow. Rows with an
image of 96 x 96: the rival is Pillow, which encodes the same images as PNG, or decodes them, in one thread. Video: the rival
is PyAV, which encodes the same frames.
"""

import io
import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import measure
import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from pyarrow import parquet
from tensordict import TensorDict

from interop import LazyTensorStorage, TensorDictReplayBuffer
from interop.datasets import HubFolderExperienceReplay, to_hub_folder, to_lerobot

EPISODE, SIDE, FPS = 200, 96, 30
NAMES = {"observation": "observation.state"}
WITH_IMAGES = NAMES | {"pixels": "observation.images.front"}


def buffer_of(count: int, images: bool) -> TensorDictReplayBuffer:
    """Whole episodes; images are smooth and move, as those of a camera."""
    draw = torch.Generator().manual_seed(0)
    rows = TensorDict(
        {
            "observation": torch.randn(count, 17, generator=draw),
            "action": torch.randn(count, 6, generator=draw),
            "next": {
                "reward": torch.randn(count, 1, generator=draw),
                "done": (torch.arange(count) % EPISODE == EPISODE - 1)[:, None],
            },
        },
        [count],
    )
    if images:
        at = torch.arange(count)[:, None, None] + torch.arange(SIDE)[:, None] * 2 + torch.arange(SIDE)
        noise = torch.randint(0, 6, (count, 3, SIDE, SIDE), generator=draw)
        rows["pixels"] = ((at[:, None] % 240) + noise).clamp(max=255).to(torch.uint8)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(count), batch_size=32)
    buffer.extend(rows)
    return buffer


def pictures(buffer: TensorDictReplayBuffer) -> list[np.ndarray]:
    """The images, [H, W, C]."""
    return list(buffer[:]["pixels"].permute(0, 2, 3, 1).contiguous().numpy())


def as_png(images: list[np.ndarray]) -> list[bytes]:
    found = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        found.append(file.getvalue())
    return found


def as_video(images: list[np.ndarray], path: Path) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libsvtav1", rate=FPS, options={"crf": "30", "g": "2", "preset": "12"})
        stream.width = stream.height = SIDE
        stream.pix_fmt = "yuv420p"
        for image in images:
            for packet in stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def one_table(buffer: TensorDictReplayBuffer, path: Path) -> None:
    """All columns of the buffer, in one file."""
    rows = buffer[:]
    columns: dict[str, Any] = {}
    for name in ("observation", "action"):
        flat = rows[name].numpy()
        columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), flat.shape[1])
    for name in ("reward", "done"):
        columns[name] = pa.array(rows["next", name].flatten().numpy())
    parquet.write_table(pa.table(columns), path)


def timings(folder: Path, quick: bool) -> list[measure.Timing]:
    """Each call writes to a path of its own."""
    count, seen = (2_000, 200) if quick else (100_000, 1_000)
    numbers, images = buffer_of(count, images=False), buffer_of(seen, images=True)
    frames = pictures(images)
    paths = (folder / str(number) for number in itertools.count())

    def writing(write: Callable[[Path], Any]) -> Callable[[], Any]:
        return lambda: write(next(paths))

    plain = writing(lambda path: one_table(numbers, path))
    lines: dict[str, dict[str, Callable[[], Any]]] = {
        f"to_lerobot, {count:,} rows of numbers": {
            measure.OURS: writing(lambda path: to_lerobot(numbers, path, fps=FPS, names=NAMES, task="t")),
            "pyarrow": plain,
        },
        f"to_hub_folder, {count:,} rows of numbers": {
            measure.OURS: writing(lambda path: to_hub_folder(numbers, path)),
            "pyarrow": plain,
        },
        f"to_lerobot, {seen:,} PNG images": {
            measure.OURS: writing(
                lambda path: to_lerobot(
                    images, path, fps=FPS, image_keys=["pixels"], names=WITH_IMAGES, task="t", use_videos=False
                )
            ),
            "Pillow": lambda: as_png(frames),
        },
        f"to_lerobot, {seen:,} frames of video": {
            measure.OURS: writing(
                lambda path: to_lerobot(images, path, fps=FPS, image_keys=["pixels"], names=WITH_IMAGES, task="t")
            ),
            "PyAV": writing(lambda path: as_video(frames, path.with_suffix(".mp4"))),
        },
        f"to_hub_folder, {seen:,} PNG images": {
            measure.OURS: writing(lambda path: to_hub_folder(images, path, image_keys=["pixels"])),
            "Pillow": lambda: as_png(frames),
        },
    }
    made = to_hub_folder(images, folder / "hub", image_keys=["pixels"])
    encoded = as_png(frames)
    lines[f"HubFolderExperienceReplay, {seen:,} images converted"] = {
        measure.OURS: writing(lambda path: HubFolderExperienceReplay("hub", from_local=made, root=path)),
        "Pillow": lambda: [np.asarray(Image.open(io.BytesIO(each))) for each in encoded],
    }
    return [measure.compare(name, calls, quick=quick) for name, calls in lines.items()]


def main() -> int:
    options = measure.arguments("Datasets of a buffer, beside the codecs alone").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = timings(Path(folder), options.quick)
    measure.report("exports", found, {}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
