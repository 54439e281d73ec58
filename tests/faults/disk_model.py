"""What a disk may hold after the power went: a model that is told of calls and gives back directory trees.

It keeps what POSIX and ``fsync`` promise, and nothing else:

- The bytes of a file, block by block, and its size are the old ones or newer ones until the file is synced.
- A name (made, replaced, removed) is durable when its *folder* is synced after that. Until then the change is there
  or not, whatever became of changes of other names. Of one name the changes come in their order.
- Syncing a file says nothing of its name, syncing a folder nothing of the folder's own name.
- A rename inside one folder happens or does not. One from folder to folder never loses the file, but the old name
  may survive until its folder is synced, too.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from faults.storage_recorder import Call

BLOCK_BYTES = 4096

Name: TypeAlias = tuple[int, str]
Tree: TypeAlias = dict[str, "bytes | str | None"]
"""Relative paths, folders before what is in them; the bytes of a file, None for a folder; the path of a file that has
another name already, at its further ones."""


@dataclass
class File:
    """``durable`` bytes, and what was done since to them."""

    durable: bytes = b""
    pending: list[Call] = field(default_factory=list)

    def sync(self) -> None:
        self.durable = self.content(None)
        self.pending = []

    def content(self, chance: random.Random | None) -> bytes:
        """All pending writes done, or a part that chance chooses: any blocks, any of the sizes that it had."""
        data, sizes = bytearray(self.durable), [len(self.durable)]
        for kind, *arguments in self.pending:
            if kind == "write":
                offset, written = arguments
                _write(data, offset, written, chance)
                sizes.append(max(sizes[-1], offset + len(written)))
            elif kind == "allocate":
                sizes.append(max(sizes[-1], arguments[0]))
            else:
                sizes.append(arguments[0])
                if chance is None or chance.random() < 0.5:
                    del data[arguments[0] :]
        nbytes = sizes[-1] if chance is None else chance.choice(sizes)
        return bytes(data[:nbytes]).ljust(nbytes, b"\0")


def _write(data: bytearray, offset: int, written: bytes, chance: random.Random | None) -> None:
    begin, end = offset, offset + len(written)
    data.extend(bytes(max(end - len(data), 0)))
    while begin < end:
        stop = min((begin // BLOCK_BYTES + 1) * BLOCK_BYTES, end)
        if chance is None or chance.random() < 0.5:
            data[begin:stop] = written[begin - offset : stop - offset]
        begin = stop


@dataclass(eq=False)
class Change:
    """Of names, not durable yet: name -> node, None where it goes. Happens as a whole, never before ``after``."""

    names: dict[Name, int | None]
    after: Change | None = None


class Disk:
    """Told of calls in their order by `apply`; `tree` is what a power loss at this moment may leave."""

    def __init__(self, root_inode: int) -> None:
        self._files: dict[int, File] = {}
        self._durable: dict[Name, int] = {}
        self._visible: dict[Name, int] = {}
        self._nodes = {root_inode: 0}  # inode -> node: a file system gives the number of a removed file to a new one
        self._num_nodes = 1
        self._pending: list[Change] = []

    @classmethod
    def of(cls, root: str) -> Disk:
        """A disk on which everything that is in the folder now is durable."""
        disk = cls(os.stat(root).st_ino)
        for folder, folders, names in os.walk(root):
            inode = os.stat(folder).st_ino
            for name in [*folders, *names]:
                path = os.path.join(folder, name)
                kind = "mkdir" if name in folders else "create"
                disk.apply((kind, inode, name, os.stat(path).st_ino))
                if kind == "create":
                    with open(path, "rb") as file:
                        disk._files[disk._nodes[os.stat(path).st_ino]].durable = file.read()
        disk._keep(disk._pending)
        return disk

    def apply(self, call: Call) -> None:
        kind, *arguments = call
        if kind in ("create", "mkdir"):
            folder, name, inode = arguments
            self._nodes[inode] = node = self._num_nodes
            self._num_nodes += 1
            if kind == "create":
                self._files[node] = File()
            self._change({(self._nodes[folder], name): node})
        elif kind == "remove":
            self._change({(self._nodes[arguments[0]], arguments[1]): None})
        elif kind == "rename":
            self._rename((self._nodes[arguments[0]], arguments[1]), (self._nodes[arguments[2]], arguments[3]))
        elif kind == "sync":
            self._sync(self._nodes[arguments[0]])
        elif kind not in ("mark", "retire"):
            self._files[self._nodes[arguments[0]]].pending.append((kind, *arguments[1:]))

    def tree(self, choice: int, seed: str) -> Tree:
        """What is left; ``choice`` is how it is chosen: 0 all that may be lost is, 1 the names are there but not the
        bytes, then by chance: a prefix of the changes of names (as a journal does), or any of them."""
        chance = random.Random(f"{seed}/{choice}")
        if choice == 0:
            kept: Iterable[Change] = ()
        elif choice == 1:
            kept = self._pending
        elif choice % 2:
            share = chance.choice((0.1, 0.5, 0.9))
            kept = [change for change in self._pending if chance.random() < share]
        else:
            kept = self._pending[: chance.randint(0, len(self._pending))]
        names = self._names_with(kept)
        contents = {}
        for node in sorted(names.values()):  # in a fixed order: chance goes from one to the next
            if node in self._files:
                contents[node] = self._content(self._files[node], choice, chance)
        return _tree(names, contents)

    def whole(self) -> Tree:
        """What the running system sees."""
        return _tree(self._visible, {node: file.content(None) for node, file in self._files.items()})

    def _content(self, file: File, choice: int, chance: random.Random) -> bytes:
        how = chance.choice(("none", "all", "some", "some")) if choice > 1 else "none"
        return file.durable if how == "none" else file.content(None if how == "all" else chance)

    def _rename(self, source: Name, target: Name) -> None:
        node = self._visible[source]
        if source[0] == target[0]:
            self._change({target: node, source: None})
        else:
            self._change({source: None}, after=self._change({target: node}))

    def _change(self, names: dict[Name, int | None], after: Change | None = None) -> Change:
        change = Change(names, after)
        self._pending.append(change)
        _update(self._visible, change)
        return change

    def _sync(self, node: int) -> None:
        if node in self._files:
            self._files[node].sync()
        else:
            self._keep([change for change in self._pending if any(folder == node for folder, _ in change.names)])

    def _keep(self, changes: Sequence[Change]) -> None:
        kept = self._with_needed(changes)
        for change in kept:
            _update(self._durable, change)
        self._pending = [change for change in self._pending if change not in kept]

    def _names_with(self, changes: Iterable[Change]) -> dict[Name, int]:
        names = dict(self._durable)
        for change in self._with_needed(changes):
            _update(names, change)
        return names

    def _with_needed(self, changes: Iterable[Change]) -> list[Change]:
        """The pending changes given and all that must have come before them, in their order."""
        wanted, names, kept = set(changes), set[Name](), list[Change]()
        for change in reversed(self._pending):
            if change in wanted or not names.isdisjoint(change.names):
                kept.append(change)
                names.update(change.names)
                if change.after is not None:
                    wanted.add(change.after)
        return kept[::-1]


def _update(names: dict[Name, int], change: Change) -> None:
    for name, node in change.names.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _tree(names: dict[Name, int], contents: dict[int, bytes]) -> Tree:
    below: dict[int, list[tuple[str, int]]] = {}
    for (folder, name), node in sorted(names.items()):
        below.setdefault(folder, []).append((name, node))
    tree: Tree = {}
    first: dict[int, str] = {}
    folders = [("", 0)]
    while folders:
        path, folder = folders.pop()
        for name, node in below.get(folder, ()):
            known = first.setdefault(node, os.path.join(path, name))
            tree[os.path.join(path, name)] = contents.get(node) if known == os.path.join(path, name) else known
            if node not in contents:
                folders.append((os.path.join(path, name), node))
    return tree


def read_tree(root: str) -> Tree:
    tree: Tree = {}
    for folder, folders, names in os.walk(root):
        for name in folders:
            tree[os.path.relpath(os.path.join(folder, name), root)] = None
        for name in names:
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                tree[os.path.relpath(path, root)] = file.read()
    return tree


def write_tree(root: str, tree: Tree) -> None:
    os.mkdir(root)
    for name, data in tree.items():
        path = os.path.join(root, name)
        if data is None:
            os.mkdir(path)
        elif isinstance(data, str):
            os.link(os.path.join(root, data), path)
        else:
            with open(path, "wb") as file:
                file.write(data)
