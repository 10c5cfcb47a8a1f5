"""Files that are written whole or not at all, whatever fails and whenever the process is killed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from processes import own_environment
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.files import alone, cache_folder, whole_file, whole_folder


def write(path: Path, text: str) -> None:
    with whole_file(path, "choose another place") as fresh:
        fresh.write_text(text, encoding="utf-8")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("step", ["os.open", "os.fsync", "pathlib.Path.replace", "pathlib.Path.write_text"])
def test_a_failure_at_any_step_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "file"
    write(path, "old")

    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(step, full)
        with pytest.raises(LoadError, match=r"cannot write .*file: No space left on device; choose another place"):
            write(path, "new")
    assert path.read_text(encoding="utf-8") == "old" and names(tmp_path) == ["file"]


def test_content_is_on_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("sync"), real(handle))[1])
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, to: (done.append("rename"), replace(self, to))[1])
    write(tmp_path / "file", "new")
    assert done == ["sync", "rename", "sync"]  # and then the name itself


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), whole_file(tmp_path / "file", "") as fresh:
        fresh.write_text("half", encoding="utf-8")
        raise KeyboardInterrupt
    assert not names(tmp_path)


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom sakiyomi.core.files import whole_file\n"
        "with whole_file(Path(sys.argv[1]), '') as fresh:\n"
        "    fresh.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = own_environment()
    path = tmp_path / "file[1]"  # which a pattern would take for something else
    write(path, "old")
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code, str(path)], env=environment, timeout=60, check=False)
        assert done.returncode == -signal.SIGKILL
        assert path.read_text(encoding="utf-8") == "old"
    assert len(names(tmp_path)) == 2
    with whole_file(path, "") as fresh:
        other = tmp_path / f".{path.name}.{os.getpid()}.other.partial"
        other.write_text("of a process that is alive", encoding="utf-8")
        fresh.write_text("new", encoding="utf-8")
    assert names(tmp_path) == sorted([path.name, other.name]) and path.read_text(encoding="utf-8") == "new"


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    place = tmp_path / "new" / "folder"
    for failure in (KeyboardInterrupt, OSError(errno.ENOSPC, "full")):
        with pytest.raises((KeyboardInterrupt, LoadError)), whole_folder(place, "choose another place") as fresh:
            (fresh / "one").write_text("half", encoding="utf-8")
            raise failure
        assert list(place.parent.iterdir()) == []
    left = subprocess.Popen([sys.executable, "-c", ""])
    left.wait()
    (place.parent / f".folder.{left.pid}.0.partial").mkdir()  # of a killed writer
    place.mkdir()
    with whole_folder(place, "") as fresh:
        (fresh / "one").write_text("whole", encoding="utf-8")
        assert list(place.iterdir()) == []
    assert list(place.parent.iterdir()) == [place]
    assert [path.read_text(encoding="utf-8") for path in place.iterdir()] == ["whole"]
    with (
        pytest.raises(LoadError, match=r"cannot write .*choose another"),
        whole_folder(place, "choose another") as fresh,
    ):
        (fresh / "one").touch()  # the place is taken
    assert list(place.parent.iterdir()) == [place]
    assert (place / "one").read_text(encoding="utf-8") == "whole"


def test_a_private_file_is_private_from_its_first_byte_on(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with whole_file(tmp_path / "file", "", private=True) as fresh:
            assert fresh.stat().st_mode & 0o777 == 0o600
            fresh.write_bytes(b"prompt")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


# ---------------------------------------------------------------- where caches are


@pytest.mark.parametrize("home", ["file", "nowhere", "locked"])
def test_a_home_that_cannot_be_written_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, home: str
) -> None:
    """Without kernels everything would be many times slower, in every container whose files are read-only."""
    (tmp_path / "file").touch()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "locked" not in str(path) and real(path, mode))
    (tmp_path / "locked").mkdir()
    monkeypatch.delenv("SAKIYOMI_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "x" if home == "nowhere" else tmp_path / home))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with caplog.at_level("WARNING", "sakiyomi"):
        assert cache_folder() == cache_folder() == tmp_path / f"sakiyomi-{os.getuid()}"
    assert len(caplog.messages) == 1 and "set SAKIYOMI_CACHE_DIR" in caplog.messages[0]
    monkeypatch.setenv("HOME", str(tmp_path / "good"))
    assert cache_folder() == tmp_path / "good" / ".cache" / "sakiyomi" and not (tmp_path / "good").exists()


@pytest.mark.parametrize("trap", ["open", "link"])
def test_nobody_else_can_put_code_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("SAKIYOMI_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    usual = tmp_path / f"sakiyomi-{os.getuid()}"
    if trap == "open":
        usual.mkdir()
        usual.chmod(0o777)
    else:
        (tmp_path / "theirs").mkdir()
        usual.symlink_to(tmp_path / "theirs")
    found = cache_folder()
    assert found != usual and found.parent == tmp_path and found.stat().st_mode & 0o077 == 0


def test_a_lock_that_cannot_be_had_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks, and a folder that cannot be written, do not count as a lock."""
    fcntl = pytest.importorskip("fcntl")

    def flock(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with alone(tmp_path, "busy"), pytest.raises(InputError, match="busy"), alone(tmp_path, "busy"):
        pass
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(InputError, match="busy"), alone(tmp_path, "busy"):
        pass
    with alone(tmp_path):
        pass
    (tmp_path / "below" / "lock").mkdir(parents=True)
    with pytest.raises(LoadError, match="choose another output"), alone(tmp_path / "below", "busy"):
        pass
