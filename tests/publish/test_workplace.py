"""A directory appears only when it is complete, and files of others are never touched."""

import errno
import fcntl
import os
import re
import socket
import stat
import subprocess
import sys

import pytest

from growkern.errors import GrowthError
from growkern.publish import calls, workplace
from growkern.publish.calls import Lock, locked
from growkern.publish.workplace import Workplace, delete_leftovers


def may_replace(directory):
    return (directory / "mark").is_file()


def work(target, text="new", *, overwrite=False, meanwhile=lambda: None, resume=True):
    """Make a target that holds one file; `meanwhile` happens when that is written."""
    delete_leftovers(target, "making", may_replace)
    with Workplace(target, "making", may_replace, resume=resume) as place:
        (place.open_new() / "mark").write_text(text)
        meanwhile()
        place.publish(overwrite=overwrite)


@pytest.fixture
def target(tmp_path):
    return tmp_path / "target"


@pytest.fixture(params=[0, errno.ENOSYS, errno.EINVAL], ids=["renameat2", "ENOSYS", "EINVAL"])
def system(request, monkeypatch):
    """Systems with and without renameat2."""

    def unknown(*args):
        raise OSError(request.param, os.strerror(request.param))

    if request.param:
        monkeypatch.setattr(calls, "_renameat2", unknown)
    return request.param


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ------------------------------------------------------------------ the target


def test_it_appears_with_usual_modes(target, system):
    mask = os.umask(0o027)
    try:
        work(target)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(target.stat().st_mode) == 0o750
    assert (target / "mark").read_text() == "new" and names(target.parent) == ["target"]


def test_files_are_readable_for_those_who_may_read_new_ones(target):
    def make_private():
        (weights,) = target.parent.glob(".*/new/mark")
        weights.chmod(0o600)

    mask = os.umask(0o027)
    try:
        work(target, meanwhile=make_private)
    finally:
        os.umask(mask)
    assert stat.S_IMODE((target / "mark").stat().st_mode) == 0o640
    assert names(target) == ["mark"]


def test_a_group_that_a_folder_passes_on_is_kept(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2775)
    # unfinished work, of a time when it was not private
    (shared / ".target.making" / "new").mkdir(parents=True)
    (shared / ".target.making").chmod(0o2775)
    seen = []
    work(shared / "target", meanwhile=lambda: seen.append((shared / ".target.making").stat()))
    assert stat.S_IMODE(seen[0].st_mode) == 0o2700
    assert (shared / "target").stat().st_mode & stat.S_ISGID


@pytest.mark.parametrize("make", ["directory", "empty directory", "file", "link"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_target_that_came_into_being_is_left_alone(target, system, make, overwrite):
    """The result is kept, and published at once when the other thing has been moved away."""

    def appear():
        if make == "file":
            target.write_text("mine")
        elif make == "link":
            target.symlink_to("elsewhere")
        else:
            target.mkdir()
            if make == "directory":
                (target / "mine.txt").write_text("mine")

    with pytest.raises(GrowthError, match=rf"{target} .* not changed; the result is kept"):
        work(target, overwrite=overwrite, meanwhile=appear)
    place = target.parent / ".target.making"
    assert (place / "new" / "mark").read_text() == "new"
    if make == "directory":
        assert (target / "mine.txt").read_text() == "mine" and names(target) == ["mine.txt"]
    assert target.is_symlink() == (make == "link") and target.is_file() == (make == "file")
    target.rename(target.with_name("moved"))
    with Workplace(target, "making", may_replace) as again:
        assert (again.new / "mark").read_text() == "new"
        again.publish(overwrite=False)
    assert (target / "mark").read_text() == "new" and names(target.parent) == ["moved", "target"]


def test_it_is_replaced_with_all_that_was_in_it(target, system):
    work(target, "old")
    (target / "deep" / "deeper").mkdir(parents=True)
    (target / "deep" / "link").symlink_to(target.parent)
    (target.parent / "beside").write_text("beside")
    work(target, "new", overwrite=True)
    assert names(target) == ["mark"] and names(target.parent) == ["beside", "target"]
    assert (target / "mark").read_text() == "new"


def test_there_is_a_target_at_any_moment(target, monkeypatch):
    """The exchange is one call: of two renames the first would leave none."""
    work(target, "old")
    seen = []

    def watched(call):
        def wrapper(*args, **kwargs):
            seen.append(target.exists())
            result = call(*args, **kwargs)
            seen.append(target.exists())
            return result

        return wrapper

    monkeypatch.setattr(calls, "_renameat2", watched(calls._renameat2))
    monkeypatch.setattr(os, "rename", watched(os.rename))
    monkeypatch.setattr(os, "unlink", watched(os.unlink))
    work(target, "new", overwrite=True)
    assert len(seen) > 6 and all(seen)


def test_old_contents_are_not_removed_unseen(target, monkeypatch):
    """The disk fails between the exchange and the look at what was exchanged."""
    fsync = os.fsync

    def appear():
        target.mkdir()
        (target / "mine.txt").write_text("mine")

    def failing(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(target.parent):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing)
        with pytest.raises(GrowthError, match="is complete, but may not survive a power failure"):
            work(target, overwrite=True, meanwhile=appear)
    with pytest.raises(GrowthError, match="not changed; the result is kept"):
        delete_leftovers(target, "making", may_replace)
    assert names(target) == ["mine.txt"]
    assert names(target.parent / ".target.making" / "new") == ["mark"]


def test_old_contents_that_cannot_be_removed(target, monkeypatch):
    """The target is there, and the next start removes them."""
    work(target, "old")
    remove = workplace.remove

    def failing(name, folder):
        if name == "trash" and calls.exists(name, folder):
            raise PermissionError(errno.EACCES, "Permission denied")
        remove(name, folder)

    with monkeypatch.context() as patched, pytest.warns(UserWarning, match="target is complete"):
        patched.setattr(workplace, "remove", failing)
        work(target, "new", overwrite=True)
    assert (target / "mark").read_text() == "new"
    assert names(target.parent) == [".target.making", "target"]
    delete_leftovers(target, "making", may_replace)
    assert names(target.parent) == ["target"]


# ------------------------------------------------------------- strangers' things


@pytest.fixture
def victim(tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "thesis.tex").write_text("years of work")
    return tmp_path / "victim"


@pytest.mark.parametrize("name", ["", "new", "journal.jsonl", "swap", "old", "trash"])
@pytest.mark.parametrize("resume", [True, False])
def test_planted_links_are_not_followed(target, victim, name, resume):
    place = target.parent / ".target.making"
    if name:
        place.mkdir()
    is_file = name in ("journal.jsonl", "swap")
    (place / name).symlink_to(victim / "thesis.tex" if is_file else victim)
    refused = None
    try:
        work(target, resume=resume)
    except GrowthError as error:
        refused = str(error)
        assert "\n" not in refused
    assert names(victim) == ["thesis.tex"]
    assert (victim / "thesis.tex").read_text() == "years of work"
    assert not target.is_symlink()
    assert (refused is None) == target.exists()


def test_another_users_directory_is_not_used(target, monkeypatch):
    (target.parent / ".target.making").mkdir()
    # our files get the same owner as that directory: only who we are is another one
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    work(target)
    monkeypatch.setattr(calls, "_owner_of_ours", lambda folder: os.getuid() + 1)
    with pytest.raises(GrowthError, match=r"\.target\.making belongs to another user"):
        work(target.with_name("target"), overwrite=True)


# --------------------------------------------------------------------- the lock


HOLDER = """
import sys
from pathlib import Path
from growkern.publish.workplace import Workplace
with Workplace(Path(sys.argv[1]), "making", lambda directory: False) as place:
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_the_second_process_is_told_who_is_at_work(target):
    command = [sys.executable, "-c", HOLDER, str(target)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "ready\n"
    who = f"process {holder.pid} on {re.escape(socket.gethostname())} is making it now"
    with pytest.raises(GrowthError, match=f"{target}: {who}: wait for it or stop it"):
        work(target)
    holder.kill()
    holder.communicate()
    work(target)
    assert names(target.parent) == ["target"]


def test_a_child_does_not_hold_the_lock(tmp_path):
    """A data loader's worker may outlive its trainer."""
    ours, childs = socket.socketpair()
    lock = Lock(tmp_path / "lock", tmp_path, "training")
    child = os.fork()
    if not child:
        ours.close()
        childs.sendall(b"ready")
        childs.recv(1)
        os._exit(0)
    childs.close()
    assert ours.recv(5) == b"ready"
    # as by the end of the process: the file stays
    lock._lock.release()
    Lock(tmp_path / "lock", tmp_path, "training").release()
    ours.close()
    os.waitpid(child, 0)


def test_a_locked_directory_is_as_it_was_afterwards(tmp_path):
    with locked(tmp_path / "deep" / "new", "training in"):
        assert names(tmp_path / "deep") == [".new.lock", "new"]
        with (
            pytest.raises(GrowthError, match=rf"process {os.getpid()} on .* is training in it"),
            locked(tmp_path / "deep" / "new", "training in"),
        ):
            pass
    assert names(tmp_path / "deep") == []
    (tmp_path / "empty").mkdir()
    with locked(tmp_path / "empty", "training in"):
        pass
    assert names(tmp_path / "empty") == []


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_with_the_mount_option(target, monkeypatch, code):
    def none(descriptor, how):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", none)
    why = rf"{target.parent} .*{os.strerror(code)}.*option flock"
    with pytest.raises(GrowthError, match=why):
        work(target)
    with pytest.raises(GrowthError, match=why), locked(target, "training in"):
        pass


def test_a_planted_lock_is_not_followed(target, victim):
    (target.parent / ".target.lock").symlink_to(victim / "thesis.tex")
    with pytest.raises(GrowthError) as error:
        work(target)
    assert "\n" not in str(error.value)
    assert (victim / "thesis.tex").read_text() == "years of work"


def test_a_target_has_one_writer_whatever_it_does(target):
    """The message names the work of the one that was first."""
    who = rf"process {os.getpid()} on \S+ is exporting it now"
    with Workplace(target, "exporting", lambda directory: False):
        with pytest.raises(GrowthError, match=who):
            Workplace(target, "growing", lambda directory: False)
        with pytest.raises(GrowthError, match=who), locked(target, "training in"):
            pass
    with locked(target, "training in"), pytest.raises(GrowthError, match="is training in it now"):
        Workplace(target, "growing", lambda directory: False)


def test_where_nobody_may_write_beside_it_the_lock_is_inside(tmp_path, monkeypatch):
    """As for a mounted volume; root may write anywhere, so the system is asked in its place."""
    (tmp_path / "volume").mkdir()
    system, refused = os.open, os.fspath(tmp_path / ".volume.lock")

    def denied(path, *given, **named):
        if os.fspath(path) == refused:
            raise PermissionError(errno.EACCES, "Permission denied")
        return system(path, *given, **named)

    monkeypatch.setattr(os, "open", denied)
    with locked(tmp_path / "volume", "training in"):
        assert names(tmp_path / "volume") == [".lock"]
        with pytest.raises(GrowthError, match="is training in it"), locked(tmp_path / "volume", ""):
            pass
    assert names(tmp_path / "volume") == []


# ----------------------------------------------------------------- what is kept


@pytest.mark.parametrize(
    "error, lines, kept",
    [(KeyboardInterrupt, 2, True), (KeyboardInterrupt, 1, False), (GrowthError, 2, False)],
)
def test_unfinished_work_is_kept_if_there_is_any(target, error, lines, kept):
    with pytest.raises(error), Workplace(target, "making", may_replace) as place:
        (place.open_new() / "mark").write_text("half")
        place.journal.write_text("line\n" * lines)
        raise error
    assert (target.parent / ".target.making").exists() == kept
    if kept:
        # an error that a repeat would give again does not cost what was found
        with pytest.raises(GrowthError), Workplace(target, "making", may_replace) as place:
            raise GrowthError
        assert (target.parent / ".target.making" / "new" / "mark").exists()


def test_the_disk_fails_in_one_line(target):
    message = f"{target}: No space left on device; nothing was changed"
    with pytest.raises(GrowthError, match=message), Workplace(target, "making", may_replace):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    message = f"{target}: No space left on device; finished work is kept in .*; repeat the run"
    with pytest.raises(GrowthError, match=message), Workplace(target, "making", may_replace) as p:
        p.journal.write_text("line\n" * 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
