"""``datastates doctor`` and the functions behind it."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from datastates.cli import doctor as doctor_command
from datastates.cli import main
from datastates.config import GIB, MIB, CheckpointConfig
from datastates.doctor import disk, machine
from datastates.doctor.disk import DiskMeasurement, measure_disk, room_findings
from datastates.doctor.engine_choice import engine_findings, read_config
from datastates.doctor.findings import Severity
from datastates.doctor.installation import (
    DeepSpeedInstallation,
    find_deepspeed,
    installation_findings,
    read_deepspeed,
    release,
)
from datastates.doctor.machine import Machine, cgroup_limit, memory_findings
from datastates.doctor.pace import Load, interval_finding, pace_findings, state_nbytes
from datastates.errors import ConfigError, StorageError
from datastates.figures import figure

STOCK = DeepSpeedInstallation("0.19.8", has_adapter=True, is_repaired=False, nebula="refused")
OLDER = DeepSpeedInstallation("0.19.6", has_adapter=True, is_repaired=False, nebula="wins")
SECTION = {"datastates_ckpt": {"host_cache_size": 1}}


def texts(findings, severity):
    return [f"{finding.message} {finding.advice}" for finding in findings if finding.severity is severity]


# ------------------------------------------------------------------------------------------- which engine


@pytest.mark.parametrize(
    ("config", "deepspeed", "words"),
    [
        ({}, STOCK, "no section datastates_ckpt"),
        ({"datastates_ckpt": False}, STOCK, "no section datastates_ckpt"),
        ({"datastates_ckpt": {}}, STOCK, "an empty section enables the engine all the same"),
        ({"datastates_ckpt": None}, STOCK, "an empty section enables the engine all the same"),
        ({**SECTION, "checkpoint": {"writer": {"type": "FAST"}}}, STOCK, "FastCheckpointEngine"),
        ({**SECTION, "checkpoint": {"writer": {"decoupled": True}}}, STOCK, "DecoupledCheckpointEngine"),
        ({**SECTION, "nebula": {}}, STOCK, "refuses a config with nebula"),
        ({**SECTION, "nebula": {"enabled": True}}, OLDER, "nebula is enabled and wins"),
        (SECTION, None, "DeepSpeed is not installed"),
        (SECTION, replace(STOCK, has_adapter=False), "ignores datastates_ckpt"),
        ({"datastates_ckpt": {"host_cache_size": "4"}}, STOCK, "host_cache_size is '4'"),
        ({"datastates_ckpt": 7}, STOCK, "datastates_ckpt is 7"),
    ],
)
def test_what_keeps_the_engine_from_being_active_is_said(config, deepspeed, words):
    findings = list(engine_findings(config, deepspeed))
    assert words in " ".join(texts(findings, Severity.WRONG))
    assert not texts(findings, Severity.GOOD)


@pytest.mark.parametrize("config", [SECTION, {**SECTION, "checkpoint": {"tag_validation": "Warn", "writer": None}}])
def test_a_sound_section_makes_the_engine_active(config):
    findings = list(engine_findings(config, STOCK))
    assert [finding.severity for finding in findings] == [Severity.GOOD]
    assert "saves with datastates" in findings[0].message


def test_a_nebula_section_that_is_not_enabled_does_no_harm_where_it_is_known():
    assert [f.severity for f in engine_findings({**SECTION, "nebula": {}}, OLDER)] == [Severity.GOOD]


def test_enabled_false_is_told_to_mean_nothing():
    findings = list(engine_findings({"datastates_ckpt": {"host_cache_size": 1, "enabled": False}}, STOCK))
    assert [finding.severity for finding in findings] == [Severity.WARNING, Severity.GOOD]
    assert "all the same" in findings[0].message


def test_every_wrong_key_is_named_with_the_nearest_known_one():
    section = {"host_cache_sise": 1, "formt": "torch", "num_writers": 0, "when_busy": "skip"}
    found = texts(engine_findings({"datastates_ckpt": section}, STOCK), Severity.WRONG)
    assert len(found) == 3
    assert "'host_cache_sise'; did you mean 'host_cache_size'?" in found[0]
    assert "'formt'; did you mean 'format'?" in found[1]
    assert "num_writers is 0" in found[2]


def test_each_of_several_wrong_values_is_named_once():
    section = {"host_cache_size": -1, "num_writers": 0, "eager_bytes": 4096}
    found = texts(engine_findings({"datastates_ckpt": section}, STOCK), Severity.WRONG)
    assert len(found) == 2
    assert "host_cache_size" in found[0]
    assert "num_writers" in found[1]


@pytest.mark.parametrize(
    ("part", "subject"),
    [
        ({"checkpoint": {"use_node_local_storage": True}}, "storage"),
        ({"zero_optimization": {"stage": 2, "zenflow": {}}}, "overlap"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"super_offload": True}}}, "overlap"),
    ],
)
def test_what_does_not_go_together_is_warned_of(part, subject):
    findings = list(engine_findings({**SECTION, **part}, STOCK))
    assert [f.subject for f in findings if f.severity is Severity.WARNING] == [subject]


# --------------------------------------------------------------------------------------- the installation


def test_the_installed_deepspeed_is_read_without_importing_it(run_script):
    found = find_deepspeed()
    assert found is not None and found.has_adapter and not found.is_repaired
    loaded = run_script(
        "import sys\n"
        "from datastates.doctor.installation import find_deepspeed\n"
        "find_deepspeed()\n"
        "print(sorted({'deepspeed', 'torch', 'numpy'} & set(sys.modules)))\n"
    )
    assert loaded.stdout == "[]\n"


def fake_deepspeed(folder: Path, adapter: str, choice: str, config: str) -> DeepSpeedInstallation:
    for name, text in (
        ("runtime/checkpoint_engine/datastates_checkpoint_engine.py", adapter),
        ("runtime/checkpoint_engine/utils.py", choice),
        ("runtime/config.py", config),
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_deepspeed(folder, "0.20.0")


def test_an_adapter_that_was_repaired_upstream_is_recognised(tmp_path):
    adapter = (
        "class DataStatesCheckpointEngine(Base):\n    def get_commit_info(self):\n        return self.commit_info\n"
    )
    found = fake_deepspeed(tmp_path, adapter, "", '    "nebula":\n    "removed"')
    assert found == DeepSpeedInstallation("0.20.0", has_adapter=True, is_repaired=True, nebula="refused")
    found = list(installation_findings(found, "2.13.0", "1.9.1"))
    assert [finding.severity for finding in found] == [Severity.GOOD]
    assert "left alone" in found[0].message


def test_a_method_of_the_same_name_elsewhere_is_no_repair(tmp_path):
    adapter = "class Other:\n    def get_commit_info(self): ...\nclass DataStatesCheckpointEngine: ...\n"
    found = fake_deepspeed(tmp_path, adapter, "if config.nebula_config.enabled: ...", "")
    assert found == DeepSpeedInstallation("0.20.0", has_adapter=True, is_repaired=False, nebula="wins")
    assert read_deepspeed(tmp_path / "nothing", "0.9.0") == DeepSpeedInstallation("0.9.0", False, False, "")


@pytest.mark.parametrize(
    ("deepspeed", "torch", "isal", "severity", "words"),
    [
        (STOCK, "", "1.9", Severity.WRONG, "PyTorch is not installed"),
        (STOCK, "2.9.1+cu130", "1.9", Severity.WRONG, "2.9.1+cu130 is too old"),
        (STOCK, "2.13.0", "", Severity.WARNING, "zlib"),
        (None, "2.13.0", "1.9", Severity.WARNING, "DeepSpeed is not installed"),
        (OLDER, "2.13.0", "1.9", Severity.WARNING, "older than what"),
        (replace(STOCK, has_adapter=False), "2.13.0", "1.9", Severity.WRONG, "no adapter"),
    ],
)
def test_what_is_missing_or_too_old_is_said(deepspeed, torch, isal, severity, words):
    assert words in " ".join(texts(installation_findings(deepspeed, torch, isal), severity))


def test_versions_compare_by_number():
    assert release("0.19.10") > release("0.19.8+abc") == (0, 19, 8)
    assert release("") == ()


# -------------------------------------------------------------------------------------------- config files


def test_a_config_with_comments_is_read_as_deepspeed_reads_it(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{\n  # how much\n  "datastates_ckpt": {"host_cache_size": 1}\n}')
    assert read_config(str(path)) == SECTION


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "a": 2}', "'a' stands twice"),
        ("[1]", "holds a list"),
        ("{", "ds.json"),
        (b"\xff\xfe\x00", "no text"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_config_that_is_none_is_refused_by_its_name(tmp_path, text, words):
    path = tmp_path / "ds.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=words) as caught:
        read_config(str(path))
    assert "ds.json" in str(caught.value)


# ---------------------------------------------------------------------------------------------- the memory


ROOMY = Machine(64 * GIB, 60 * GIB, None, None, has_accelerator=True)


def memory(host_cache_gib: float, num_ranks: int, found: Machine) -> list[tuple[str, Severity]]:
    config = CheckpointConfig(host_cache_bytes=int(host_cache_gib * GIB))
    return [(finding.subject, finding.severity) for finding in memory_findings(config, num_ranks, found)]


@pytest.mark.parametrize(
    ("host_cache_gib", "num_ranks", "found", "severity"),
    [
        (1, 8, ROOMY, Severity.GOOD),
        (5, 8, ROOMY, Severity.WARNING),
        (8, 8, ROOMY, Severity.WRONG),
        (1, 8, replace(ROOMY, available_nbytes=4 * GIB), Severity.WARNING),
        (1, 8, replace(ROOMY, cgroup_nbytes=4 * GIB), Severity.WRONG),
    ],
)
def test_the_caches_of_all_ranks_must_fit(host_cache_gib, num_ranks, found, severity):
    assert memory(host_cache_gib, num_ranks, found)[0] == ("memory", severity)


def test_the_size_that_is_advised_fits():
    config = CheckpointConfig(host_cache_bytes=8 * GIB)
    (found,) = [f for f in memory_findings(config, 8, ROOMY) if f.severity is Severity.WRONG]
    advised = float(found.advice.split("less than ")[1].split(",")[0])
    assert memory(advised * 0.99, 8, ROOMY)[0][1] is not Severity.WRONG
    assert memory(advised * 1.01, 8, ROOMY)[0][1] is Severity.WRONG


def test_the_limit_on_locked_memory_counts_where_an_accelerator_is_and_pinning_is_asked_for():
    limited = replace(ROOMY, memlock_nbytes=8 * MIB)
    assert ("memlock", Severity.WARNING) in memory(1, 1, limited)
    assert ("memlock", Severity.GOOD) in memory(1, 1, ROOMY)
    assert "memlock" not in dict(memory(1, 1, replace(limited, has_accelerator=False)))
    config = CheckpointConfig(host_cache_bytes=GIB, pin_host_cache=False)
    assert "memlock" not in [finding.subject for finding in memory_findings(config, 1, limited)]


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "4096\n"}, 4096),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": "4096\n",
                "sys/fs/cgroup/a/b/memory.max": "1024\n",
            },
            1024,
        ),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"}, None),
        ({"proc/self/cgroup": "0::/../outside\n", "sys/fs/cgroup/memory.max": "512\n"}, 512),
        ({"proc/self/cgroup": "4:cpu,memory:/x\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "77\n"}, 77),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "3:cpuset:/x\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "77\n"}, None),
        ({}, None),
    ],
)
def test_the_lowest_limit_of_the_control_groups_counts(tmp_path, files, limit):
    assert cgroup_limit(write_tree(tmp_path, files)) == limit


def test_this_machine_is_read():
    found = Machine.now()
    assert 0 < found.available_nbytes <= found.memory_nbytes
    assert found.usable_nbytes <= found.memory_nbytes


# ---------------------------------------------------------------------------------------------- the disk


def test_a_measurement_is_durable_bounded_and_leaves_nothing(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(disk, "fsync", lambda descriptor: synced.append(os.fstat(descriptor)))
    measured = measure_disk(str(tmp_path), max_nbytes=64 * MIB)
    assert measured.nbytes == 64 * MIB
    assert [(status.st_size, status.st_nlink) for status in synced] == [(64 * MIB, 0)]
    assert measured.seconds > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_direct", [True, False])
def test_without_nameless_files_the_name_goes_before_the_first_byte(tmp_path, monkeypatch, is_direct):
    real, refused, names = os.open, [], []

    def refuse(path, flags, *arguments, **options):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            refused.append("O_TMPFILE")
            raise OSError(errno.EOPNOTSUPP, "not supported")
        if flags & os.O_DIRECT and not is_direct:
            os.close(real(path, flags & ~os.O_DIRECT, *arguments, **options))  # it is made, and then refused
            raise OSError(errno.EINVAL, "invalid")
        return real(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(disk, "write_all", lambda *_: names.extend(os.listdir(tmp_path)))
    measured = measure_disk(str(tmp_path), max_nbytes=64 * MIB)
    assert refused and names == []
    assert list(tmp_path.iterdir()) == []
    assert measured.is_direct or not is_direct


def test_a_file_system_that_refuses_direct_writes_late_is_measured_without(tmp_path, monkeypatch):
    real = disk.write_all

    def refuse(descriptor, view, offset):
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "invalid")
        real(descriptor, view, offset)

    monkeypatch.setattr(disk, "write_all", refuse)
    measured = measure_disk(str(tmp_path), max_nbytes=64 * MIB)
    assert not measured.is_direct and measured.nbytes == 64 * MIB
    assert [finding.severity for finding in disk.disk_findings(measured)] == [Severity.WARNING]


def test_no_write_begins_after_the_time_is_up(tmp_path):
    assert measure_disk(str(tmp_path), max_nbytes=64 * MIB, max_seconds=-1.0).nbytes == 0


def test_a_write_that_fails_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(disk, "write_all", fail)
    with pytest.raises(StorageError, match=str(tmp_path)) as caught:
        measure_disk(str(tmp_path), max_nbytes=64 * MIB)
    assert caught.value.errno == errno.EIO
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_measured_is_named(tmp_path, small_disk):
    with pytest.raises(StorageError, match="nowhere"):
        measure_disk(str(tmp_path / "nowhere"))
    tiny = small_disk(32 * MIB)
    with pytest.raises(StorageError, match="too few") as caught:
        measure_disk(str(tiny))
    assert caught.value.errno == errno.ENOSPC


def test_a_measurement_takes_no_more_than_a_quarter_of_what_is_free(small_disk):
    assert measure_disk(str(small_disk(320 * MIB))).nbytes == 80 * MIB


@pytest.mark.parametrize(
    ("free", "severity"), [(9 * GIB, Severity.WRONG), (15 * GIB, Severity.WARNING), (20 * GIB, Severity.GOOD)]
)
def test_there_must_be_room_for_two_checkpoints(free, severity):
    measured = DiskMeasurement("/x", GIB, 1.0, 0.1, True, free)
    assert [finding.severity for finding in room_findings(measured, 10 * GIB)] == [severity]


def test_numbers_have_three_digits_and_no_exponent():
    assert [figure(value) for value in (0.0916, 1.7093, 999.4, 999.6, 7150.2)] == [
        "0.0916",
        "1.71",
        "999",
        "1000",
        "7150",
    ]
    (room,) = room_findings(DiskMeasurement("/x", GIB, 1.0, 0.1, True, 7150 * GIB), 2000 * GIB)
    assert room.message == "7150 GiB free, room for 3 checkpoints of 2000 GiB"


# ---------------------------------------------------------------------------------------------- the pace


@pytest.mark.parametrize(
    ("config", "nbytes"),
    [
        ({}, 12),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}, 14),
        ({"fp16": {"enabled": True}}, 14),
        ({"fp16": {"enabled": False}, "zero_optimization": {"stage": 1}}, 12),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}, 12),
    ],
)
def test_the_size_of_a_checkpoint_follows_from_the_config(config, nbytes):
    assert state_nbytes(1000, config) == 1000 * nbytes


def test_an_interval_is_sustainable_when_a_save_is_durable_before_the_next():
    load = Load(100 * GIB, num_ranks=8, num_nodes=2)
    (found,) = pace_findings(load, 5 * GIB, None, step_seconds=2.0)
    assert "durable 10 s" in found.message
    assert "save-interval of 7 steps" in found.message  # 10 s and a quarter, in steps of 2 s
    assert interval_finding(load, 5 * GIB, 2.0, 5).severity is Severity.GOOD
    late = interval_finding(load, 5 * GIB, 2.0, 4)
    assert late.severity is Severity.WRONG and "every 7 steps" in late.advice


@pytest.mark.parametrize(
    ("cache_gib", "step_seconds", "severity", "words"),
    [
        (10.0, None, Severity.GOOD, "never waits"),
        (4.0, 6.0, Severity.GOOD, "while the step goes on"),
        (4.0, 2.0, Severity.WARNING, "for 4 s"),
        (4.0, None, Severity.WARNING, "for 6 s, less the time"),
    ],
)
def test_a_save_is_hidden_when_the_rest_is_written_before_the_next_step(cache_gib, step_seconds, severity, words):
    load = Load(20 * GIB, num_ranks=2)
    found = list(pace_findings(load, 2 * GIB, int(cache_gib * GIB), step_seconds))[-1]
    assert found.severity is severity
    assert words in found.message
    if severity is Severity.WARNING:
        advised = float(found.advice.split()[-1])
        assert list(pace_findings(load, 2 * GIB, int(advised * GIB), step_seconds))[-1].severity is Severity.GOOD


# ------------------------------------------------------------------------------------------- the command


@pytest.fixture
def config_file(tmp_path):
    def write(config):
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps(config))
        return str(path)

    return write


@pytest.fixture(autouse=True)
def _roomy(monkeypatch):
    """The command judges a machine that the tests know."""
    monkeypatch.setattr(machine.Machine, "now", classmethod(lambda _: ROOMY))
    monkeypatch.setattr(doctor_command, "MEASURED_BYTES", 64 * MIB)


def test_a_sound_config_ends_with_0_and_says_so(config_file):
    done = CliRunner().invoke(main, ["doctor", config_file(SECTION)])
    assert done.exit_code == 0, done.output
    assert "saves with datastates" in done.stdout
    assert "wrong" not in done.stdout


def test_something_wrong_ends_with_1_and_a_warning_with_0(config_file):
    assert CliRunner().invoke(main, ["doctor", config_file({})]).exit_code == 1
    warned = {**SECTION, "checkpoint": {"use_node_local_storage": True}}
    done = CliRunner().invoke(main, ["doctor", config_file(warned)])
    assert done.exit_code == 0
    assert "warning" in done.stdout


def test_json_has_every_finding(config_file, tmp_path):
    arguments = ["--directory", str(tmp_path), "--params", "1e6", "--step-seconds", "1", "--save-interval", "1000"]
    done = CliRunner().invoke(main, ["doctor", config_file(SECTION), "--json", *arguments])
    found = json.loads(done.stdout)
    assert done.exit_code == 0, done.output
    assert [set(entry) for entry in found] == [{"severity", "subject", "message", "advice"}] * len(found)
    subjects = [entry["subject"] for entry in found]
    assert subjects == ["deepspeed", "engine", "memory", "memlock", "disk", "room", "interval", "cache", "interval"]
    assert os.listdir(tmp_path) == ["ds_config.json"]


def test_without_a_config_the_installation_is_judged():
    done = CliRunner().invoke(main, ["doctor", "--json"])
    assert done.exit_code == 0
    assert [entry["subject"] for entry in json.loads(done.stdout)] == ["deepspeed"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--params", "1e9", "--state-gb", "1"], "exclude each other"),
        (["--save-interval", "5"], "needs --step-seconds"),
        (["--step-seconds", "1", "--directory", "."], "needs --params or --state-gb"),
        (["--params", "1e9"], "needs --directory"),
        (["--state-gb", "1"], "needs --directory"),
        (["--ranks", "0"], "--ranks"),
    ],
)
def test_wrong_usage_ends_with_2(arguments, words):
    done = CliRunner().invoke(main, ["doctor", *arguments])
    assert done.exit_code == 2
    assert words in done.stderr


def test_a_config_that_is_not_there_is_one_line_and_3(tmp_path):
    done = CliRunner().invoke(main, ["doctor", str(tmp_path / "none.json")])
    assert (done.exit_code, done.stdout) == (3, "")
    assert done.stderr == f"datastates: {tmp_path}/none.json cannot be read: No such file or directory\n"
