"""Reading a file that somebody else may have made: a folder, a pipe, a device or an endless file is refused, never waited for."""

from __future__ import annotations

import errno
import io
import os
import stat
import zlib
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 2**28
"""Of a document that is read whole, unpacked: a capture of 100,000 ops has a quarter of this."""
_SPECIAL = {stat.S_IFDIR: errno.EISDIR, stat.S_IFIFO: errno.ESPIPE}


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; a link to one will do.

    Raises:
        OSError: it cannot be opened, or is a folder, a pipe, a socket or a device. A pipe that nobody writes to does not make
            this wait.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        code = _SPECIAL.get(kind, errno.ENODEV)
        raise OSError(code, "it is a folder" if code == errno.EISDIR else "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file of at most ``most_bytes`` bytes.

    Raises:
        OSError: as :func:`open_regular`, or the file is larger.
    """
    with open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
    return content


def unpack(packed: bytes, most_bytes: int = MOST_BYTES) -> bytes:
    """Return what gzip packed, if it is no more than ``most_bytes`` bytes: a thousand zeros pack into one byte.

    Raises:
        EOFError: it ends early.
        OSError: it is no gzip, is damaged, or holds more.
    """
    import gzip

    try:
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
            content = file.read(most_bytes + 1)
    except zlib.error as error:
        raise OSError(str(error)) from error
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"unpacked it has more than {most_bytes:,} bytes")
    return content
