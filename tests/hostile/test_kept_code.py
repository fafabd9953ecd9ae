"""Compiled code that is found on the disk: planted by somebody else, or damaged. Neither may run, and neither ends a kernel."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from fusion_advisor.codegen.common.interface import Header, KernelBuildFailed, Rendered, Tuning
from fusion_advisor.codegen.cpp.backend import CppBackend, find_compiler
from fusion_advisor.files import private_folder
from fusion_advisor.files.kept_code import KeptCode
from fusion_advisor.files.private_folder import cache_folder, why_not_private
from tests.kernel_cases.programs import gelu_tanh

HEADER = Header(title="chain", summary="A test.", origin="test")
PROGRAM = gelu_tanh((64,))
pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def places(monkeypatch, tmp_path):
    """A cache and a temporary directory of this test's own."""
    (tmp_path / "tmp").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    private_folder._say_once.cache_clear()
    private_folder._of_this_process.cache_clear()
    yield
    private_folder._of_this_process.cache_clear()


def rendered() -> Rendered:
    return CppBackend().render(PROGRAM, HEADER, tuning=Tuning(), fast_math=False)


def build(tmp_path):
    return CppBackend().build(rendered(), tmp_path / "run" / "k.cpp")


def gives_the_right_numbers(kernel) -> bool:
    inputs = torch.linspace(-3, 3, 64), torch.empty(64)
    kernel.bind(PROGRAM)(*inputs)
    return bool(torch.allclose(inputs[1], torch.nn.functional.gelu(inputs[0], approximate="tanh"), atol=1e-6))


def plant(library: Path, marker: Path) -> None:
    """Write a library whose constructor leaves a marker, as another user would."""
    source = library.with_suffix(".c")
    source.write_text(
        f'#include <stdio.h>\n__attribute__((constructor)) static void ran(void) {{ fclose(fopen("{marker}", "w")); }}\n'
        f"void {rendered().entry}(void) {{}}\n"
    )
    subprocess.run([find_compiler()[0], "-x", "c", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    source.unlink()


def as_user(monkeypatch, uid: int) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)


# -- folders that others can change ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o733])
@pytest.mark.parametrize("place", ["cache/fusion-advisor/cpp", "cache/fusion-advisor", "cache"])
def test_a_library_in_a_folder_that_others_write_to_does_not_run(tmp_path, place, mode, caplog):
    library = build(tmp_path).library
    plant(library, tmp_path / "ran")
    digest = subprocess.run(["sha256sum", library], capture_output=True, text=True, check=True).stdout[:32]
    planted = library.with_name(f"{library.name.partition('.')[0]}.{digest}.so")  # whoever writes here can compute a digest too
    library.rename(planted)
    shutil.copytree(tmp_path / "cache", tmp_path / "other")
    (tmp_path / place).chmod(mode)
    if mode & stat.S_ISVTX and place == "cache":
        pytest.skip("a sticky folder above is as good as /tmp")
    with caplog.at_level(logging.WARNING, "fusion_advisor"):
        kernel = build(tmp_path)
    assert not (tmp_path / "ran").exists()
    assert not kernel.library.is_relative_to(tmp_path / "cache")
    assert gives_the_right_numbers(kernel)
    assert f"{tmp_path / 'cache/fusion-advisor/cpp'} is not used as a cache: others may" in caplog.text


def test_the_marker_is_written_where_the_folder_is_trusted(tmp_path):
    """The test above would pass with a library that marks nothing."""
    library = build(tmp_path).library
    plant(library, tmp_path / "ran")
    digest = subprocess.run(["sha256sum", library], capture_output=True, text=True, check=True).stdout[:32]
    library.rename(library.with_name(f"{library.name.partition('.')[0]}.{digest}.so"))
    build(tmp_path)
    assert (tmp_path / "ran").exists()


def test_a_folder_of_another_user_is_passed_over(tmp_path, monkeypatch, caplog):
    folder = cache_folder("cpp")
    assert folder == tmp_path / "cache" / "fusion-advisor" / "cpp"
    as_user(monkeypatch, os.geteuid() + 1)  # for this process everything here now belongs to somebody else
    found = cache_folder("cpp")
    assert found.is_relative_to(tmp_path / "tmp")
    assert not found.name.startswith("fusion-advisor-")
    assert f"belongs to user {os.getuid()}" in caplog.text


@pytest.mark.parametrize("depth", ["fusion-advisor", "fusion-advisor/cpp"])
def test_a_link_is_not_followed(tmp_path, depth, caplog):
    (tmp_path / "elsewhere" / "cpp").mkdir(parents=True, mode=0o700)
    place = tmp_path / "cache" / depth
    place.parent.mkdir(parents=True, mode=0o700)
    place.symlink_to(tmp_path / "elsewhere")
    assert cache_folder("cpp").is_relative_to(tmp_path / "tmp")
    assert "is a symbolic link" in caplog.text


def test_the_order_of_places(tmp_path, monkeypatch):
    user = os.geteuid()
    assert cache_folder("cpp") == tmp_path / "cache" / "fusion-advisor" / "cpp"
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("no folder")
    second = cache_folder("cpp")
    assert second == tmp_path / "tmp" / f"fusion-advisor-{user}" / "cpp"
    for place in (second, second.parent):
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
    second.parent.chmod(0o777)
    third = cache_folder("cpp")
    assert third.parent.parent == tmp_path / "tmp"
    assert third.parent != second.parent
    assert cache_folder("cpp") == third, "one process has one"
    assert stat.S_IMODE(third.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_a_new_folder_is_private_whatever_the_umask(umask):
    before = os.umask(umask)
    try:
        folder = cache_folder("cpp")
    finally:
        os.umask(before)
    for place in (folder, folder.parent):
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert why_not_private(folder) == ""


def test_a_readable_folder_of_an_older_version_is_made_private(tmp_path):
    folder = tmp_path / "cache" / "fusion-advisor" / "cpp"
    folder.mkdir(parents=True)
    for place in (folder, folder.parent):
        place.chmod(0o755)
    assert cache_folder("cpp") == folder
    assert {stat.S_IMODE(place.stat().st_mode) for place in (folder, folder.parent)} == {0o700}


def test_a_relative_cache_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder("cpp") == tmp_path / "home" / ".cache" / "fusion-advisor" / "cpp"


def test_the_folder_of_a_process_goes_with_it(tmp_path):
    code = (
        "import os, tempfile; tempfile.tempdir = os.environ['THERE']\n"
        "os.geteuid = lambda: 12345\n"
        "from fusion_advisor.files.private_folder import cache_folder\n"
        "here = cache_folder('cpp'); assert here.is_dir()\n"
        "child = os.fork()\n"
        "if not child: raise SystemExit\n"
        "os.waitpid(child, 0); assert here.is_dir(), 'the child took it away'\n"
    )
    there = tmp_path / "tmp"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "THERE": str(there)})
    assert [path for path in there.glob("fusion-advisor-*") if path.name != "fusion-advisor-12345"] == []


# -- damaged files -----------------------------------------------------------------------------------------------------------


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def zeroed(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:4096] + bytes(len(content) - 4096))  # a file system that lost all but the first block


def one_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("")


def a_link(path: Path) -> None:
    path.rename(path.with_suffix(".away"))
    path.symlink_to(path.with_suffix(".away"))


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent / "nowhere")


def without_the_symbol(path: Path) -> None:
    source = path.with_suffix(".c")
    source.write_text("int other(void) { return 1; }\n")
    subprocess.run([find_compiler()[0], "-x", "c", "-shared", "-fPIC", str(source), "-o", str(path)], check=True)


def of_another_machine(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[18:20] = (0xF3).to_bytes(2, "little")  # e_machine: RISC-V
    path.write_bytes(content)


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""), "text": lambda path: path.write_text("hello"), "truncated": truncated,
    "zeroed": zeroed, "one bit": one_bit, "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"), "folder": a_folder,
    "link": a_link, "pipe": a_pipe, "dangling link": a_dangling_link, "no symbol": without_the_symbol,
    "other machine": of_another_machine,
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_built_again(tmp_path, damage, caplog):
    library = build(tmp_path).library
    # In another process: this one has the library loaded, and must not see its pages change.
    shutil.copy(library, tmp_path / "copy")
    library.unlink()
    shutil.copy(tmp_path / "copy", library)
    DAMAGES[damage](library)
    with caplog.at_level(logging.WARNING, "fusion_advisor"):
        kernel = build(tmp_path)
    assert gives_the_right_numbers(kernel)
    assert "is damaged (" in caplog.text
    assert "is built again" in caplog.text
    assert kernel.library.read_bytes() == (tmp_path / "copy").read_bytes()
    caplog.clear()
    assert gives_the_right_numbers(build(tmp_path))
    assert not caplog.text


@pytest.mark.parametrize(
    "damage", ["zeroed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("truncated", "no symbol", "other machine"))]
)
def test_a_damaged_library_with_a_fitting_digest_does_not_end_a_fresh_process(tmp_path, damage):
    """``dlopen`` refuses some of what a digest would pass: a library that was built for another machine, say."""
    if damage in ("truncated", "zeroed"):  # what the digest is there for: such a file must not reach the loader
        library = build(tmp_path).library
        DAMAGES[damage](library)
    else:
        library = build(tmp_path).library
        content = tmp_path / "damaged.so"
        shutil.copy(library, content)
        DAMAGES[damage](content)
        key = library.name.partition(".")[0]
        library.unlink()
        KeptCode(folder=library.parent, suffix=".so").keep(key, content)
    code = (
        "import sys; from pathlib import Path; from tests.hostile.test_kept_code import build, gives_the_right_numbers\n"
        "assert gives_the_right_numbers(build(Path(sys.argv[1])))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_compiler_that_builds_no_library_is_said_once_and_not_for_ever(tmp_path, monkeypatch):
    """The second build fails as the first: an error with its cause. Mend the compiler, and the kernel is there again."""
    monkeypatch.setenv("CXX", str(tmp_path / "liar"))
    (tmp_path / "liar").write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; echo nonsense > "$2"\n')
    (tmp_path / "liar").chmod(0o700)
    with pytest.raises(KernelBuildFailed, match=r"invalid ELF header|file too short"):
        build(tmp_path)
    monkeypatch.delenv("CXX")
    assert gives_the_right_numbers(build(tmp_path))


def test_the_key_holds_the_compiler_its_flags_and_the_cpu(tmp_path, monkeypatch):
    from fusion_advisor.codegen.cpp import backend

    first = build(tmp_path).library
    monkeypatch.setattr(backend, "compiler_identity", lambda compiler: "another CPU")
    other = build(tmp_path).library
    assert first.name.partition(".")[0] != other.name.partition(".")[0]
    monkeypatch.undo()
    line = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))), "")
    assert line in backend.compiler_identity(find_compiler()), "-march=native means these"


BUILDS = (
    "import sys; from pathlib import Path; from tests.hostile.test_kept_code import build, gives_the_right_numbers\n"
    "assert gives_the_right_numbers(build(Path(sys.argv[1])))\n"
)


@pytest.mark.slow
def test_processes_build_side_by_side(tmp_path):
    jobs = [subprocess.Popen([sys.executable, "-c", BUILDS, str(tmp_path / str(number))]) for number in range(2)]
    assert [job.wait(timeout=120) for job in jobs] == [0, 0]
    names = [path.name for path in (tmp_path / "cache/fusion-advisor/cpp").iterdir()]
    assert len({name.partition(".")[0] for name in names}) == 1


def test_a_builder_that_is_killed_leaves_nothing_in_the_way(tmp_path, monkeypatch):
    folder = cache_folder("cpp")
    slow = tmp_path / "slow"
    slow.write_text(f'#!/bin/sh\ncase "$*" in *--version*) ;; *) touch {tmp_path}/begun; sleep 60;; esac\nexec c++ "$@"\n')
    slow.chmod(0o700)
    job = subprocess.Popen(
        [sys.executable, "-c", BUILDS, str(tmp_path)], env={**os.environ, "CXX": str(slow)}, start_new_session=True
    )
    try:
        while not (tmp_path / "begun").exists():
            assert job.poll() is None
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    (left,) = folder.iterdir()
    assert left.name.startswith(".")
    assert gives_the_right_numbers(build(tmp_path))
    assert left.exists(), "another process may still be building into it"
    os.utime(left, (0, 0))
    KeptCode(folder=folder, suffix=".so").temporary().unlink()
    assert not left.exists()


def test_a_full_disk_is_an_error_of_the_build(tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "mkstemp", full)
        with pytest.raises(KernelBuildFailed, match="No space left"):
            build(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(KeptCode, "keep", full)
        with pytest.raises(KernelBuildFailed, match="No space left"):
            build(tmp_path)
    assert [path for path in cache_folder("cpp").iterdir() if path.name.startswith(".")] == []
    assert gives_the_right_numbers(build(tmp_path))
