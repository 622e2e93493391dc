"""What a bug report needs: versions, devices, file systems, caches and environment variables, and what is wrong with them.

It has the versions and devices of `jax.print_environment_info` and `torch.utils.collect_env`, and, for the packages that
matter here, the conflicts of `pip check`; and it tries what this library relies on.
"""

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from fbuf._version import __version__
from fbuf.checkpoint.files import remove_folder
from interop.looking.tables import size

PACKAGES = (
    *(
        "jax",
        "jaxlib",
        "jax-cuda12-plugin",
        "jax-cuda13-plugin",
        "torch",
        "tensordict",
        "torchrl",
        "numpy",
        "ml_dtypes",
    ),
    *(
        "jaxtyping",
        "h5py",
        "pyarrow",
        "gymnasium",
        "minari",
        "huggingface_hub",
        "transformers",
        "datasets",
        "tokenizers",
    ),
    *("ray", "av", "pillow", "zstandard", "rich", "plotly", "matplotlib"),
)
# Variables that change what this library, JAX, torch or the allocator do. Others are not shown: they may be secrets.
_VARIABLES = re.compile(
    r"(JAX|XLA|TF_CPP|NCCL|CUDA|CUBLAS|TORCH|PYTORCH|MKL|OMP|KMP|MINARI|MALLOC)_\w+|NPROC|HF_HOME|HF_HUB_CACHE|XDG_CACHE_HOME"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|RL_WARNINGS|LAZY_LEGACY_OP|TMPDIR|PYTHONHASHSEED|OPENBLAS_NUM_THREADS"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|KEY", re.IGNORECASE)
_PINNED = re.compile(r"([A-Za-z0-9._-]+)\s*==\s*([0-9][^\s;,*]*)\s*(?:;(.*))?$")
_LITTLE = 1 << 30  # bytes of free space below which there is a warning


@dataclass
class Diagnosis:
    """What `doctor` has found. `print` gives text for a bug report, `to_dict()` plain values.

    Attributes:
        sections: facts by name, in sections.
        problems: what does not work, or will not, with what to do.
    """

    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as plain values, for JSON."""
        return {**self.sections, "problems": self.problems, "ok": self.ok}

    def __str__(self) -> str:
        lines = []
        for title, facts in self.sections.items():
            lines += [f"{title}:", *(f"  {name}: {value}" for name, value in facts.items())]
        lines += ["problems: none"] if self.ok else ["problems:", *(f"  {each}" for each in self.problems)]
        return "\n".join(lines)


def show_versions(file: TextIO | None = None) -> None:
    """Print the versions of this library and of what it uses, without importing them. For a bug report use `doctor`."""
    for name, value in versions().items():
        print(f"{name}: {value}", file=file)


def versions() -> dict[str, str]:
    """The versions of this library, of Python, of the system and of the installed packages that matter."""
    found = {"fbuf and interop": __version__, "python": sys.version.split()[0], "system": platform.platform()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def doctor(path: str | os.PathLike[str] | None = None) -> Diagnosis:
    """Look at versions, devices, caches, environment variables, and at the file system of a folder, by trying them.

    It starts JAX and torch, passes an array between them on each device, and makes and removes a few small files.

    Args:
        path: a folder; by default the current one. FileNotFoundError where there is none.
    """
    folder = Path(path or ".").absolute()
    folder = folder if folder.is_dir() or not folder.exists() else folder.parent
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    found = Diagnosis({"versions": dict(versions())})
    found.problems += wheels_that_do_not_fit()
    _devices(found)
    _file_system(found, folder)
    found.sections["environment"] = environment()
    _caches(found)
    return found


# ------------------------------------------------------------------ packages and devices


def wheels_that_do_not_fit() -> list[str]:
    """Exact requirements of JAX, torch and their CUDA wheels that another version is installed of. As `pip check`."""
    problems = []
    installed: dict[str, importlib.metadata.Distribution] = {}
    for each in importlib.metadata.distributions():
        name = each.metadata["Name"]
        if name:
            installed.setdefault(_normal(name), each)
    of_cuda = [name for name in installed if re.match(r"jax(lib|-cuda\d+-p)?|torch$|tensordict$|triton$|nvidia-", name)]
    for name in sorted(of_cuda):
        for line in installed[name].requires or []:
            match = _PINNED.match(line.replace("(", "").replace(")", ""))
            if match is None or "extra" in (match[3] or ""):
                continue
            needed = installed.get(_normal(match[1]))
            if needed is not None and needed.version != match[2] and not needed.version.startswith(f"{match[2]}+"):
                problems.append(
                    f"{name} {installed[name].version} needs {match[1]}=={match[2]}, {needed.version} is installed: "
                    f"pip install '{match[1]}=={match[2]}', or other versions of both"
                )
    jaxlib = installed.get("jaxlib")
    for name in installed:
        if jaxlib is not None and re.fullmatch(r"jax-cuda\d+-plugin", name):
            if installed[name].version != jaxlib.version:
                problems.append(
                    f"{name} {installed[name].version} is for another jaxlib than {jaxlib.version}: JAX will not use the "
                    f"GPU. pip install '{name}=={jaxlib.version}'"
                )
            cuda = re.findall(r"\d+", name)[0]
            torch = installed.get("torch")
            of_torch = [line for line in (torch.requires or [] if torch else []) if "cudnn-cu" in line]
            if of_torch and f"cudnn-cu{cuda}" not in of_torch[0]:
                other = re.findall(r"cudnn-cu([0-9]+)", of_torch[0])[0]
                problems.append(
                    f"torch is built for CUDA {other}, JAX for CUDA {cuda}: two runtimes in one process. Install "
                    f"jax[cuda{other}]"
                )
    return problems


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _devices(found: Diagnosis) -> None:
    """The devices of torch and of JAX, and an array that goes from one to the other and back on each."""
    section: dict[str, Any] = {}
    found.sections["devices"] = section
    try:
        import jax
        import torch

        from interop.data import bridge
    except ImportError as error:
        section["torch and jax"] = f"cannot be imported: {error}"
        found.problems.append(f"{error}: pip install 'fbuf[interop]'")
        return
    places = [torch.device("cpu"), *(torch.device("cuda", place) for place in range(torch.cuda.device_count()))]
    try:
        ours = jax.devices()
    except RuntimeError as error:
        ours = []
        found.problems.append(f"JAX finds no device: {error}")
    section["jax"] = ", ".join(f"{each} ({each.device_kind})" for each in ours)
    section["torch"] = ", ".join(
        [str(places[0]), *(f"{each} ({torch.cuda.get_device_name(each)})" for each in places[1:])]
    )
    section["CUDA of torch"] = torch.version.cuda or "none"
    for place in places:
        name = f"DLPack on {place}"
        try:
            if bridge.jax_device(place) is None:
                section[name] = "JAX does not see it"
                found.problems.append(
                    f"torch sees {place}, JAX does not: buffers on it draw by torch. Install jax[cuda13]"
                )
                continue
            given = torch.arange(8, dtype=torch.float32, device=place)
            back = torch.from_dlpack(jax.dlpack.from_dlpack(given) + 1)
            right = bool((back.to(place) == given + 1).all())
            section[name] = "works" if right else "gives other values"
            if not right:
                found.problems.append(f"an array that goes from torch to JAX and back on {place} has other values")
        except Exception as error:
            section[name] = f"fails: {type(error).__name__}: {str(error)[:200]}"
            found.problems.append(f"DLPack fails on {place}: {str(error)[:200]}")


# ------------------------------------------------------------------ files


def _file_system(found: Diagnosis, folder: Path) -> None:
    """Try what checkpoints and folders of rows rely on, in a folder that is removed."""
    section: dict[str, Any] = {"folder": str(folder)}
    found.sections["file system"] = section
    free = shutil.disk_usage(folder).free
    section |= {"type": _type_of(folder), "free": size(free)}
    if free < _LITTLE:
        found.problems.append(f"{folder} has {size(free)} left")
    with contextlib.suppress(OSError):
        section["free in /dev/shm"] = size(shutil.disk_usage("/dev/shm").free)
    try:
        place = Path(tempfile.mkdtemp(prefix=".fbuf-doctor-", dir=folder))
    except OSError as error:
        section["writable"] = f"no: {error.strerror}"
        found.problems.append(f"{folder} cannot be written to ({error.strerror}): checkpoints and rows need that")
        return
    try:
        for name, (attempt, needed) in _ATTEMPTS.items():
            try:
                attempt(place)
                section[name] = "works"
            except (OSError, ValueError) as error:
                section[name] = f"fails: {error}"
                if needed:
                    found.problems.append(f"{name} fails in {folder} ({error}): {needed}")
    finally:
        remove_folder(place)


def _flock(place: Path) -> None:
    import fcntl

    (place / "lock").touch()
    with open(place / "lock") as first, open(place / "lock") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            raise ValueError("two owners hold one lock")


def _fsync(place: Path) -> None:
    with open(place / "flushed", "wb") as file:
        file.write(b"x")
        os.fsync(file.fileno())
    handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _link(place: Path) -> None:
    (place / "one").write_bytes(b"x")
    os.link(place / "one", place / "two")


def _rename(place: Path) -> None:
    (place / "new").write_bytes(b"new")
    (place / "old").write_bytes(b"old")
    os.replace(place / "new", place / "old")
    if (place / "old").read_bytes() != b"new":
        raise ValueError("a rename did not replace the file")


def _map(place: Path) -> None:
    import mmap

    (place / "mapped").write_bytes(bytes(4096))
    with (
        open(place / "mapped", "r+b") as file,
        mmap.mmap(file.fileno(), 4096) as one,
        mmap.mmap(file.fileno(), 4096) as two,
    ):
        one[0] = 7
        if two[0] != 7:
            raise ValueError("two maps of a file have other bytes")


def _reserve(place: Path) -> None:
    with open(place / "reserved", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 16)


def _direct(place: Path) -> None:
    os.close(os.open(place / "direct", os.O_WRONLY | os.O_CREAT | getattr(os, "O_DIRECT", 0)))


# By name: what is tried, and what fails without it; "" where only speed is lost.
_ATTEMPTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "flock": (_flock, "two writers of one folder would not see each other. Use a local disk"),
    "fsync": (_fsync, "a power failure may lose what was saved"),
    "rename": (_rename, "checkpoints cannot be committed"),
    "shared maps": (_map, "processes cannot share rows. Use a local disk"),
    "hard links": (_link, ""),
    "reserved space": (_reserve, ""),
    "direct writes": (_direct, ""),
}


def _type_of(folder: Path) -> str:
    """The type of a file system; "unknown" where the system does not tell."""
    best = ("", "unknown")
    with contextlib.suppress(OSError), open("/proc/mounts") as file:
        for line in file:
            _, point, kind, *_ = line.split()
            point = point.replace("\\040", " ")
            if folder == Path(point) or Path(point) in folder.parents:
                best = max(best, (point, kind), key=lambda each: len(each[0]))
    return best[1]


# ------------------------------------------------------------------ environment and caches


def environment() -> dict[str, str]:
    """The environment variables that change behaviour. What may be a secret is hidden."""
    return {
        name: "(hidden)" if _SECRET.search(name) else value
        for name, value in sorted(os.environ.items())
        if _VARIABLES.fullmatch(name)
    }


def _caches(found: Diagnosis) -> None:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    places = {"compiled programs": os.environ.get("JAX_COMPILATION_CACHE_DIR") or os.path.join(home, "fbuf")}
    places["Hugging Face"] = os.environ.get("HF_HOME") or os.path.join(home, "huggingface")
    section = {}
    for name, place in places.items():
        there = os.path.isdir(place)
        section[name] = f"{place} ({size(sum(_sizes(Path(place))))})" if there else f"{place} (not there)"
        if there and not os.access(place, os.W_OK):
            found.problems.append(f"the cache {place} cannot be written to: programs are compiled in each process")
    found.sections["caches"] = section


def _sizes(place: Path) -> Iterator[int]:
    for each in place.rglob("*"):
        with contextlib.suppress(OSError):
            if each.is_file() and not each.is_symlink():
                yield each.stat().st_size
