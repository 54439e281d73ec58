"""Whether what is read part by part is all of one save: a checkpoint may be saved again under its tag meanwhile."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from types import TracebackType

from datastates.attempt_folder import checkpoint_of
from datastates.errors import StorageError
from datastates.integrity import folder_stamp
from datastates.paths import resolved


class SameSave:
    """Checkpoints as they are now. As a context manager: a failure in the body that comes of a change is said to.

    What is read file by file (a conversion, a comparison) would be half of one save and half of another, each file
    with right checksums. Folders and files that belong to no committed checkpoint are not watched.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        """Args:
        paths: of checkpoints, or of files in them.
        """
        folders = {os.path.realpath(path) if os.path.isdir(path) else checkpoint_of(resolved(path)) for path in paths}
        self._stamps = {folder: folder_stamp(folder) for folder in folders if folder is not None}

    def check(self) -> None:
        """Look whether all are still what they were.

        Raises:
            StorageError: one was saved again or removed; its errno is ``ESTALE``.
        """
        for folder, stamp in self._stamps.items():
            if folder_stamp(folder) != stamp:
                message = f"{folder} was saved again or removed while it was read: run this again"
                raise StorageError(message, errno.ESTALE, folder)

    def __enter__(self) -> SameSave:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and getattr(error, "errno", None) != errno.ESTALE:
            self.check()
