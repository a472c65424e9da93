"""The command line as a whole: options, environment, configuration file, errors, start-up, reference page."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import trio

from fusefs.cli import main as program
from fusefs.cli import output, status
from fusefs.cli.configfile import option_key
from fusefs.cli.reference import render
from fusefs.rules.errors import NotFound, StaleVersion
from tests import harness
from tests.doors.command import Fusefs


def leaves(command: click.Command | None = None, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, by its words."""
    command = command or program.cli
    if not isinstance(command, click.Group):
        yield path.strip(), command
        return
    with click.Context(command) as ctx:
        for name in command.list_commands(ctx):
            inner = command.get_command(ctx, name)
            assert inner is not None
            yield from leaves(inner, f"{path} {name}")


COMMANDS = dict(leaves())
SPOKEN = frozenset(("version", "to", "yes", "force", "replace"))
NAMED_BY_OTHERS = {"token_limit": "HANGO_TOOL_RESULT_TOKEN_LIMIT"}
SPOKEN_OF = {"rescue put": SPOKEN | {"all"}, "rescue drop": SPOKEN | {"all"}}


def test_the_commands_are_those_that_others_call() -> None:
    words = set(COMMANDS)
    assert words >= {
        *("mount", "host", "umount", "status", "init", "migrate up", "migrate down", "migrate status"),
        *("tenant add", "tenant list", "tenant remove", "agent add", "agent list", "agent remove"),
        *("check", "versions", "restore", "conflicts list", "conflicts show", "conflicts accept", "conflicts drop"),
        *("rescue list", "rescue put", "rescue drop", "export", "import", "df", "gc", "offload", "offload-hook"),
    }


def test_the_help_has_the_first_sentence_of_each_command(bare_fusefs: Fusefs) -> None:
    """It is written down beside the commands' names, so that the help imports none of them."""
    with click.Context(program.cli) as ctx:
        for name, (_, line) in program.COMMANDS.items():
            command = program.cli.get_command(ctx, name)
            assert command is not None
            assert line == command.get_short_help_str(limit=200)
    shown = " ".join(bare_fusefs("--help").text.split())
    assert all(f"{name} {line}" in shown for name, (_, line) in program.COMMANDS.items())


@pytest.mark.parametrize("words", COMMANDS)
def test_help_has_an_example(bare_fusefs: Fusefs, words: str) -> None:
    text = bare_fusefs(*words.split(), "--help").text
    assert "Example:\n" in text
    assert f"fusefs {words}" in text


@pytest.mark.parametrize("words", COMMANDS)
def test_every_option_has_its_environment_variable(words: str) -> None:
    for option in COMMANDS[words].params:
        if isinstance(option, click.Option) and option_key(option) not in SPOKEN_OF.get(words, SPOKEN):
            key = option_key(option)
            assert option.envvar == NAMED_BY_OTHERS.get(key, f"HANGO_FS_{key.upper()}")


def test_what_destroys_is_said_on_the_command_line_only(
    fusefs: Fusefs, agent: harness.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in SPOKEN:
        monkeypatch.setenv(f"HANGO_FS_{key.upper()}", "1")
    assert "--yes" in fusefs.fails(2, "agent", "remove", agent.agent)
    assert "--to" in fusefs.fails(2, "migrate", "down")
    assert "--version" in fusefs.fails(2, "restore", "/a", "--agent", agent.agent)
    assert "nothing of fusefs is mounted" in fusefs.fails(14, "umount", str(tmp_path))
    config = tmp_path / "c.toml"
    for key in SPOKEN:
        config.write_text(f"{key} = true\n")
        assert f"unknown key {key}" in fusefs.fails(2, "status", "--config", str(config))


@pytest.mark.parametrize("words", COMMANDS)
def test_the_defaults_of_session_and_principal_are_those_of_the_command(words: str) -> None:
    said = {
        option_key(option): option.help or "" for option in COMMANDS[words].params if isinstance(option, click.Option)
    }
    session, principal = {
        "mount": ("a new one, which is printed", "agent (admin for --all)"),
        "host": ("", "agent."),
        "offload": ("the mount's; for the database it must be named", ""),
        "offload-hook": ("the mount's; for the database it must be named", ""),
        "mcp": ("a new one", "agent"),
        "mcp-proxy": ("the mount's; for the database it must be named", ""),
    }.get(words, ("the mount's, else a new one", "owner"))
    if "as" in said:
        assert f"Default: {principal}" in said["as"]
    if "session" in said:
        assert f"Default: {session}" in said["session"]


def test_every_list_has_json() -> None:
    for words, command in COMMANDS.items():
        if words.endswith("list") or words in ("status", "df", "gc", "check", "versions", "migrate status"):
            assert any(option_key(option) == "json" for option in command.params), words


def test_options_of_the_mount_command() -> None:
    keys = {option_key(option) for option in COMMANDS["mount"].params if isinstance(option, click.Option)}
    assert keys >= {
        *("dsn", "tenant", "agent", "session", "create", "as", "all", "rw", "allow_other", "uid", "gid", "foreground"),
        *("consistency", "xattr", "max_file_bytes", "max_path_depth", "require_read", "version_check"),
        *("write_timeout", "log_file", "config", "data_dir", "durability", "max_nodes"),
    }


HEAVY = ("trio", "psycopg", "pydantic", "structlog", "opentelemetry", "rich", "fusefs.fuse", "fusefs.cli.mount")
"""The last: other commands are not imported either."""


@pytest.mark.parametrize(
    ("args", "stdin"),
    [
        (["--help"], ""),
        (["status"], ""),
        (["offload"], "short"),
        (["offload-hook"], '{"hook_event_name": "PostToolUse", "tool_name": "Bash", "tool_response": "short"}'),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_starting_imports_nothing_heavy(args: list[str], stdin: str) -> None:
    code = (
        f"import sys; import fusefs.cli.main as m; m.run({args!r}); "
        f"print('', [n for n in {HEAVY} if n in sys.modules], sep=chr(10))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=stdin, capture_output=True, text=True, check=True, cwd=harness.ROOT
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_reference_page_is_up_to_date() -> None:
    page = harness.ROOT / "docs" / "reference" / "cli.md"
    assert page.read_text(encoding="utf-8") == render(), "run scripts/make-cli-reference"


def test_version(bare_fusefs: Fusefs) -> None:
    assert bare_fusefs("--version").text.startswith("fusefs ")


def test_status_says_how_the_embedded_server_is_stopped(
    bare_fusefs: Fusefs, pg_server: harness.PostgresServer, suite_dir: Path
) -> None:
    assert pg_server.dsn()
    assert bare_fusefs("status").text == "no mounts\n"
    data = suite_dir / harness.DATA
    pid = (data / "pg" / "postmaster.pid").read_text().split()[0]
    text = bare_fusefs("status", "--data-dir", str(data)).text
    assert text == f"no mounts\nembedded Postgres in {data}: pid {pid}; `kill -INT {pid}` stops it\n"
    assert bare_fusefs("status", "--data-dir", str(data), "--json").json == []


# Errors


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["mount"], "Missing argument 'MOUNTPOINT'"),
        (["mount", "/x", "--bogus"], "No such option"),
        (["bogus"], "No such command 'bogus'"),
        (["gc", "--version-days", "-1"], "Invalid value for '--version-days'"),
        (["mount", "/x", "--max-file-bytes", "0"], "Invalid value for '--max-file-bytes'"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_a_hint(bare_fusefs: Fusefs, args: list[str], text: str) -> None:
    lines = bare_fusefs.fails(2, *args).splitlines()
    assert lines[0].startswith("fusefs: ")
    assert text in lines[0]
    assert lines[1].startswith("hint: See `fusefs ")
    assert len(lines) == 2


def test_an_error_shows_its_hint_and_its_exit_code(bare_fusefs: Fusefs, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_stale() -> list[object]:
        raise StaleVersion(path="/a", expected=1, actual=2)

    monkeypatch.setattr(status.registry, "all_records", raise_stale)
    lines = bare_fusefs.fails(6, "status").splitlines()
    assert lines[0].startswith("fusefs: /a: changed since you read it")
    assert lines[1].startswith("hint: Read the file again")


def test_an_unexpected_error_is_no_traceback(bare_fusefs: Fusefs, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[object]:
        raise RuntimeError("the text of an error may hold contents")

    monkeypatch.setattr(status.registry, "all_records", fail)
    text = bare_fusefs.fails(70, "status")
    assert text.splitlines()[0] == "fusefs: internal error (RuntimeError)"
    assert "contents" not in text
    assert "--debug" in text


def test_debug_shows_the_traceback(
    bare_fusefs: Fusefs, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> list[object]:
        raise RuntimeError("boom")

    monkeypatch.setattr(status.registry, "all_records", fail)
    assert program.run(["status", "--debug"]) == 70
    assert "Traceback" in capfd.readouterr().err


def test_errors_of_trios_tasks_are_unwrapped(bare_fusefs: Fusefs, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            raise NotFound(path="/a")

    monkeypatch.setattr(status.registry, "all_records", lambda: trio.run(fail))
    assert bare_fusefs.fails(3, "status") == "fusefs: /a: No such file or directory\n"


def test_interrupt_is_130(bare_fusefs: Fusefs, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> list[object]:
        raise KeyboardInterrupt

    monkeypatch.setattr(status.registry, "all_records", interrupt)
    result = bare_fusefs("status", check=False)
    assert result.code == 130
    assert result.stdout == b""


def test_a_reader_that_goes_away_is_no_error() -> None:
    # Longer than a pipe holds, so that the writer meets the closed pipe.
    code = (
        "import sys, fusefs.cli.status as s; from fusefs.cli import main; "
        "s.registry.all_records = lambda: [print('x' * 200000)] and []; sys.exit(main.run(['status']))"
    )
    script = '"$0" -c "$1" | head -c 1 >/dev/null; exit ${PIPESTATUS[0]}'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, code], capture_output=True, text=True, check=False, cwd=harness.ROOT
    )
    assert done.stderr == ""
    assert done.returncode == 141


def test_a_full_disk_is_no_fault_of_ours() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [harness.FUSEFS, "--version"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (
        done.stderr == "fusefs: no room to write: No space left on device\nhint: Free some space, then run it again.\n"
    )
    assert done.returncode == 1


@pytest.mark.parametrize("number", ["nan", "inf"])
@pytest.mark.parametrize("words", ["gc --version-days", "exec --timeout", "mcp-proxy --stop-timeout"])
def test_what_is_no_finite_number_is_refused(bare_fusefs: Fusefs, words: str, number: str) -> None:
    more = [] if words.startswith("gc") else ["true"]
    assert "Invalid value" in bare_fusefs.fails(2, *words.split(), number, *more)


# Configuration file


def test_precedence_is_command_line_environment_file(
    fusefs: Fusefs, pg: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slug in ("in-file", "in-table", "in-env", "in-args"):
        fusefs("tenant", "add", slug)
        fusefs("agent", "add", f"of-{slug}", "--tenant", slug)
    config = tmp_path / "c.toml"

    def listed(*args: str) -> str:
        return str(fusefs("agent", "list", "--json", "--config", str(config), *args).json[0]["slug"])

    config.write_text('tenant = "in-file"\n')
    assert listed() == "of-in-file"
    config.write_text('[agent]\ntenant = "in-table"\n')
    assert listed() == "of-in-table"
    monkeypatch.setenv("HANGO_FS_TENANT", "in-env")
    assert listed() == "of-in-env"
    assert listed("--tenant", "in-args") == "of-in-args"


def test_the_default_file_is_read(bare_fusefs: Fusefs, tmp_path: Path) -> None:
    file = tmp_path / "xdg_config_home" / "fusefs" / "config.toml"
    file.parent.mkdir()
    file.write_text("json = true\n")
    assert bare_fusefs("status").json == []


@pytest.mark.parametrize(
    ("content", "text", "hint"),
    [
        ('sesion = "x"', "unknown key sesion", "session"),
        ("[mount]\nreplace = true", "unknown key mount.replace", "require_read"),
        ("[mont]\nrw = true", "there is no table [mont]", "mount"),
        ('max_file_bytes = "1"', "max_file_bytes must be a whole number", ""),
        ("max_file_bytes = true", "max_file_bytes must be a whole number", ""),
        ("write_timeout = false", "write_timeout must be a number", ""),
        ("dsn = 5", "dsn must be a string", ""),
        ("[mount]\nrw = 1", "mount.rw must be true or false", ""),
        ('consistency = "often"', "consistency must be one of notify, strict", ""),
        ("= 3", "is not valid TOML", ""),
        ('[[hooks]]\ncommand = ["true"]', "begins with the absolute path of a program", ""),
        ("[[hooks]]\nshell = true", "hook 1: unknown key shell", "command, events"),
    ],
)
def test_a_wrong_file_is_refused(bare_fusefs: Fusefs, tmp_path: Path, content: str, text: str, hint: str) -> None:
    config = tmp_path / "c.toml"
    config.write_text(content)
    error = bare_fusefs.fails(2, "status", "--config", str(config))
    assert text in error.splitlines()[0]
    assert hint in error


def test_a_named_file_must_exist(bare_fusefs: Fusefs, tmp_path: Path) -> None:
    assert "does not exist" in bare_fusefs.fails(2, "status", "--config", str(tmp_path / "none.toml"))


# Output


def test_names_cannot_steer_a_terminal() -> None:
    assert output.printable("a\x1b[2Jb\u202ec\x07") == "a\\x1b[2Jb\\u202ec\\x07"
    assert output.printable("Ünïcode 团队 ok") == "Ünïcode 团队 ok"


def test_columns_align_with_wide_characters(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(("A", "B"), [("团队", 1), ("x", None)])
    assert capsys.readouterr().out == "A     B\n团队  1\nx     -\n"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 1024**3, "5.0 GiB"), (None, "-")]
)
def test_sizes(count: int | None, text: str) -> None:
    assert output.human_bytes(count) == text
