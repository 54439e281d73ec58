"""Space of removed checkpoints that new files take over."""

from __future__ import annotations

import mmap
import os
import pathlib
import stat
from collections.abc import Iterator

import pytest
import torch

import datastates
from datastates import spares
from datastates.config import CheckpointConfig
from datastates.removal import remove_checkpoint
from datastates.saver import Saver
from datastates.spares import FOLDER_NAME, keep_spares, remove_spares, take_spare
from datastates.storage import create_partial

NBYTES = 1 << 20


@pytest.fixture(autouse=True)
def small_files_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "MIN_SPARE_BYTES", 4096)


@pytest.fixture
def saver() -> Iterator[Saver]:
    saver = Saver(CheckpointConfig(host_cache_bytes=64 << 20), run_id="spares")
    yield saver
    saver.close(60)


def file_of(path: pathlib.Path, nbytes: int = NBYTES) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\xab" * nbytes)
    return path


def pool_of(parent: pathlib.Path) -> list[pathlib.Path]:
    folder = parent / FOLDER_NAME
    return sorted(folder.iterdir()) if folder.exists() else []


def save(saver: Saver, folder: pathlib.Path, state: object) -> None:
    attempt = saver.begin(str(folder), folder.name, update_latest=True)
    saver.save(state, str(folder / "model.pt"), attempt=attempt)
    saver.commit(attempt).result(60)


def test_a_checkpoint_over_the_blocks_of_a_removed_one(tmp_path: pathlib.Path, saver: Saver) -> None:
    """Smaller, larger, and of equal size: what is loaded is what was saved, and the file is the old one."""
    for number, count in enumerate((2_000_000, 2_000_000, 1_500_000, 2_500_000)):
        state = {"w": torch.full((count,), float(number)), "step": number}
        folder = tmp_path / f"step{number}"
        kept = [path.stat().st_ino for path in pool_of(tmp_path)]
        save(saver, folder, state)
        assert (folder / "model.pt").stat().st_ino in kept or not number or not kept
        assert pool_of(tmp_path) == [] or not kept
        loaded = datastates.load(str(folder / "model.pt"))
        assert torch.equal(loaded["w"], state["w"])
        assert loaded["step"] == number
        remove_checkpoint(str(folder), spare=True)
        assert not folder.exists()
        assert len(pool_of(tmp_path)) == 1
    remove_spares(str(tmp_path))
    assert pool_of(tmp_path) == []
    remove_spares(str(tmp_path))


def test_the_flusher_takes_them_over(tmp_path: pathlib.Path, saver: Saver) -> None:
    """From the threshold on that applies in its process."""
    state = {"w": torch.arange(2_000_000.0)}
    save(saver, tmp_path / "a", state)
    inode = (tmp_path / "a" / "model.pt").stat().st_ino
    save(saver, tmp_path / "b", state)
    remove_checkpoint(str(tmp_path / "a"), spare=True)
    save(saver, tmp_path / "c", {"w": -state["w"]})
    assert (tmp_path / "c" / "model.pt").stat().st_ino == inode
    assert torch.equal(datastates.load(str(tmp_path / "c" / "model.pt"))["w"], -state["w"])
    assert torch.equal(datastates.load(str(tmp_path / "b" / "model.pt"))["w"], state["w"])


def test_no_more_is_kept_than_one_checkpoint_takes(tmp_path: pathlib.Path) -> None:
    for name in ("a", "b"):
        file_of(tmp_path / name / "model.pt")
        file_of(tmp_path / name / "small", 100)
    assert keep_spares(str(tmp_path / "a"), str(tmp_path)) == NBYTES
    assert keep_spares(str(tmp_path / "b"), str(tmp_path)) == 0
    assert len(pool_of(tmp_path)) == 1
    assert (tmp_path / "b" / "model.pt").exists()
    assert (tmp_path / "a" / "small").exists()


def test_the_nearest_in_size_is_taken(tmp_path: pathlib.Path) -> None:
    file_of(tmp_path / "old" / "large", 3 * NBYTES)
    file_of(tmp_path / "old" / "right", NBYTES)
    keep_spares(str(tmp_path / "old"), str(tmp_path))
    target = tmp_path / "new"
    assert take_spare(str(tmp_path / "model.pt"), str(target), NBYTES + 5, mode_of(tmp_path))
    assert target.stat().st_size == NBYTES


def mode_of(folder: pathlib.Path) -> int:
    """What new files get."""
    (folder / "probe").touch()
    return stat.S_IMODE((folder / "probe").stat().st_mode)


def spare_of(folder: pathlib.Path) -> pathlib.Path:
    file_of(folder / "old" / "model.pt")
    keep_spares(str(folder / "old"), str(folder))
    return pool_of(folder)[0]


def is_taken(folder: pathlib.Path) -> bool:
    return take_spare(str(folder / "model.pt"), str(folder / "partial"), NBYTES, mode_of(folder))


def test_one_that_somebody_reads_is_left_alone(tmp_path: pathlib.Path) -> None:
    spare = spare_of(tmp_path)
    with spare.open("rb") as file:
        assert not is_taken(tmp_path)
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    assert not is_taken(tmp_path)
    assert mapping[:3] == b"\xab" * 3
    mapping.close()
    assert is_taken(tmp_path)


def test_one_with_a_second_name_is_left_alone(tmp_path: pathlib.Path) -> None:
    file_of(tmp_path / "old" / "model.pt")
    os.link(tmp_path / "old" / "model.pt", tmp_path / "mine")
    assert keep_spares(str(tmp_path / "old"), str(tmp_path)) == 0
    spare = spare_of(tmp_path / "sub")
    os.link(spare, tmp_path / "second")
    assert not is_taken(tmp_path / "sub")


def test_neither_links_nor_what_has_the_name_already(tmp_path: pathlib.Path) -> None:
    spare = spare_of(tmp_path)
    (tmp_path / "partial").symlink_to(tmp_path / "elsewhere")
    assert not is_taken(tmp_path)
    (tmp_path / "partial").unlink()
    spare.rename(tmp_path / "real")
    spare.symlink_to(tmp_path / "real")
    assert not is_taken(tmp_path)


def test_a_save_that_is_given_up_leaves_nothing_of_it(tmp_path: pathlib.Path) -> None:
    spare_of(tmp_path)
    partial = create_partial(str(tmp_path / "model.pt"), "a-1", NBYTES // 2)
    assert os.path.getsize(partial.partial) == NBYTES // 2, "cut to the new size at once"
    assert pool_of(tmp_path) == []
    partial.remove()
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == []


@pytest.mark.parametrize("mode", [0o666, 0o640, 0o600])
def test_nobody_may_read_more_than_of_a_new_file(tmp_path: pathlib.Path, mode: int) -> None:
    spare = spare_of(tmp_path)
    spare.chmod(mode)
    old = os.umask(0o077)
    try:
        partial = create_partial(str(tmp_path / "model.pt"), "a-1", NBYTES)
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(partial.partial).st_mode) == 0o600
    assert spare.exists() == (mode != 0o600)
    partial.remove()
