"""Files that replace each other: the older one goes, and a link moves, when the younger one is there.

A framework that has called for a save removes older files at once. The younger file is in flight at that moment: a
crash would leave none. A `Succession` takes the wish and fulfils it when it is safe.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future

from datastates.attempt import SaveHandle
from datastates.directories import fsync_directory
from datastates.errors import DataStatesError
from datastates.flusher.work import CommitResult
from datastates.integrations.follow_ups import FollowUps
from datastates.paths import resolved
from datastates.removal import remove_folder
from datastates.storage import temporary_path
from datastates.system_calls import patiently, storage_errors

logger = logging.getLogger(__name__)


class Succession:
    """Removes files and moves links behind the saves of one saver. Thread safe.

    A file that is to go stays while the save that was the youngest when its removal was asked for is in flight; where
    that one is lost, until another is committed. What a link points to stays, too.
    """

    def __init__(self) -> None:
        self._follow_ups = FollowUps("datastates-succession")
        self._lock = threading.Lock()  # protects the fields below
        self._in_order: dict[str, Future[CommitResult]] = {}  # the youngest save of each path, oldest first
        self._doomed: set[str] = set()
        self._held: set[str] = set()  # those of the doomed whose moment has come, but something is in the way
        self._going = ""  # the one that is being removed
        self._links: dict[str, str] = {}  # by link: what it shall point to
        self._lost: dict[str, BaseException] = {}
        self._failures: list[BaseException] = []

    @property
    def failures(self) -> list[BaseException]:
        """Why saves were lost, also where another one has made up for it."""
        with self._lock:
            return list(self._failures)

    @property
    def lost(self) -> dict[str, BaseException]:
        """By path: why a file that was saved, and that nobody has removed or saved again, is not there."""
        with self._lock:
            return dict(self._lost)

    def note(self, handle: SaveHandle) -> None:
        """A save has begun: it is younger than all others."""
        with self._lock:
            self._in_order.pop(handle.path, None)
            self._in_order[handle.path] = handle.committed
            self._doomed.discard(handle.path)
            self._held.discard(handle.path)
        self._follow_ups.after(handle.committed, lambda error: self._settled(handle.path, error))

    def remove(self, path: str) -> None:
        """Remove a file or folder when a younger save is committed; now where none has been made."""
        path = resolved(path)
        with self._lock:
            self._doomed.add(path)
            self._lost.pop(path, None)
            younger = next((future for other, future in reversed(self._in_order.items()) if other != path), None)
            awaited = younger if younger is not None else self._in_order.get(path)
        if awaited is None:
            self._remove(path)
        else:
            is_younger = awaited is younger
            self._follow_ups.after(awaited, lambda error: self._moment_has_come(path, error if is_younger else None))

    def link(self, target: str, link: str) -> None:
        """Let a symbolic link point to a file once it is there, in place of what has the link's name until then.

        A file that is neither there nor in flight may come yet: its save is waited for, too.
        """
        target, link = resolved(target), resolved(link)
        if target == link:
            return
        with self._lock:
            self._links[link] = target
            awaited = self._in_order.get(target)
        if awaited is not None:  # behind the links and removals that were asked for earlier
            self._follow_ups.after(awaited, lambda error: self._link(target, link) if error is None else None)
        elif os.path.lexists(target):
            self._link(target, link)

    def is_doomed(self, path: str) -> bool:
        """Whether a file is still there only because its moment has not come."""
        with self._lock:
            return path in self._doomed or path == self._going

    def awaits_link(self, link: str) -> bool:
        """Whether there will be a link of that name."""
        with self._lock:
            return link in self._links

    def finish(self, timeout: float | None = None) -> None:
        """Block until all saves have settled, and all is done that could be. See `FollowUps.finish`."""
        self._follow_ups.finish(timeout)

    def close(self) -> None:
        """Nothing more is asked for."""
        self._follow_ups.close()

    def _settled(self, path: str, error: BaseException | None) -> None:
        with self._lock:
            links = [link for link, target in self._links.items() if target == path]
            if error is None:
                self._lost.pop(path, None)
            else:
                self._failures.append(error)
                if path not in self._doomed:
                    self._lost[path] = error
                for link in links:
                    del self._links[link]
        if error is None:
            for link in links:
                self._link(path, link)
            self._try_held()

    def _moment_has_come(self, path: str, error: BaseException | None) -> None:
        """The younger save has settled."""
        with self._lock:
            if path not in self._doomed:
                return  # saved again meanwhile
            self._held.add(path)
        if error is None:
            self._try_held()
        else:
            logger.warning("%s stays until a younger one is complete: %s", path, error)

    def _try_held(self) -> None:
        with self._lock:
            held = list(self._held)
        for path in held:
            if not any(os.path.realpath(link) == path for link in _links_in(os.path.dirname(path))):
                self._remove(path)

    def _remove(self, path: str) -> None:
        with self._lock:
            self._doomed.discard(path)
            self._held.discard(path)
            self._in_order.pop(path, None)
            self._going = path
        try:
            with storage_errors("remove", path):
                if os.path.isdir(path) and not os.path.islink(path):
                    remove_folder(path)
                elif os.path.lexists(path):
                    patiently(os.unlink, path)
        except DataStatesError as error:
            logger.warning("%s stays, it cannot be removed: %s", path, error)
        else:
            logger.debug("%s: removed", path)
        finally:
            with self._lock:
                self._going = ""

    def _link(self, target: str, link: str) -> None:
        with self._lock:
            if self._links.get(link) != target:
                return  # it shall point elsewhere by now
        directory = os.path.dirname(link)
        temporary = temporary_path(link)
        with storage_errors("link", link):
            if os.path.isdir(link) and not os.path.islink(link):
                remove_folder(link)
            if os.path.lexists(temporary):
                patiently(os.unlink, temporary)
            patiently(os.symlink, os.path.relpath(target, directory), temporary)
            patiently(os.replace, temporary, link)
            fsync_directory(directory)
        with self._lock:  # not before: whoever asks for the name finds the wish or the link
            if self._links.get(link) == target:
                del self._links[link]
        self._try_held()


def _links_in(directory: str) -> Iterator[str]:
    if os.path.isdir(directory):
        with os.scandir(directory) as entries:
            yield from (entry.path for entry in entries if entry.is_symlink())
