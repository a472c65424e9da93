"""One session's worker of the concurrent model: random file operations, each logged with what it was told.

A process of its own that imports nothing of fusefs. Decided here and only here: which operations there are, what
the bytes of a write look like, and what a log record says. The choice of an operation depends on the seed and its
number alone, never on results; what meets what is up to the machine.

Bytes: a content is lines of 32 bytes, `<token> <token of the first line that the writer read> .........`. A token is
`<session><number of the operation><letter>` and is written once, so each content says who made it of what. The
second token of one write is the first in capitals.

Commands on stdin: `go N` (do N operations; one dot each on stdout, then a line end). The end of stdin ends the worker.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LINE = 32
NONE = "-" * 10
MAX_LINES = 8
"""Of what a writer keeps: contents stay small."""

FILES = ("a", "b", "log", "d0/e", "d1/e")
DIRS = ("d0", "d1")
ROOT_DEADLINE_S = 60.0
TOOL_DEADLINE_S = 60

UNKNOWN = frozenset({"EIO", "ENOTCONN", "ECONNABORTED", "ETIMEDOUT", "EINTR"})
"""Answers that do not say whether the call took effect."""

_TEXTS = {os.strerror(number): name for number, name in errno.errorcode.items()}


def line(token: str, was: str = NONE) -> str:
    return f"{token} {was} ".ljust(LINE - 1, ".") + "\n"


def lines_of(text: str) -> list[str]:
    return [text[at : at + LINE] for at in range(0, len(text), LINE)]


class Worker:
    """Does and logs operations.

    Args:
        name: two characters, the beginning of its tokens; also the session's name.
        root: the shared directory, as this session sees it.
        scratch: a directory on the local disk for what tools copy from.
    """

    def __init__(self, name: str, root: Path, scratch: Path, log: Path, seed: str) -> None:
        self.name = name
        self.root = root
        self.scratch = scratch
        self.seed = seed
        self.number = 0
        self.rng = random.Random(0)
        self._letters = iter("")
        self._held: set[str] = set()
        self._log = log.open("w", buffering=1)

    # -- The frame ---------------------------------------------------------------------------------

    def step(self) -> None:
        """One operation, chosen by the seed and the number of the operation."""
        self.rng = random.Random(f"{self.seed}/{self.name}/{self.number}")
        self._letters = iter("abcdefghij")
        self.choose()()
        self.number += 1

    def choose(self, nested: bool = False) -> Callable[[], None]:
        kinds = [(do, weight) for do, weight, nests in OPERATIONS if nests or not nested]
        (found,) = self.rng.choices([do for do, _ in kinds], [weight for _, weight in kinds])
        return lambda: found(self)

    def token(self) -> str:
        return f"{self.name}{self.number:07d}{next(self._letters)}"

    def name_of(self, names: tuple[str, ...] = FILES) -> str:
        return self.rng.choice([name for name in names if name not in self._held])

    def record(self, op: str, path: str, began: int, result: str, **more: Any) -> None:
        fields = {"n": self.number, "s": self.name, "op": op, "p": path, "t0": began, "t1": time.time_ns(), "r": result}
        self._log.write(json.dumps(fields | more) + "\n")
        if result in UNKNOWN or result == "ENOENT":
            self.await_root()

    def await_root(self) -> None:
        """After a daemon's death: wait until the directory is there again."""
        deadline = time.monotonic() + ROOT_DEADLINE_S
        while time.monotonic() < deadline:
            try:
                os.stat(self.root)
                return
            except OSError:
                time.sleep(0.02)
        raise SystemExit(f"{self.root} did not come back within {ROOT_DEADLINE_S:.0f} s")

    def call(self, op: str, path: str, do: Callable[[], object], **more: Any) -> bool:
        """One call without content."""
        began = time.time_ns()
        try:
            do()
            result = "ok"
        except OSError as error:
            result = errno.errorcode[error.errno or 0]
        self.record(op, path, began, result, **more)
        return result == "ok"

    def tool(self, op: str, path: str, *command: str, **more: Any) -> bool:
        """One command. A message of stderr says what its failure was."""
        began = time.time_ns()
        done = subprocess.run(
            command,
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TOOL_DEADLINE_S,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/nonexistent"},
        )
        result = "ok"
        if done.returncode or done.stderr:
            found = [name for text, name in _TEXTS.items() if text in done.stderr]
            # More than one message: the worst of them counts.
            found.sort(key=lambda name: (name in UNKNOWN, name == "ESTALE"), reverse=True)
            result = found[0] if found else f"exit {done.returncode}"
            if "are the same file" in done.stderr:
                result = "EEXIST"  # others have just made the same rename, and this kernel knows both names yet
        self.record(op, path, began, result, stderr=done.stderr.strip(), **more)
        return result == "ok"

    # -- Contents ----------------------------------------------------------------------------------

    def read(self, path: str) -> str | None:
        began = time.time_ns()
        try:
            fd = os.open(self.root / path, os.O_RDONLY)
        except OSError as error:
            self.record("read", path, began, errno.errorcode[error.errno or 0])
            return None
        try:
            return self.read_fd(fd, path, began)
        finally:
            with contextlib.suppress(OSError):  # the daemon was killed
                os.close(fd)

    def read_fd(self, fd: int, path: str, began: int) -> str | None:
        text, result = None, "ok"
        try:
            text = os.pread(fd, 1 << 16, 0).decode("latin-1")
        except OSError as error:
            result = errno.errorcode[error.errno or 0]
        self.record("read", path, began, result, got=text)
        return text

    def write(
        self,
        path: str,
        flags: int,
        *,
        op: str = "write",
        based: bool = False,
        patch: bool = False,
        twice: bool = False,
        hold: bool = False,
    ) -> bool:
        """Open, write one line or a whole content, close.

        Args:
            based: read through the handle first; the content keeps the lines that were read but the first.
            patch: write the first line over what is there instead of all.
            twice: write, fsync, write a second line.
            hold: do other operations between open and write.
        """
        began = time.time_ns()
        tokens = [self.token()]
        if twice:
            tokens.append(tokens[0].upper())
        stage, done, states, keep, was = "open", 0, [""], "", NONE
        result = "ok"
        fd = -1
        try:
            fd = os.open(self.root / path, flags, 0o644)
            if based:
                text = self.read_fd(fd, path, time.time_ns())
                if text:
                    was, keep = text[:10], "".join(lines_of(text)[1 : None if patch else MAX_LINES])
            if hold:
                self._hold(path)
            states = [line(tokens[0], was) + keep]
            if based and not patch:
                stage = "ftruncate"
                os.ftruncate(fd, 0)
            stage = "write"
            if flags & os.O_APPEND:
                os.write(fd, states[0].encode())
            else:
                os.pwrite(fd, (states[0][:LINE] if patch else states[0]).encode(), 0)
            if twice:
                os.fsync(fd)
                done = 1
                states.append(states[0] + line(tokens[1], was))
                os.pwrite(fd, line(tokens[1], was).encode(), len(states[0]))
            stage = "close"
        except OSError as error:
            result = errno.errorcode[error.errno or 0]
        if fd >= 0:
            try:
                os.close(fd)
            except OSError as error:
                result = errno.errorcode[error.errno or 0] if result == "ok" else result
        acked = tokens if result == "ok" else tokens[:done]
        self.record(op, path, began, result, stage=stage, tokens=tokens, acked=acked, states=states, patch=patch)
        return result == "ok"

    def _hold(self, path: str) -> None:
        self._held.add(path)
        try:
            for _ in range(self.rng.randint(1, 3)):
                self.choose(nested=True)()
        finally:
            self._held.discard(path)

    # -- Operations --------------------------------------------------------------------------------

    def do_read(self) -> None:
        self.read(self.name_of())

    def do_list(self) -> None:
        self.call("list", "", lambda: [os.stat(self.root / name) for name in os.listdir(self.root)])

    def do_replace(self) -> None:
        self.write(self.name_of(), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, twice=self.rng.random() < 0.2)

    def do_read_and_replace(self) -> None:
        path = self.name_of()
        self.read(path)
        self.write(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def do_exclusive(self) -> None:
        self.write(self.name_of(), os.O_WRONLY | os.O_CREAT | os.O_EXCL, op="exclusive")

    def do_rewrite(self) -> None:
        self.write(self.name_of(), os.O_RDWR, based=True, twice=self.rng.random() < 0.2)

    def do_patch(self) -> None:
        self.write(self.name_of(), os.O_RDWR, based=True, patch=True)

    def do_append(self) -> None:
        self.write(self.name_of(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, op="append")

    def do_hold(self) -> None:
        path = self.name_of()
        how = self.rng.randrange(4)
        if how == 0:
            self.write(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, hold=True)
        elif how == 1:
            self.write(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, op="append", hold=True)
        else:
            self.write(path, os.O_RDWR, based=True, patch=how == 2, hold=True)

    def do_truncate(self) -> None:
        path = self.name_of()
        self.call("truncate", path, lambda: os.truncate(self.root / path, 0))

    def do_unlink(self) -> None:
        self.unlink(self.name_of())

    def unlink(self, path: str) -> bool:
        return self.call("unlink", path, lambda: os.unlink(self.root / path))

    def do_recreate(self) -> None:
        path = self.name_of()
        self.unlink(path)
        self.write(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def do_rename(self) -> None:
        source = self.name_of()
        self.rename(source, self.name_of(tuple(name for name in FILES if name != source)))

    def rename(self, source: str, target: str) -> bool:
        return self.call("rename", source, lambda: os.rename(self.root / source, self.root / target), q=target)

    def do_save(self) -> None:
        """As an editor: read, write another file, rename it over."""
        path = self.name_of()
        self.read(path)
        spare = f".{self.name}{self.number}{self.rng.randrange(10**6)}"
        if self.write(spare, os.O_WRONLY | os.O_CREAT | os.O_EXCL, op="exclusive") and not self.rename(spare, path):
            self.unlink(spare)

    def do_mkdir(self) -> None:
        path = self.name_of(DIRS)
        self.call("mkdir", path, lambda: os.mkdir(self.root / path))

    def do_rmdir(self) -> None:
        path = self.name_of(DIRS)
        self.call("rmdir", path, lambda: os.rmdir(self.root / path))

    def do_sed(self) -> None:
        path, token = self.name_of(), self.token()
        script = rf"1s/^\(..........\).*/{token} \1 {'.' * (LINE - 23)}/;{MAX_LINES + 1},$d"
        self.tool("sed", path, "sed", "-i", script, str(self.root / path), tokens=[token])

    def do_mv(self) -> None:
        source = self.name_of()
        target = self.name_of(tuple(name for name in FILES if name != source))
        self.tool("rename", source, "mv", "-f", str(self.root / source), str(self.root / target), q=target)

    def local(self, text: str) -> str:
        path = self.scratch / "source"
        path.write_text(text)
        return str(path)

    def do_cp(self) -> None:
        path, token = self.name_of(), self.token()
        self.tool(
            "tool", path, "cp", self.local(line(token)), str(self.root / path), tokens=[token], states=[line(token)]
        )

    def do_mv_in(self) -> None:
        """From another file system: mv unlinks and makes anew."""
        path, token = self.name_of(), self.token()
        source = self.local(line(token))
        self.tool("tool", path, "mv", "-f", source, str(self.root / path), tokens=[token], states=[line(token)])

    def do_cat(self) -> None:
        path, token = self.name_of(), self.token()
        redirect = f"cat {self.local(line(token))} > {self.root / path}"
        self.tool("tool", path, "bash", "-c", redirect, tokens=[token], states=[line(token)])

    def do_builtin(self) -> None:
        """bash does not say what became of its own printf: its bytes are stored or a conflict."""
        path, token = self.name_of(), self.token()
        arrow = self.rng.choice((">", ">>"))
        command = f"printf '%s\\n' '{line(token)[:-1]}' {arrow} {self.root / path}"
        self.tool("builtin", path, "bash", "-c", command, tokens=[token], states=[line(token)])


# The operation, its weight, and whether it may be done while a file is held open: neither what holds one itself, nor
# what takes a file away, which may be the one held, under a name that others gave it; its writes would end with it.
OPERATIONS: tuple[tuple[Callable[[Worker], None], int, bool], ...] = (
    (Worker.do_read, 12, True),
    (Worker.do_list, 3, True),
    (Worker.do_replace, 10, True),
    (Worker.do_read_and_replace, 6, True),
    (Worker.do_exclusive, 4, True),
    (Worker.do_rewrite, 8, True),
    (Worker.do_patch, 8, True),
    (Worker.do_append, 14, True),
    (Worker.do_hold, 10, False),
    (Worker.do_truncate, 3, True),
    (Worker.do_unlink, 4, False),
    (Worker.do_recreate, 4, False),
    (Worker.do_rename, 5, False),
    (Worker.do_save, 6, False),
    (Worker.do_mkdir, 4, True),
    (Worker.do_rmdir, 3, False),
    (Worker.do_sed, 3, False),
    (Worker.do_mv, 1, False),
    (Worker.do_cp, 2, True),
    (Worker.do_mv_in, 1, False),
    (Worker.do_cat, 2, True),
    (Worker.do_builtin, 3, True),
)


def main() -> None:
    name, root, scratch, log, seed = sys.argv[1:]
    worker = Worker(name, Path(root), Path(scratch), Path(log), seed)
    for command in sys.stdin:
        for _ in range(int(command.split()[1])):
            worker.step()
            os.write(1, b".")
        os.write(1, b"\n")


if __name__ == "__main__":
    main()
