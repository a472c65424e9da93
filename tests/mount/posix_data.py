"""POSIX cases on the content of one file: reading, writing, truncation, appends, mapping, locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import subprocess
import sys
from pathlib import Path

from tests.mount.posix_support import (
    MIB,
    Child,
    case,
    errno_of,
    fallocate,
    in_child,
    opened,
    pattern,
    read_at,
    refused,
)

RW_NEW = os.O_RDWR | os.O_CREAT
PAGE = 4096
FUSE_MAX_WRITE = 128 * 1024


@case()
def case_create_write_read(root: Path) -> None:
    path = root / "f"
    with opened(path, os.O_WRONLY | os.O_CREAT) as fd:
        assert os.write(fd, b"hello\n") == 6
    assert read_at(path) == b"hello\n"
    assert path.stat().st_size == 6
    assert os.listdir(root) == ["f"]


@case()
def case_create_exclusive(root: Path) -> None:
    path = root / "f"
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        os.write(fd, b"first")
    with refused(errno.EEXIST):
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    assert read_at(path) == b"first"


@case()
def case_create_exclusive_on_a_dangling_symlink(root: Path) -> None:
    (root / "link").symlink_to("nowhere")
    with refused(errno.EEXIST):
        os.open(root / "link", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with opened(root / "link", os.O_WRONLY | os.O_CREAT) as fd:
        os.write(fd, b"through the link")
    assert read_at(root / "nowhere") == b"through the link"


@case()
def case_create_exclusive_race_has_one_winner(root: Path) -> None:
    gate_r, gate_w = os.pipe()

    def contend() -> None:
        os.close(gate_w)
        os.read(gate_r, 1)
        with contextlib.suppress(FileExistsError), opened(root / "lock", os.O_WRONLY | os.O_CREAT | os.O_EXCL):
            with opened(root / f"won-{os.getpid()}", os.O_WRONLY | os.O_CREAT):
                pass

    children = [Child(contend) for _ in range(6)]
    os.close(gate_w)
    os.close(gate_r)
    for child in children:
        child.wait()
    assert len([name for name in os.listdir(root) if name.startswith("won-")]) == 1


@case()
def case_create_with_a_read_only_mode(root: Path) -> None:
    # open(2): the mode applies to later opens; git and tar write 0444 files through the creating handle.
    path = root / "f"
    with opened(path, RW_NEW | os.O_EXCL, 0o444) as fd:
        os.write(fd, b"object")
        assert os.pread(fd, 100, 0) == b"object"
    assert path.stat().st_mode & 0o7777 == 0o444
    assert read_at(path) == b"object"


@case()
def case_truncate_on_open(root: Path) -> None:
    path = root / "f"
    path.write_bytes(b"long old content")
    with opened(path, os.O_WRONLY | os.O_TRUNC) as fd:
        assert os.fstat(fd).st_size == 0
        assert path.stat().st_size == 0
        os.write(fd, b"new")
    assert read_at(path) == b"new"


@case()
def case_truncate_on_open_twice_without_writing(root: Path) -> None:
    path = root / "f"
    path.write_bytes(b"content")
    for _ in range(2):
        os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
    assert read_at(path) == b""
    assert path.stat().st_size == 0


@case()
def case_empty_file(root: Path) -> None:
    path = root / "f"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
    assert read_at(path) == b""
    assert path.stat().st_size == 0
    os.rename(path, root / "g")
    assert read_at(root / "g") == b""


@case()
def case_open_errnos(root: Path) -> None:
    (root / "file").write_bytes(b"")
    (root / "dir").mkdir()
    with refused(errno.ENOENT):
        os.open(root / "missing", os.O_RDONLY)
    with refused(errno.ENOENT):
        os.open(root / "missing" / "f", os.O_WRONLY | os.O_CREAT)
    with refused(errno.ENOTDIR):
        os.open(root / "file" / "f", os.O_WRONLY | os.O_CREAT)
    with refused(errno.EISDIR):
        os.open(root / "dir", os.O_WRONLY)
    with refused(errno.EISDIR):
        os.open(root / "dir", os.O_RDWR | os.O_CREAT)
    with refused(errno.ENOTDIR):
        os.open(root / "file", os.O_RDONLY | os.O_DIRECTORY)
    os.close(os.open(root / "dir", os.O_RDONLY | os.O_DIRECTORY))


@case()
def case_wrong_direction_is_ebadf(root: Path) -> None:
    path = root / "f"
    path.write_bytes(b"abc")
    with opened(path, os.O_RDONLY) as fd:
        with refused(errno.EBADF):
            os.write(fd, b"x")
        with refused(errno.EBADF, errno.EINVAL):
            os.ftruncate(fd, 0)
    with opened(path, os.O_WRONLY) as fd, refused(errno.EBADF):
        os.read(fd, 1)
    with opened(root, os.O_RDONLY) as fd, refused(errno.EISDIR):
        os.read(fd, 1)
    assert read_at(path) == b"abc"


@case()
def case_append_handles_interleave(root: Path) -> None:
    path = root / "log"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    with opened(path, flags) as one, opened(path, flags) as two:
        for i in range(50):
            os.write(one, b"one %02d\n" % i)
            os.write(two, b"two %02d\n" % i)
    expected = b"".join(b"one %02d\ntwo %02d\n" % (i, i) for i in range(50))
    assert read_at(path) == expected


@case()
def case_append_ignores_the_position(root: Path) -> None:
    path = root / "f"
    path.write_bytes(b"start ")
    with opened(path, os.O_RDWR | os.O_APPEND) as fd:
        os.lseek(fd, 0, os.SEEK_SET)
        os.write(fd, b"end")
        # Linux appends on pwrite too, see pwrite(2) under BUGS.
        os.pwrite(fd, b"!", 0)
        assert os.pread(fd, 100, 0) == b"start end!"
        assert os.lseek(fd, 0, os.SEEK_CUR) == 9
    assert read_at(path) == b"start end!"


@case()
def case_append_after_a_truncate_elsewhere(root: Path) -> None:
    path = root / "f"
    path.write_bytes(b"old old old")
    with opened(path, os.O_WRONLY | os.O_APPEND) as fd:
        os.write(fd, b" more")
        os.truncate(path, 3)
        os.write(fd, b"+new")
        assert path.stat().st_size == 7
    assert read_at(path) == b"old+new"


@case()
def case_append_from_four_processes(root: Path) -> None:
    path = root / "log"

    def work(who: int) -> None:
        for i in range(40):
            with opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as fd:
                os.write(fd, b"%d %d\n" % (who, i))

    children = [Child(lambda who=n: work(who)) for n in range(4)]  # type: ignore[misc]
    for child in children:
        child.wait()
    lines = read_at(path).splitlines()
    assert sorted(lines) == sorted(b"%d %d" % (who, i) for who in range(4) for i in range(40))


@case()
def case_read_and_write_at_offsets(root: Path) -> None:
    path = root / "f"
    model = bytearray(pattern(300_000))
    path.write_bytes(bytes(model))
    with opened(path, os.O_RDWR) as fd:
        for offset, size in ((0, 1), (1, 4095), (4095, 2), (4096, 4096), (131071, 2), (131072, 70_000), (299_999, 1)):
            piece = pattern(size, seed=offset % 200 + 1)
            assert os.pwrite(fd, piece, offset) == size
            model[offset : offset + size] = piece
            assert os.pread(fd, size + 10, max(0, offset - 5)) == bytes(model[max(0, offset - 5) :][: size + 10])
        assert os.pread(fd, 10, 300_000) == b""
        assert os.pread(fd, 10, 10 * MIB) == b""
        assert os.lseek(fd, 0, os.SEEK_CUR) == 0
    assert read_at(path) == bytes(model)


@case()
def case_write_across_page_and_request_boundaries(root: Path) -> None:
    for size in (PAGE - 1, PAGE, PAGE + 1, FUSE_MAX_WRITE - 1, FUSE_MAX_WRITE, FUSE_MAX_WRITE + 1, MIB, 3 * MIB + 7):
        path = root / f"f{size}"
        data = pattern(size)
        path.write_bytes(data)
        assert path.stat().st_size == size
        assert read_at(path) == data, size


@case()
def case_vectored_io(root: Path) -> None:
    with opened(root / "f", RW_NEW) as fd:
        assert os.writev(fd, [b"ab", b"", b"cde"]) == 5
        assert os.pwritev(fd, [b"X", b"Y"], 1) == 2
        first, second = bytearray(2), bytearray(8)
        assert os.preadv(fd, [first, second], 0) == 5
    assert bytes(first) == b"aX"
    assert bytes(second[:3]) == b"Yde"


@case()
def case_sparse_file(root: Path) -> None:
    path = root / "f"
    with opened(path, RW_NEW) as fd:
        os.pwrite(fd, b"end", 5 * MIB)
        os.pwrite(fd, b"start", 0)
        assert os.fstat(fd).st_size == 5 * MIB + 3
        assert os.pread(fd, 8, 3) == b"rt" + bytes(6)
    data = read_at(path)
    assert data[:5] == b"start" and data[-3:] == b"end" and not any(data[5:-3])


@case()
def case_truncate_by_path(root: Path) -> None:
    path = root / "f"
    path.write_bytes(pattern(10_000))
    os.truncate(path, 4097)
    assert read_at(path) == pattern(10_000)[:4097]
    os.truncate(path, 9000)
    assert path.stat().st_size == 9000
    assert read_at(path) == pattern(10_000)[:4097] + bytes(9000 - 4097)
    os.truncate(path, 0)
    assert read_at(path) == b""
    with refused(errno.EINVAL):
        os.truncate(path, -1)
    with refused(errno.EISDIR):
        os.truncate(root, 0)
    with refused(errno.ENOENT):
        os.truncate(root / "missing", 0)


@case()
def case_truncate_by_handle(root: Path) -> None:
    path = root / "f"
    with opened(path, RW_NEW) as fd:
        os.write(fd, pattern(6000))
        os.ftruncate(fd, 100)
        assert path.stat().st_size == 100
        os.ftruncate(fd, 5000)
        assert os.pread(fd, 6000, 0) == pattern(6000)[:100] + bytes(4900)
        # The position stays beyond the end that the truncates left: what lies between becomes zeros.
        os.write(fd, b"tail")
    assert read_at(path) == pattern(6000)[:100] + bytes(5900) + b"tail"


@case()
def case_truncate_never_brings_bytes_back(root: Path) -> None:
    path = root / "f"
    path.write_bytes(b"secret" * 2000)
    with opened(path, os.O_RDWR) as fd:
        os.ftruncate(fd, 3)
        os.ftruncate(fd, 12_000)
        assert os.pread(fd, 12_000, 0) == b"sec" + bytes(11_997)
        os.ftruncate(fd, 2)
        os.pwrite(fd, b"!", 6000)
    assert read_at(path) == b"se" + bytes(5998) + b"!"


@case()
def case_fsync(root: Path) -> None:
    path = root / "f"
    with opened(path, RW_NEW) as fd:
        os.write(fd, b"abc")
        os.fsync(fd)
        os.write(fd, b"def")
        os.fdatasync(fd)
        os.fsync(fd)
    assert read_at(path) == b"abcdef"
    with opened(root, os.O_RDONLY) as fd:
        os.fsync(fd)


@case()
def case_writes_show_through_other_handles_at_once(root: Path) -> None:
    path = root / "f"
    path.write_bytes(b"0123456789")
    with opened(path, os.O_RDWR) as writer, opened(path, os.O_RDONLY) as reader:
        os.pwrite(writer, b"abc", 3)
        assert os.pread(reader, 20, 0) == b"012abc6789"
        assert read_at(path) == b"012abc6789"
        os.pwrite(writer, b"tail", 10)
        assert path.stat().st_size == 14
        assert os.fstat(reader).st_size == 14

        def other_process() -> None:
            assert read_at(path) == b"012abc6789tail"
            with opened(path, os.O_WRONLY) as fd:
                os.pwrite(fd, b"Z", 0)

        in_child(other_process)
        assert os.pread(reader, 1, 0) == b"Z"
        assert os.pread(writer, 1, 0) == b"Z"
    assert read_at(path) == b"Z12abc6789tail"


@case()
def case_two_processes_write_parts_of_one_file(root: Path) -> None:
    path = root / "f"
    path.write_bytes(bytes(8000))

    def work(part: int) -> None:
        with opened(path, os.O_WRONLY) as fd:
            for i in range(100):
                os.pwrite(fd, bytes([part + 1]) * 10, part * 2000 + i * 10)

    children = [Child(lambda part=n: work(part)) for n in range(4)]  # type: ignore[misc]
    for child in children:
        child.wait()
    assert read_at(path) == b"".join(bytes([n + 1]) * 1000 + bytes(1000) for n in range(4))


@case()
def case_duplicated_descriptor_shares_the_position(root: Path) -> None:
    path = root / "f"
    with opened(path, RW_NEW) as fd:
        twin = os.dup(fd)
        os.write(fd, b"one")
        os.write(twin, b"two")
        os.close(twin)
        os.write(fd, b"three")
    assert read_at(path) == b"onetwothree"


@case()
def case_inherited_descriptor_shares_the_position(root: Path) -> None:
    path = root / "f"
    with opened(path, RW_NEW) as fd:
        os.write(fd, b"parent ")
        in_child(lambda: os.write(fd, b"child "))
        os.write(fd, b"parent again")
    assert read_at(path) == b"parent child parent again"


@case()
def case_close_by_a_child_does_not_end_the_handle(root: Path) -> None:
    path = root / "f"
    with opened(path, RW_NEW) as fd:
        for i in range(3):
            in_child(lambda: os.close(fd))
            os.write(fd, b"%d" % i)
    assert read_at(path) == b"012"


@case()
def case_shell_redirections(root: Path) -> None:
    # bash opens, dup2()s and closes: a flush before the first write.
    script = "{ echo a; echo b; } > f; echo c >> f; cat f > g; : > empty; exec 3<>f; read -u 3 x; echo X >&3; exec 3>&-"
    subprocess.run(["bash", "-ec", script], cwd=root, check=True)
    assert read_at(root / "f") == b"a\nX\nc\n"
    assert read_at(root / "g") == b"a\nb\nc\n"
    assert read_at(root / "empty") == b""


@case()
def case_many_open_descriptors(root: Path) -> None:
    with contextlib.ExitStack() as stack:
        fds = [stack.enter_context(opened(root / f"f{i}", RW_NEW)) for i in range(300)]
        same = [stack.enter_context(opened(root / "f0", os.O_RDONLY)) for _ in range(100)]
        for i, fd in enumerate(fds):
            os.write(fd, b"%d" % i)
        assert [os.pread(fd, 9, 0) for fd in fds] == [b"%d" % i for i in range(300)]
        assert {os.pread(fd, 9, 0) for fd in same} == {b"0"}
    assert read_at(root / "f299") == b"299"


@case()
def case_binary_content(root: Path) -> None:
    contents = {
        "all": bytes(range(256)) * 17,
        "nul": b"\0",
        "nul-in-text": b"before\0after\n",
        "invalid-utf8": b"caf\xe9 \xff\xfe\x80\xc0\xaf",
        "surrogate": b"\xed\xa0\x80",
        "cut-character": "abc€".encode()[:-1],
        "beyond-unicode": b"\xf4\x90\x80\x80",
        "bom": "\ufeffx".encode(),
        "crlf": b"a\r\nb\rc\n",
        "backslashes": rb"\x41\000\\",
        "utf8": "naïve 漢字 🎉 \U0010ffff e\u0301".encode(),
    }
    for name, data in contents.items():
        (root / name).write_bytes(data)
    for name, data in contents.items():
        assert read_at(root / name) == data, name
        assert (root / name).stat().st_size == len(data), name


@case()
def case_text_becomes_binary_and_text_again(root: Path) -> None:
    path = root / "f"
    for data in (b"text\n", b"\xff\x00", b"text again\n", b""):
        path.write_bytes(data)
        assert read_at(path) == data


@case()
def case_append_completes_a_cut_character(root: Path) -> None:
    path = root / "f"
    whole = "€uro\n".encode()
    for i in range(len(whole)):
        with opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as fd:
            os.write(fd, whole[i : i + 1])
        assert read_at(path) == whole[: i + 1]
    with opened(path, os.O_WRONLY | os.O_APPEND) as fd:
        os.write(fd, b"\0\xff")
    assert read_at(path) == whole + b"\0\xff"


@case()
def case_mmap_shared(root: Path) -> None:
    path = root / "f"
    path.write_bytes(bytes(3 * PAGE))
    with opened(path, os.O_RDWR) as fd, mmap.mmap(fd, 3 * PAGE) as view:
        view[10:15] = b"store"
        view[2 * PAGE : 2 * PAGE + 3] = b"two"
        assert os.pread(fd, 5, 10) == b"store"
        view.flush()
        os.pwrite(fd, b"write", 100)
        assert view[100:105] == b"write"
    data = read_at(path)
    assert data[10:15] == b"store" and data[2 * PAGE : 2 * PAGE + 3] == b"two" and data[100:105] == b"write"
    assert len(data) == 3 * PAGE


@case()
def case_mmap_shared_by_two_processes(root: Path) -> None:
    path = root / "f"
    path.write_bytes(bytes(PAGE))
    with opened(path, os.O_RDWR) as fd, mmap.mmap(fd, PAGE) as view:

        def other_process() -> None:
            with opened(path, os.O_RDWR) as inner, mmap.mmap(inner, PAGE) as mine:
                assert mine[0:4] == b"ping"
                mine[8:12] = b"pong"
                mine.flush()

        view[0:4] = b"ping"
        in_child(other_process)
        assert view[8:12] == b"pong"
    assert read_at(path)[:12] == b"ping" + bytes(4) + b"pong"


@case()
def case_mmap_stores_after_close(root: Path) -> None:
    path = root / "f"
    path.write_bytes(bytes(PAGE))
    fd = os.open(path, os.O_RDWR)
    view = mmap.mmap(fd, PAGE)
    os.close(fd)
    view[0:5] = b"later"
    view.flush()
    view[5:6] = b"!"
    view.close()
    assert read_at(path)[:6] == b"later!"


@case()
def case_mmap_private(root: Path) -> None:
    path = root / "f"
    path.write_bytes(b"original" + bytes(100))
    with opened(path, os.O_RDWR) as fd, mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE) as view:
        view[0:8] = b"scratch!"
        assert view[0:8] == b"scratch!"
        assert os.pread(fd, 8, 0) == b"original"
    assert read_at(path)[:8] == b"original"


@case()
def case_mmap_of_a_file_that_grows(root: Path) -> None:
    path = root / "f"
    with opened(path, RW_NEW) as fd:
        os.ftruncate(fd, 2 * PAGE)
        with mmap.mmap(fd, 2 * PAGE) as view:
            view[PAGE : PAGE + 4] = b"grow"
            os.pwrite(fd, b"x", 3 * PAGE)
            assert view[PAGE : PAGE + 4] == b"grow"
    assert read_at(path) == bytes(PAGE) + b"grow" + bytes(2 * PAGE - 4) + b"x"


@case()
def case_seek_data_and_hole(root: Path) -> None:
    path = root / "f"
    path.write_bytes(pattern(10_000))
    with opened(path, os.O_RDWR) as fd:
        assert os.lseek(fd, 0, os.SEEK_DATA) == 0
        assert os.lseek(fd, 5000, os.SEEK_DATA) == 5000
        assert os.lseek(fd, 0, os.SEEK_HOLE) == 10_000
        with refused(errno.ENXIO):
            os.lseek(fd, 10_001, os.SEEK_DATA)
        assert os.lseek(fd, -3, os.SEEK_END) == 9997
        assert os.read(fd, 10) == pattern(10_000)[-3:]
        with refused(errno.EINVAL):
            os.lseek(fd, -1, os.SEEK_SET)


@case()
def case_fallocate_works_or_is_not_supported(root: Path) -> None:
    path = root / "f"
    with opened(path, RW_NEW) as fd:
        os.write(fd, b"abc")
        result = errno_of(lambda: fallocate(fd, 0, 0, 5000))
        assert result in (0, errno.EOPNOTSUPP)
        assert os.fstat(fd).st_size == (3 if result else 5000)
        # glibc emulates it where the file system does not offer it.
        os.posix_fallocate(fd, 0, 5000)
        assert os.fstat(fd).st_size == 5000
    assert read_at(path) == b"abc" + bytes(4997)


@case()
def case_copy_file_range(root: Path) -> None:
    (root / "from").write_bytes(pattern(200_000))
    with opened(root / "from", os.O_RDONLY) as source, opened(root / "to", RW_NEW) as target:
        done = 0
        while moved := os.copy_file_range(source, target, 200_000 - done):
            done += moved
            if done == 200_000:
                break
    assert read_at(root / "to") == pattern(200_000)


@case()
def case_sendfile(root: Path) -> None:
    (root / "from").write_bytes(pattern(150_000))
    with opened(root / "from", os.O_RDONLY) as source, opened(root / "to", RW_NEW) as target:
        offset = 0
        while moved := os.sendfile(target, source, offset, 150_000):
            offset += moved
    assert read_at(root / "to") == pattern(150_000)


@case()
def case_splice(root: Path) -> None:
    (root / "from").write_bytes(pattern(50_000))
    end_r, end_w = os.pipe()
    try:
        with opened(root / "from", os.O_RDONLY) as source, opened(root / "to", RW_NEW) as target:
            while moved := os.splice(source, end_w, 32_768):
                while moved:
                    moved -= os.splice(end_r, target, moved)
    finally:
        os.close(end_r)
        os.close(end_w)
    assert read_at(root / "to") == pattern(50_000)


@case()
def case_unnamed_temporary_file(root: Path) -> None:
    def make() -> None:
        with opened(root, os.O_RDWR | os.O_TMPFILE, 0o600) as fd:
            os.write(fd, b"x")
            assert os.fstat(fd).st_nlink == 0

    # The errnos on which callers of O_TMPFILE fall back to a named file, see open(2).
    assert errno_of(make) in (0, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)
    assert os.listdir(root) == []


@case()
def case_flock_between_processes(root: Path) -> None:
    path = root / "lock"
    path.write_bytes(b"")

    def try_shared(expected: bool) -> None:
        with opened(path, os.O_RDONLY) as fd:
            result = errno_of(lambda: fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB))
            assert result == (0 if expected else errno.EWOULDBLOCK)

    with opened(path, os.O_RDONLY) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        in_child(lambda: try_shared(False))
        fcntl.flock(fd, fcntl.LOCK_SH)
        in_child(lambda: try_shared(True))
    in_child(lambda: try_shared(True))


@case()
def case_record_locks_between_processes(root: Path) -> None:
    path = root / "lock"
    path.write_bytes(bytes(100))

    def try_range(start: int, expected: bool) -> None:
        with opened(path, os.O_RDWR) as fd:
            result = errno_of(lambda: fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, start))
            assert result in ((0,) if expected else (errno.EAGAIN, errno.EACCES)), f"bytes {start}.."

    with opened(path, os.O_RDWR) as fd:
        fcntl.lockf(fd, fcntl.LOCK_EX, 10, 0)
        in_child(lambda: try_range(5, False))
        in_child(lambda: try_range(10, True))
        fcntl.lockf(fd, fcntl.LOCK_UN, 10, 0)
        in_child(lambda: try_range(5, True))


@case()
def case_execute_a_program_and_a_script(root: Path) -> None:
    program = Path("/bin/true").resolve().read_bytes()
    (root / "true").write_bytes(program)
    (root / "script").write_text("#!/bin/sh\necho ran $1\n")
    for name in ("true", "script"):
        with refused(errno.EACCES):
            subprocess.run([root / name], check=False)
        (root / name).chmod(0o755)
    assert subprocess.run([root / "true"], check=False).returncode == 0
    result = subprocess.run([root / "script", "here"], check=True, capture_output=True)
    assert result.stdout == b"ran here\n"


@case()
def case_import_a_module(root: Path) -> None:
    (root / "package").mkdir()
    (root / "package" / "__init__.py").write_text("value = 41\n")
    code = "import package; print(package.value + 1)"
    for _ in range(2):
        result = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True)
        assert result.stdout == b"42\n"


@case()
def case_reads_of_a_large_file_from_two_processes(root: Path) -> None:
    path = root / "f"
    data = pattern(2 * MIB)
    path.write_bytes(data)

    def work() -> None:
        for offset in range(0, 2 * MIB, 96 * 1024):
            with opened(path, os.O_RDONLY) as fd:
                assert os.pread(fd, 70_000, offset) == data[offset : offset + 70_000]

    children = [Child(work) for _ in range(2)]
    for child in children:
        child.wait()


@case(mount_only=True)
def case_size_limit_leaves_the_old_content(root: Path) -> None:
    path = root / "f"
    path.write_bytes(b"old")
    limit = 16 * MIB
    for attempt in (lambda fd: os.pwrite(fd, b"x", limit), lambda fd: os.ftruncate(fd, limit + 1)):
        fd = os.open(path, os.O_RDWR)
        with refused(errno.EFBIG):
            attempt(fd)
        # close may say it again: the shell's builtins do not look at what write says.
        assert errno_of(lambda fd=fd: os.close(fd)) in (0, errno.EFBIG)  # type: ignore[misc]
    with refused(errno.EFBIG):
        os.truncate(path, limit + 1)
    assert read_at(path) == b"old"
    assert path.stat().st_size == 3
    os.truncate(path, limit)
    assert path.stat().st_size == limit
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    with refused(errno.EFBIG):
        os.write(fd, b"x")
    assert errno_of(lambda: os.close(fd)) in (0, errno.EFBIG)
    assert path.stat().st_size == limit


@case(mount_only=True)
def case_size_limit_is_told_by_tools(root: Path) -> None:
    (root / "f").write_bytes(b"old")
    done = subprocess.run(["cp", "/dev/zero", root / "f"], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "File too large" in done.stderr
    assert read_at(root / "f") == b"old"
