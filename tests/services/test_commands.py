"""What a model is told of a command: the text, what is kept of long output, and what is stored."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

from fusefs.rules.errors import OverQuota
from fusefs.services import commands
from fusefs.services.commands import INLINE_CHARS, INLINE_TOKENS, STDERR_BYTES, STDOUT_BYTES, CommandResult
from fusefs.services.offload import Offload, unobserved
from fusefs.services.processes import Patience

PATIENCE = Patience(timeout_s=60.0, grace_s=0.1, linger_s=60.0)


@dataclass
class Shelf:
    """A store of results in memory. With `full` it refuses everything."""

    full: bool = False
    session: str = "s-1"
    max_file_bytes: int = 64 * 1024 * 1024
    root: str | None = None
    files: dict[str, bytes] = field(default_factory=dict)

    async def make_file(self, path: str, data: bytes) -> None:
        if self.full:
            raise OverQuota(path=path)
        self.files[path] = data

    async def make_directory(self, path: str) -> None:
        raise AssertionError(path)


async def bash(script: str, shelf: Shelf | None = None, **options: object) -> CommandResult:
    offload = None if shelf is None else Offload(shelf, limit_tokens=INLINE_TOKENS, observe=unobserved)
    given = {"directory": "/", "patience": PATIENCE, **options}
    return await commands.run(["bash", "-c", script], offload=offload, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("true", "[no output]"),
        ("echo out", "out"),
        ("printf 'a\\n\\n'", "a\n"),
        ("echo err >&2", "[stderr]\nerr"),
        ("printf out; printf err >&2", "out\n[stderr]\nerr"),
        ("echo out; exit 3", "out\n[exit code 3]"),
        ("exit 1", "[exit code 1]"),
        ("echo out; kill -SEGV $$", "out\n[ended by SIGSEGV; exit code 139]"),
        ("kill -40 $$", "[ended by signal 40; exit code 168]"),
        ("no-such-command-here", "[stderr]\nbash: line 1: no-such-command-here: command not found\n[exit code 127]"),
        ("echo 漢字 \u202e", "漢字 \u202e"),
    ],
)
async def test_the_text(script: str, text: str) -> None:
    assert (await bash(script)).text == text


async def test_the_text_of_what_cannot_be_run(tmp_path: Path) -> None:
    result = await commands.run(["no-such-command"], directory="/")
    assert result.text == "[no-such-command: command not found; exit code 127]"
    result = await commands.run(["/"], directory="/")
    assert result.text == "[/: cannot be run: Permission denied; exit code 126]"
    result = await commands.run(["true"], directory=str(tmp_path / "gone"))
    assert result.text == f"[{tmp_path}/gone: cannot run there: No such file or directory; exit code 126]"


async def test_a_command_over_its_time_keeps_what_it_printed() -> None:
    """Also when it is ended in the middle of a character: that is no sign of binary output."""
    result = await bash(r"echo so far; printf '\xe6\xbc'; sleep 1000", patience=Patience(2.0, 0.1, 0.1))
    assert result.text == "so far\n[command timed out after 2s]"
    assert result.ended.timed_out
    assert result.ended.exit_code == 124


async def test_background_processes_are_told() -> None:
    result = await bash("echo started; sleep 1000 & sleep 1000 &", patience=Patience(60.0, 0.1, 0.1))
    assert result.text == "started\n[background processes ended with it: 2]"


# Binary output


@pytest.mark.parametrize(
    ("script", "size"),
    [
        (r"printf 'text\0text'", 9),
        (r"printf 'caf\xe9\n'", 5),
        (r"printf '\xe6\xbc'", 2),
        (r"printf '\x1f\x8b'", 2),
        ("printf '%%PDF-1.4 and no more'", 20),
        ("printf GIF89a", 6),
        ("seq 1 100000; head -c 1 /dev/zero", 588896),
    ],
)
async def test_binary_output(script: str, size: int) -> None:
    result = await bash(script)
    assert result.text == f"Binary output ({size} bytes). Pipe to file if needed."
    assert result.stdout == commands.Stream(result.text, size, 0, binary=True)


async def test_each_stream_is_judged_by_itself() -> None:
    result = await bash(r"echo text; printf '\0' >&2; exit 1")
    assert result.text == "text\n[stderr]\nBinary output (1 bytes). Pipe to file if needed.\n[exit code 1]"
    assert not result.stdout.binary
    result = await bash(r"printf '\0'; echo why >&2")
    assert result.text == "Binary output (1 bytes). Pipe to file if needed.\n[stderr]\nwhy"


async def test_a_character_split_between_two_reads_is_no_sign() -> None:
    result = await bash(r"printf '\xe6'; sleep 0.1; printf '\xbc\xa2'")
    assert result.text == "漢"


# Long output


async def test_up_to_30000_characters_are_shown() -> None:
    shelf = Shelf()
    result = await bash(
        f"yes 漢 | head -n {INLINE_CHARS // 2} | tr -d '\\n'; yes 字 | head -n {INLINE_CHARS // 4}", shelf
    )
    assert len(result.text) == INLINE_CHARS - 1  # without the last line's end
    assert shelf.files == {}


async def test_a_longer_output_is_stored_whole_and_previewed() -> None:
    shelf = Shelf()
    result = await bash("seq 1 400000; seq 1 50000 >&2; exit 4", shelf, call_id="toolu_1")
    out = b"".join(b"%d\n" % number for number in range(1, 400001))
    err = b"".join(b"%d\n" % number for number in range(1, 50001))
    assert shelf.files == {"/large_tool_results/s-1/toolu_1": out + b"[stderr]\n" + err}
    assert result.path == "/large_tool_results/s-1/toolu_1"
    assert result.path in result.text
    assert len(result.text) < 1000 + 20
    assert result.text.splitlines()[-2:] == ["450001\t50000", "[exit code 4]"]


async def test_one_character_more_is_stored() -> None:
    shelf = Shelf()
    result = await bash(f"head -c {INLINE_CHARS + 1} /dev/zero | tr '\\0' x", shelf)
    assert list(shelf.files.values()) == [b"x" * (INLINE_CHARS + 1)]
    assert len(result.text) < 1000


async def test_binary_output_is_not_stored_with_the_rest() -> None:
    shelf = Shelf()
    await bash("head -c 100000 /dev/zero; seq 1 10000 >&2", shelf)
    (stored,) = shelf.files.values()
    assert stored.startswith(b"Binary output (100000 bytes). Pipe to file if needed.\n[stderr]\n1\n2\n")
    assert stored.endswith(b"\n10000\n")


@pytest.mark.parametrize("shelf", [None, Shelf(full=True)])
async def test_where_it_cannot_be_stored_it_is_cut_and_says_so(shelf: Shelf | None) -> None:
    result = await bash("seq 1 400000", shelf)
    assert result.path is None
    assert "could not be stored" in result.text
    assert INLINE_CHARS < len(result.text) < INLINE_CHARS + 500
    assert "\n1\n2\n3\n" in result.text
    assert result.text.endswith("\n400000")


@pytest.mark.parametrize("stored", [True, False])
async def test_the_caps_of_the_streams(stored: bool) -> None:
    """200 KB and 56 KB, the first 80 % and the last 20 %; no character is cut, and the mark counts what is left out."""
    result = await bash("yes 漢字 | head -n 100000; yes 字 | head -n 100000 >&2", Shelf() if stored else None)
    for stream, unit, cap in ((result.stdout, "漢字\n", STDOUT_BYTES), (result.stderr, "字\n", STDERR_BYTES)):
        head, mark, tail = stream.text.partition(f"\n[… {stream.left_out:,} bytes left out …]\n")
        assert mark
        assert (unit * 100_000).startswith(head)
        assert (unit * 100_000).endswith(tail)
        kept = len(head.encode()), len(tail.encode())
        assert stream.size == len(unit.encode()) * 100_000 == sum(kept) + stream.left_out
        assert cap * 0.8 - 4 <= kept[0] <= cap * 0.8
        assert cap * 0.2 - 4 <= kept[1] <= cap * 0.2 + 1


async def test_the_result_is_json() -> None:
    result = await bash("echo out; exit 3")
    assert json.loads(json.dumps(asdict(result))) == {
        "text": "out\n[exit code 3]",
        "path": None,
        "stdout": {"text": "out\n", "size": 4, "left_out": 0, "binary": False},
        "stderr": {"text": "", "size": 0, "left_out": 0, "binary": False},
        "ended": {
            "exit_code": 3,
            "signal": None,
            "timed_out": False,
            "leftovers": 0,
            "unkillable": 0,
            "failure": "",
        },
    }


# The environment


async def test_nothing_waits_for_a_person(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    script = "git -c user.name=a -c user.email=a@b commit -q --allow-empty"
    result = await bash(script, directory=str(tmp_path))
    assert result.ended.exit_code == 1
    assert "There was a problem with the editor" in result.text
    assert (await bash("echo $PAGER $TERM")).text == "cat dumb"


async def test_the_way_to_the_database_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANGO_FS_DSN", "postgresql://u:secret@h/d")
    monkeypatch.setenv("PGPASSWORD", "secret")
    assert "secret" not in (await bash("env")).text
