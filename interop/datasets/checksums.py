"""SHA-256 of the downloaded files of a folder, kept beside them, so that a restart reads no file again."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from interop.datasets.errors import DownloadError


class Checksums:
    """What is known of the files in a folder, kept in `.checksums.json` there. A damaged record counts as none."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._record = folder, folder / ".checksums.json"
        try:
            entries = json.loads(self._record.read_bytes())
        except (OSError, ValueError):
            entries = None
        self._entries: dict[str, Any] = entries if isinstance(entries, dict) else {}

    def path(self, name: str) -> Path:
        """The path of a file. DownloadError where its name leads out of the folder."""
        path, folder = (self._folder / name).resolve(), self._folder.resolve()
        if path == folder or not path.is_relative_to(folder):
            raise DownloadError(f"{name!r} is not the name of a file below {folder}")
        return self._folder / name

    def of(self, name: str, size: int | None, sha256: str | None) -> str | None:
        """The checksum of a file that is there. None where it is missing, of another size, or changed."""
        path, known = self.path(name), self._known(name)
        if not path.is_file() or size not in (None, path.stat().st_size):
            return None
        checksum = known.get("sha256") if known.get("state") == _state(path) else None
        checksum = checksum or sha256_of(path)
        if checksum != (sha256 or known.get("sha256") or checksum):
            return None
        self.keep(name, checksum)
        return checksum

    def keep(self, name: str, checksum: str) -> None:
        """Record the checksum of a file that is complete."""
        self._write(name, {"sha256": checksum, "state": _state(self.path(name))})

    def version(self, name: str) -> str | None:
        """The version, in the server's words, of which there is a part."""
        return self._known(name).get("version")

    def begin(self, name: str, version: str | None) -> None:
        """Record the version of a file that is being downloaded."""
        self._write(name, {"version": version})

    def _known(self, name: str) -> dict[str, Any]:
        entry = self._entries.get(name)
        return entry if isinstance(entry, dict) else {}

    def _write(self, name: str, entry: dict[str, Any]) -> None:
        if entry != self._known(name):
            self._entries[name] = entry
            scratch = self._record.with_suffix(".tmp")
            scratch.write_text(json.dumps(self._entries))
            os.replace(scratch, self._record)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _state(path: Path) -> list[int]:
    return [path.stat().st_size, path.stat().st_mtime_ns]
