"""Streaming reader of tar archives."""

import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Self

from interop.datasets.compressed import Stream, decompressed
from interop.datasets.errors import CorruptDatasetError


def tar_members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the name and content of each file of an archive (tar, tar.gz, tar.xz), in order. Writes nothing to disk.

    Read each content before requesting the next; the rest of the archive is not in memory. `CorruptDatasetError`, also
    while a content is read, for a damaged or truncated archive, a member that is no plain file or directory, and a path
    that is absolute or contains "..".
    """
    with decompressed(path) as stream:
        yield from members_of(stream, path)


def members_of(stream: Stream, path: object) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the members of an archive from a stream. `path` names the archive in errors."""
    try:
        archive = tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header)  # type: ignore[call-overload]  # noqa: SIM115
        while (member := archive.next()) is not None:
            archive.members.clear()  # tarfile would keep all headers
            name = _checked(member, path)
            if content := archive.extractfile(member):  # None for directories
                yield name, content
    except (tarfile.TarError, ValueError) as error:
        raise CorruptDatasetError(f"{path} is no tar archive, or a damaged one: {error}") from error
    stream.finish()


def _checked(member: tarfile.TarInfo, path: object) -> str:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or "\\" in member.name or ":" in member.name or "\0" in member.name:
        raise CorruptDatasetError(f"{path}: member {member.name!r} leads out of the folder of the archive")
    if not (member.isfile() or member.isdir()) or member.issparse():
        raise CorruptDatasetError(f"{path}: member {member.name!r} is a link, device or sparse file, not a plain file")
    return str(name)


class _Header(tarfile.TarInfo):
    """A header that rejects damage, which tarfile mistakes for the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # an end-of-archive block
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from error
