"""Which bytes of a Parquet file have checksums: the file does not say, the header of each page does.

A header is a struct in Thrift's compact protocol (github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md,
and `PageHeader` in github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift): its fields 1 to 4 are the
kind, the size before and after compression, and the CRC-32, which is left out where the writer made none.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyarrow import parquet

_MOST = 64  # bytes with the first four fields
_I32 = 5  # a type of the protocol
_CRC = 4  # the number of the field


def bytes_of(path: Path, metadata: "parquet.FileMetaData") -> tuple[int, int]:
    """How many bytes of columns have checksums, and how many have none, by the first page of each column.

    Writers make them for all pages of a file or for none. O(columns).
    """
    compared = rest = 0
    with open(path, "rb") as file:
        for group in range(metadata.num_row_groups):
            for number in range(metadata.num_columns):
                column = metadata.row_group(group).column(number)
                starts = (column.dictionary_page_offset, column.data_page_offset)
                file.seek(min(start for start in starts if start is not None))
                if _has_checksum(file.read(_MOST)):
                    compared += column.total_compressed_size
                else:
                    rest += column.total_compressed_size
    return compared, rest


def _has_checksum(header: bytes) -> bool:
    """Whether a page has a checksum, by the first bytes of its header."""
    at = field = 0
    while at < len(header):
        step, kind = header[at] >> 4, header[at] & 15
        field += step
        if not step or field > _CRC or kind != _I32:
            return False
        if field == _CRC:
            return True
        at += 1
        while at < len(header) and header[at] & 0x80:  # a number, 7 bits a byte
            at += 1
        at += 1
    return False
