"""Errors of a disk or network file system, distinguished from errors of code by their number.

Tests: tests/checkpointing/test_async_writer.py, tests/storage/test_shared_work.py.
"""

import errno
import re
from pathlib import Path

NUMBERS = {  # the first line: a full or failing disk; the second: permissions; the rest: network file systems
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.EBUSY),
    *(errno.EACCES, errno.EPERM),
    *(errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOLINK, errno.ECOMM, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.ENOTCONN, errno.ESHUTDOWN, errno.ECONNREFUSED),
    *(errno.ECONNRESET, errno.ECONNABORTED, errno.EPROTO, errno.EAGAIN, errno.EINTR),
}


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def is_unwritable(error: BaseException, root: Path) -> bool:
    """Return True if the disk is full or read-only, or if `root` does not permit to write."""
    denied = isinstance(error, PermissionError) and str(error.filename).startswith(str(root))
    return isinstance(error, OSError) and (error.errno in FULL or denied)


class DiskError(OSError):
    """A failure of a disk that this project finds itself, such as a shard that never arrives: DiskError(None, text)."""


def is_disk_error(error: BaseException) -> bool:
    """Return True if a disk failed; False for a bug, such as a path that nothing has created (ENOENT)."""
    if isinstance(error, DiskError):
        return True
    number = error.errno if isinstance(error, OSError) else None
    if wrapped := re.search(r"os error (\d+)", str(error)):  # safetensors wraps an OSError in a SafetensorError
        number = int(wrapped[1])
    return number in NUMBERS
