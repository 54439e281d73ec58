"""``datastates fetch``, from a folder: object stores have tests of their own (tests/tiers)."""

from __future__ import annotations

from click.testing import CliRunner

from datastates.cli.main import main
from datastates.integrity import verify
from tiers.checkpoints import make_checkpoint


def call(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["fetch", *map(str, arguments)])
    return done.exit_code, done.output


def test_what_latest_names_or_a_tag_is_brought(tmp_path):
    make_checkpoint(tmp_path / "far", "step2", at=2.0)
    make_checkpoint(tmp_path / "far", "step1", at=1.0)
    code, text = call(tmp_path / "far", tmp_path / "near")
    assert code == 0 and f"{tmp_path}/near/step1: 3 files, 3 MiB" in text
    code, _ = call(tmp_path / "far", tmp_path / "near", "--tag", "step2")
    assert code == 0 and verify(str(tmp_path / "near" / "step2")) == [] == verify(str(tmp_path / "near" / "step1"))
    assert not (tmp_path / "near" / "latest").exists()


def test_without_latest_it_is_the_youngest(tmp_path):
    make_checkpoint(tmp_path / "far", "step2", at=2.0, latest=False)
    make_checkpoint(tmp_path / "far", "step3", at=1.0, latest=False)
    assert call(tmp_path / "far", tmp_path / "near")[0] == 0
    assert verify(str(tmp_path / "near" / "step2")) == []


def test_what_is_not_there_is_said_with_what_is(tmp_path):
    make_checkpoint(tmp_path / "far", "step2")
    code, text = call(tmp_path / "far", tmp_path / "near", "--tag", "step9")
    assert code != 0 and "holds no complete checkpoint 'step9'; there are step2" in text
    code, text = call(tmp_path / "empty", tmp_path / "near")
    assert code != 0 and "there are none at all" in text
    assert not (tmp_path / "near").exists()
