"""Parts of files by name, and files into tensors that exist."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from datastates.contents.walk import Leaf, Path
from datastates.errors import MismatchError, StateError
from datastates.formats.filling import copy_over, fill, why_not
from datastates.formats.selectable import FileTensor, Selectable
from datastates.fqns import beginnings, join, listed, near, selected_by
from datastates.reading import FileReader
from datastates.state import children

_NAMES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Filled:
    """What `reader.load` gives with ``into=``.

    Attributes:
        state: the state of the file as far as it was asked for: the targets themselves stand where they were filled,
            all that is no tensor is as saved, and tensors without a target are left out.
        filled: fqns of the tensors that were filled.
        missing: fqns of the targets that the file has no tensor for; they are as they were.
        unexpected: fqns of the tensors of the file that have no target.
    """

    state: Any
    filled: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def chosen(state: Selectable, keys: Iterable[str] | None, path: str) -> list[Leaf]:
    """The leaves that some names select.

    Raises:
        MismatchError: a name selects nothing; says which names are near it.
    """
    if keys is None:
        return state.leaves
    wanted = {keys} if isinstance(keys, str) else set(keys)
    found: list[Leaf] = []
    unused = set(wanted)
    for leaf in state.leaves:
        used = selected_by(leaf.fqn, wanted)
        if used:
            found.append(leaf)
            unused -= used
    if unused or not wanted:
        missing = tuple(sorted(unused))
        known = dict.fromkeys(name for leaf in state.leaves for name in beginnings(leaf.fqn))
        hint = near(missing[0], known) if missing else ""
        raise MismatchError(
            f"{path}: nothing is named {', '.join(map(repr, missing)) or 'by an empty list'}{hint}", missing
        )
    return found


def load_chosen(state: Selectable, keys: Iterable[str], path: str) -> Any:
    """The state with only what the names select.

    Raises:
        MismatchError: a name selects nothing.
    """
    kept = {leaf.path for leaf in chosen(state, keys, path)}
    return state.load_part(kept, set())[0]


def load_into(
    file: FileReader,
    state: Selectable,
    targets: Any,
    keys: Iterable[str] | None,
    *,
    strict: bool,
    check: bool,
    is_covered: bool,
) -> Filled:
    """Fill the tensors of a state from those of the same names in the file.

    Args:
        file: open.
        state: the file's.
        targets: nested containers of tensors, or a flat dictionary by fqn.
        keys: only what these names select counts as the file's.
        strict: raise where names are missing or unexpected.
        check: compare all bytes with their checksums before anything is changed; reads them twice.
        is_covered: the file as a whole has checksums.

    Raises:
        MismatchError: no name is on both sides, shapes differ, or with ``strict`` names do. Nothing was changed.
        StateError: a target cannot be filled, or there is none. Nothing was changed.
        CorruptCheckpointError: the file is damaged. Nothing was changed, unless with ``check=False``.
    """
    found = chosen(state, keys, file.path)
    named = tensors_by_name(targets)
    if not named:
        raise StateError(f"into is a {type(targets).__name__} that holds no tensor: pass a state_dict or the like")
    match = _match(state, found, named, file.path)
    if strict and (match.missing or match.unexpected):
        raise match.error(file.path, f"names differ, {len(match.pairs)} tensors match")
    if check:
        state.verify([leaf for leaf, _, _ in match.pairs], is_covered and not match.unexpected and keys is None)
    kept = {leaf.path for leaf in found if not state.is_tensor(leaf)}
    whole = {leaf.path for leaf, source, _ in match.pairs if source is None}
    blank = {leaf.path for leaf, source, _ in match.pairs if source is not None}
    loaded, places = state.load_part(kept | whole, blank)
    graft = _Graft(loaded)
    copies = [(leaf, graft.get(places[leaf.path]), target) for leaf, source, target in match.pairs if source is None]
    wrong = {leaf.fqn: _shapes(copy.shape, target) for leaf, copy, target in copies if copy.shape != target.shape}
    if wrong:
        raise _misfit(file.path, wrong)
    fill(file, [(source, target) for _, source, target in match.pairs if source is not None])
    for _, copy, target in copies:
        copy_over(copy, target)
    for leaf, _, target in match.pairs:
        graft.put(places[leaf.path], target)
    return Filled(graft.root, match.filled, match.missing, match.unexpected)


def tensors_by_name(state: object) -> dict[str, list[torch.Tensor]]:
    """The tensors of a state under each of their fqns; several where names collide (``1`` and ``"1"``)."""
    named: dict[str, list[torch.Tensor]] = {}
    stack: list[tuple[str, object, tuple[int, ...]]] = [("", state, ())]
    while stack:
        prefix, node, above = stack.pop()
        if isinstance(node, torch.Tensor):
            named.setdefault(prefix, []).append(node)
        elif id(node) not in above:  # else it contains itself
            inner = [(join(prefix, key), child, (*above, id(node))) for key, child in children(node)]
            stack.extend(reversed(inner))
    return named


@dataclass(frozen=True, slots=True)
class _Match:
    """Leaves of the file and targets of the same name; without a source the leaf has to be loaded and copied."""

    pairs: list[tuple[Leaf, FileTensor | None, torch.Tensor]]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    @property
    def filled(self) -> tuple[str, ...]:
        return tuple(leaf.fqn for leaf, _, _ in self.pairs)

    def error(self, path: str, what: str) -> MismatchError:
        lists = [
            f"{kind}: {listed(names, _NAMES_SHOWN)}"
            for kind, names in (("missing in the file", self.missing), ("without a target", self.unexpected))
            if names
        ]
        message = f"{path}: {what}; {'; '.join(lists)}; nothing was changed"
        return MismatchError(message, self.missing, self.unexpected)


def _match(state: Selectable, found: Sequence[Leaf], targets: dict[str, list[torch.Tensor]], path: str) -> _Match:
    """Pair leaves with targets, and check that each pair fits.

    Raises:
        MismatchError: nothing matches, or shapes differ.
        StateError: a target cannot be filled.
    """
    waiting = {fqn: list(tensors) for fqn, tensors in targets.items()}
    pairs, unexpected, wrong = [], [], {}
    for leaf in found:
        is_tensor = state.is_tensor(leaf)
        if not waiting.get(leaf.fqn):
            if is_tensor:
                unexpected.append(leaf.fqn)
            continue
        target, source = waiting[leaf.fqn].pop(0), state.tensor(leaf)
        reason = why_not(target)  # first: some have no shape
        if not is_tensor:
            wrong[leaf.fqn] = "is no plain tensor in the file"
        elif reason:
            raise StateError(f"{leaf.fqn}: {reason}", leaf.fqn)
        elif source is not None and source.shape != tuple(target.shape):
            wrong[leaf.fqn] = _shapes(source.shape, target)
        pairs.append((leaf, source, target))
    missing = tuple(fqn for fqn, tensors in waiting.items() if tensors)
    if wrong:
        raise _misfit(path, wrong)
    match = _Match(pairs, missing, tuple(unexpected))
    if not pairs:
        raise match.error(path, f"no name matches{near(missing[0], unexpected)}")
    return match


def _shapes(found: Sequence[int], target: torch.Tensor) -> str:
    return f"has shape {tuple(found)} in the file, its target {tuple(target.shape)}"


def _misfit(path: str, wrong: dict[str, str]) -> MismatchError:
    shown = "; ".join(f"{fqn} {what}" for fqn, what in list(wrong.items())[:_NAMES_SHOWN])
    return MismatchError(f"{path}: {len(wrong)} tensors do not fit: {shown}; nothing was changed", mismatched=wrong)


class _Graft:
    """A state of which single values are replaced, by the positions that lead to them. Tuples are made anew."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._keys: dict[int, list[Any]] = {}  # by id of a dictionary of the state, which `root` keeps alive

    def get(self, place: Path) -> Any:
        node = self.root
        for position in place:
            node = node[self._key(node, position)]
        return node

    def put(self, place: Path, value: Any) -> None:
        self.root = self._with(self.root, place, value)

    def _with(self, node: Any, place: Path, value: Any) -> Any:
        if not place:
            return value
        key = self._key(node, place[0])
        changed = self._with(node[key], place[1:], value)
        if isinstance(node, tuple):
            return (*node[:key], changed, *node[key + 1 :])
        node[key] = changed
        return node

    def _key(self, node: Any, position: int) -> Any:
        if not isinstance(node, dict):
            return position
        keys = self._keys.get(id(node))
        if keys is None:
            keys = self._keys[id(node)] = list(node)
        return keys[position]
