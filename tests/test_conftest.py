"""The leak check finds each kind of leak, and the fixtures do as they say."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

pytest_plugins = ["pytester"]


CONFTEST = Path(__file__).with_name("conftest.py")


@pytest.fixture
def left(belongings):
    """What is there now and was not when the test began."""
    before = belongings()
    return lambda: belongings().beyond(before)


def test_nothing_is_left_at_first(left):
    assert left() == {}


def test_a_thread_is_found_by_its_name(left, gate):
    threads = [threading.Thread(target=gate.hold, name=name) for name in ("datastates-stager", "somebody-elses")]
    for thread in threads:
        thread.start()
    gate.wait_held()
    found = left()
    gate.open()
    for thread in threads:
        thread.join()
    assert list(found) == ["threads"]
    assert [name.split()[0] for name in found["threads"]] == ["datastates-stager"]


@pytest.mark.parametrize("make", [lambda: os.memfd_create("datastates-test"), lambda: os.pidfd_open(os.getpid())])
def test_a_descriptor_is_found(left, make):
    descriptor = make()
    found = left()
    os.close(descriptor)
    assert list(found) == ["descriptors"]
    assert left() == {}


def test_a_unix_socket_is_found_and_no_other(left):
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with socket.socket(socket.AF_INET) as somebody_elses:
        assert somebody_elses.fileno() > 0
        assert len(left()["descriptors"]) == 2
    for end in pair:
        end.close()


def test_a_mapping_is_found_though_its_descriptor_is_closed(left):
    descriptor = os.memfd_create("datastates-test")
    os.ftruncate(descriptor, 8192)
    tensor = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=8192, dtype=torch.uint8)
    os.close(descriptor)
    found = left()
    del tensor
    assert list(found) == ["mappings"] and "memfd:datastates-test" in found["mappings"][0]
    assert left() == {}


def test_a_child_is_found_also_when_it_ended_and_nobody_waited(left):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert list(left()) == ["processes"]
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert left()["processes"] == [f"{child.pid}: (zombie)"]
    child.wait()
    child.stdin.close()
    assert left() == {}


def test_a_process_is_found_whose_parent_is_gone(left):
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=0, stdout=subprocess.DEVNULL,\n"
        "                         stderr=subprocess.DEVNULL)\n"
        "print(child.pid)\n"
        "import os; os._exit(0)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    orphan = int(parent.stdout.readline())
    parent.stdout.close()
    parent.wait()
    pidfd = os.pidfd_open(orphan)
    found = left()["processes"]
    parent.stdin.close()
    assert select.select([pidfd], [], [], 10.0)[0] == [pidfd], "the orphan did not end"
    os.close(pidfd)
    assert [line.split(":")[0] for line in found] == [str(orphan)]


LEAKING_TESTS = """
import os, threading
import pytest

def test_thread():
    threading.Thread(target=threading.Event().wait, name="datastates-x", daemon=True).start()

def test_descriptor():
    os.memfd_create("datastates-x")

def test_partial_file(tmp_path):
    (tmp_path / ".a.pt.1.partial").touch()

@pytest.mark.leaves_partial_files
def test_marked(tmp_path):
    (tmp_path / ".a.pt.1.partial").touch()
"""


def test_a_test_that_leaks_fails_and_says_what(pytester):
    pytester.makeconftest(CONFTEST.read_text().replace("SETTLE_SECONDS = 5.0", "SETTLE_SECONDS = 0.05"))
    pytester.makeini("[pytest]\nmarkers = leaves_partial_files\n")
    pytester.makepyfile(LEAKING_TESTS)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--strict-markers")
    result.assert_outcomes(passed=4, errors=3)
    result.stdout.fnmatch_lines(
        [
            "*left behind: {'threads': [[]'datastates-x (ident *",
            "*left behind: {'descriptors': [[]'* -> /memfd:datastates-x (deleted)'[]]}*",
            "*left partial files behind: [[]'.a.pt.1.partial'[]]*",
        ]
    )


def test_run_script_gives_output_and_passes_arguments(run_script):
    done = run_script("import sys; print(sys.argv[1:]); print('é', file=sys.stderr)", 1, "b")
    assert (done.stdout, done.stderr, done.returncode) == ("['1', 'b']\n", "é\n", 0)


def test_run_script_expects_an_exit_status(run_script):
    run_script("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", expect=-signal.SIGKILL)
    with pytest.raises(pytest.fail.Exception, match=r"exit status 1, expected 0;[^$]*ValueError: told"):
        run_script("raise ValueError('told')")
    with pytest.raises(pytest.fail.Exception, match="UserWarning: warned"):
        run_script("import warnings; warnings.warn('warned')")


def test_run_script_kills_what_does_not_end(run_script):
    with pytest.raises(pytest.fail.Exception, match=r"did not end within 0.5 s[^$]*started"):
        run_script("import time; print('started', flush=True); time.sleep(60)", timeout=0.5)


def test_gate_holds_until_opened(gate):
    passed = []

    def go():
        gate.hold()
        passed.append(True)

    thread = threading.Thread(target=go)
    assert not gate.is_held
    thread.start()
    gate.wait_held()
    assert passed == [] and gate.is_held
    gate.open()
    thread.join()
    assert passed == [True]
    gate.hold(timeout=0)


def test_gate_says_that_nobody_came(make_gate):
    with pytest.raises(TimeoutError, match="no thread came"):
        make_gate().wait_held(timeout=0)
    with pytest.raises(TimeoutError, match="nobody opened"):
        make_gate().hold(timeout=0)


def test_small_disk_gets_full(small_disk):
    folder = small_disk(1 << 20)
    with pytest.raises(OSError) as info, open(folder / "file", "wb", buffering=0) as file:
        for _ in range(2):
            written = 0
            while written < 1 << 20:
                written += file.write(bytes((1 << 20) - written))
    assert info.value.errno == errno.ENOSPC
    assert os.statvfs(folder).f_blocks * os.statvfs(folder).f_frsize == 1 << 20


def test_states_are_equal_to_the_last_bit_or_not_at_all(make_state, assert_same_state):
    assert_same_state(make_state(seed=3), make_state(seed=3))
    assert_same_state(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    with pytest.raises(AssertionError, match=r"state\['module'\]\['layers.0.weight'\]: bytes differ"):
        assert_same_state(make_state(seed=3), make_state(seed=4))
    for found, expected in [
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.zeros(1), torch.zeros(1, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([1], (1,)),
        ([1], [1, 2]),
        (1, True),
    ]:
        with pytest.raises(AssertionError):
            assert_same_state(found, expected)


def test_state_has_the_size_asked_for(make_state):
    state = make_state(nbytes=1 << 20, num_tensors=8, dtype=torch.bfloat16)
    weights = [tensor for name, tensor in state["module"].items() if name.startswith("layers.")]
    assert sum(tensor.nbytes for tensor in weights) == 1 << 20 and len(weights) == 8
    assert state["module"]["tied"] is weights[0]
