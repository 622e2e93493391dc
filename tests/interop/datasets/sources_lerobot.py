"""LeRobot datasets of the versions v2.0, v2.1 and v3.0, as files of pyarrow and PyAV."""

import io
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

DATASET = "lerobot/tiny"
LENGTHS = (5, 40, 3)
FPS = 10
TASKS = ("push the block", "lift the block")
VIDEO, IMAGE = "observation.images.top", "observation.images.wrist"
_PATHS = {
    "v2": {
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    },
    "v3": {
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    },
}
FEATURES: dict[str, dict[str, Any]] = {
    VIDEO: {"dtype": "video", "shape": [16, 32, 3], "names": ["height", "width", "channel"]},
    IMAGE: {"dtype": "image", "shape": [4, 6, 3], "names": ["height", "width", "channel"]},
    "observation.state": {"dtype": "float32", "shape": [2], "names": None},
    "action": {"dtype": "float32", "shape": [2, 3], "names": None},
    "next.reward": {"dtype": "float32", "shape": [1], "names": None},
    "next.done": {"dtype": "bool", "shape": [1], "names": None},
    "next.success": {"dtype": "bool", "shape": [1], "names": None},
    "timestamp": {"dtype": "float32", "shape": [1], "names": None},
    "frame_index": {"dtype": "int64", "shape": [1], "names": None},
    "episode_index": {"dtype": "int64", "shape": [1], "names": None},
    "index": {"dtype": "int64", "shape": [1], "names": None},
    "task_index": {"dtype": "int64", "shape": [1], "names": None},
}


def make(folder: Path, rng: np.random.Generator, version: str = "v3.0") -> list[dict[str, Any]]:
    """A dataset below `folder`. Returns the columns of each episode as arrays [T, ...]; frames of videos have one color."""
    episodes = [_episode(number, length, rng) for number, length in enumerate(LENGTHS)]
    kind = version[:2]
    info = {"codebase_version": version, "fps": FPS, "chunks_size": 2, "features": FEATURES, **_PATHS[kind]}
    info |= {"total_episodes": len(LENGTHS), "total_frames": sum(LENGTHS), "total_tasks": len(TASKS)}
    text(folder / "meta/info.json", json.dumps(info))
    (_v2 if kind == "v2" else _v3)(folder, episodes, info)
    if version != "v2.1":
        text(folder / "meta/stats.json", json.dumps({"action": {"mean": [0.0, 1.0, 2.0]}}))
    return episodes


def _v2(folder: Path, episodes: list[dict[str, Any]], info: dict[str, Any]) -> None:
    for number, episode in enumerate(episodes):
        names = {"episode_chunk": number // info["chunks_size"], "episode_index": number}
        table(folder / info["data_path"].format(**names), _columns([episode]))
        video(folder / info["video_path"].format(**names, video_key=VIDEO), episode[VIDEO][:, 0, 0, 0])
    lines = [{"episode_index": number, "tasks": [TASKS[0]], "length": length} for number, length in enumerate(LENGTHS)]
    text(folder / "meta/episodes.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    tasks = [{"task_index": number, "task": task} for number, task in enumerate(TASKS)]
    text(folder / "meta/tasks.jsonl", "".join(json.dumps(line) + "\n" for line in tasks))
    if info["codebase_version"] == "v2.1":
        text(folder / "meta/episodes_stats.jsonl", json.dumps({"episode_index": 0, "stats": {}}) + "\n")


def _v3(folder: Path, episodes: list[dict[str, Any]], info: dict[str, Any]) -> None:
    """Two episodes in the first file of data, all in one video, and the second episode in both."""
    for number, group in enumerate((episodes[:2], episodes[2:])):
        table(folder / info["data_path"].format(chunk_index=0, file_index=number), _columns(group))
    colors = np.concatenate([episode[VIDEO][:, 0, 0, 0] for episode in episodes])
    video(folder / info["video_path"].format(chunk_index=0, file_index=0, video_key=VIDEO), colors)
    stops = np.cumsum(LENGTHS)
    rows = {
        "episode_index": [*range(len(LENGTHS))],
        "tasks": [[TASKS[0]]] * len(LENGTHS),
        "length": [*LENGTHS],
        "data/chunk_index": [0, 0, 0],
        "data/file_index": [0, 0, 1],
        "dataset_from_index": stops - LENGTHS,
        "dataset_to_index": stops,
        f"videos/{VIDEO}/chunk_index": [0, 0, 0],
        f"videos/{VIDEO}/file_index": [0, 0, 0],
        f"videos/{VIDEO}/from_timestamp": (stops - LENGTHS) / FPS,
        f"videos/{VIDEO}/to_timestamp": stops / FPS,
        "stats/action/mean": [[0.0, 1.0, 2.0]] * len(LENGTHS),
    }
    table(folder / "meta/episodes/chunk-000/file-000.parquet", rows)
    table(folder / "meta/tasks.parquet", {"task_index": [0, 1], "__index_level_0__": [*TASKS]})


def _episode(number: int, length: int, rng: np.random.Generator) -> dict[str, Any]:
    steps = np.arange(length)
    first = sum(LENGTHS[:number])
    colors = ((first + steps) * 5 % 256).astype(np.uint8)
    return {
        VIDEO: np.broadcast_to(colors[:, None, None, None], (length, 16, 32, 3)),
        IMAGE: rng.integers(0, 256, (length, 4, 6, 3), np.uint8),
        "observation.state": rng.normal(size=(length, 2)).astype(np.float32),
        "action": rng.normal(size=(length, 2, 3)).astype(np.float32),
        "next.reward": rng.normal(size=length).astype(np.float32),
        "next.done": (steps == length - 1) & (number != 1),
        "next.success": steps == length - 1,
        "timestamp": (steps / FPS).astype(np.float32),
        "frame_index": steps,
        "episode_index": np.full(length, number),
        "index": first + steps,
        "task_index": np.full(length, number % 2),
    }


def _columns(episodes: list[dict[str, Any]]) -> dict[str, Any]:
    """The columns of a data file: pictures as PNG, the rest as lists."""
    out: dict[str, Any] = {}
    for name in episodes[0].keys() - {VIDEO}:
        values = np.concatenate([episode[name] for episode in episodes])
        out[name] = [{"bytes": png(each), "path": None} for each in values] if name == IMAGE else values.tolist()
        if values.dtype == np.float32:
            kind: Any = pa.float32()
            for _ in range(values.ndim - 1):
                kind = pa.list_(kind)
            out[name] = pa.array(out[name], kind)
    return out


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def table(path: Path, columns: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=16)


def text(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def video(path: Path, colors: np.ndarray) -> None:
    """An MP4 file of gray frames 16 x 32."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=FPS, options={"crf": "0", "g": "8", "preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv444p"
        stream.time_base = Fraction(1, FPS)
        for color in colors:
            frame = av.VideoFrame.from_ndarray(np.full((16, 32, 3), color, np.uint8), format="rgb24")
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
