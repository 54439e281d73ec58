"""Files of removed checkpoints, kept for a while so that the next saves may write over their blocks.

Writing over blocks that are there already is faster than having new ones allocated, by a quarter to a half on many
disks. A file gets here only after the checkpoint that it belonged to has vanished durably, which retention allows only
once a younger one is committed (`removal.remove_folder`), and it leaves for the partial name of a new save. Whenever
that is cut, what is left is a spare file or a partial one, and neither is ever read.

Writing over a file changes it for everybody who has it: one that has a second name (a hard link, or what a power loss
has left of a rename) is not kept, and one that somebody has open or mapped, as ``torch.load(mmap=True)`` does, is not
taken. Where the file system cannot tell (it knows no leases: NFS), none is taken; nor is one that others may read than
may read the new file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import stat
import uuid

from datastates.locks import try_lock
from datastates.system_calls import patiently, storage_errors

FOLDER_NAME = ".datastates.spare"
"""In the folder that the checkpoints are in, where no pattern for checkpoints finds it."""

MIN_SPARE_BYTES = 4 << 20
"""Smaller files are not worth it."""


def keep_spares(folder: str, parent: str) -> int:
    """Move the large files of a folder that is about to be removed to the spare ones.

    At most as many bytes are kept as the folder holds, those counted that were kept before: one checkpoint's.

    Args:
        folder: what is left of a removed checkpoint; no reader finds it any more.
        parent: the folder that the checkpoint was in.

    Returns:
        How many bytes were kept.

    Raises:
        OSError: the file system refuses.
    """
    files = _files_in(folder)
    room = sum(nbytes for _, nbytes in files) - sum(nbytes for _, nbytes in _files_in(_pool(parent)))
    kept = 0
    for path, nbytes in sorted(files, key=lambda file: -file[1]):
        if MIN_SPARE_BYTES <= nbytes <= room - kept:
            os.makedirs(_pool(parent), exist_ok=True)
            patiently(os.rename, path, os.path.join(_pool(parent), uuid.uuid4().hex))
            kept += nbytes
    return kept


def take_spare(path: str, partial: str, nbytes: int, mode: int) -> bool:
    """Give a spare file the name under which a new file is made; its old bytes are still in it.

    The spare file nearest in size, among those of the folder that the new file lies in, and of the one above.

    Args:
        path: final path of the new file.
        partial: the name to give; nothing has it.
        nbytes: size of the new file.
        mode: permissions that it is to have; one that has others is left alone.

    Returns:
        Whether there was one that could be taken.
    """
    if nbytes < MIN_SPARE_BYTES:
        return False
    folder = os.path.dirname(path)
    spares = [*_files_in(_pool(folder)), *_files_in(_pool(os.path.dirname(folder)))]
    for spare, _ in sorted(spares, key=lambda file: abs(file[1] - nbytes)):
        with contextlib.suppress(OSError):  # taken by another rank meanwhile, or in use: a new file is made
            if not os.path.lexists(partial) and _rename_unused(spare, partial, mode):
                return True
    return False


def remove_spares(parent: str) -> None:
    """Give the space of all spare files beside the checkpoints of a folder back.

    Raises:
        StorageError: the file system refuses.
    """
    pool = _pool(parent)
    with storage_errors("remove", pool), contextlib.suppress(FileNotFoundError):
        shutil.rmtree(pool)


def _pool(parent: str) -> str:
    return os.path.join(parent, FOLDER_NAME)


def _files_in(folder: str) -> list[tuple[str, int]]:
    """Paths and sizes of the ordinary files of ours in a folder, also further down, that have one name only."""
    found = []
    for directory, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(directory, name)
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(path)
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid == os.geteuid():
                    found.append((path, status.st_size))
    return found


def _rename_unused(spare: str, partial: str, mode: int) -> bool:
    descriptor = patiently(os.open, spare, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) != mode:
            return False
        if try_lock(descriptor) is not True or not _is_unused(descriptor):
            return False
        patiently(os.rename, spare, partial)
        return True
    finally:
        os.close(descriptor)


def _is_unused(descriptor: int) -> bool:
    """Whether the file has one name, and nobody else has it open or mapped.

    The kernel grants a write lease in that case only. Source: fcntl(2), F_SETLEASE.
    """
    if os.fstat(descriptor).st_nlink != 1:
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # whoever opens it now must not end this process
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EINVAL, errno.EACCES, errno.ENOLCK, errno.EOPNOTSUPP):
            return False
        raise
    return True
