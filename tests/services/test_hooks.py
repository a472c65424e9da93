"""The rules of hooks in the configuration file, and the queue in front of them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from fusefs import telemetry
from fusefs.cli.configfile import hooks_of
from fusefs.rules.errors import BadConfig
from fusefs.rules.events import EventKind, FileEvent, HookRule, pattern
from fusefs.services.hooks import Hooks

GOOD = '[[hooks]]\ncommand = ["/bin/true"]\nevents = ["write"]\n'


def event(path: str, version: int = 1, kind: EventKind = EventKind.WRITE) -> FileEvent:
    return FileEvent(kind, "t", "a", "s", path, version, 3)


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    telemetry.setup_logging(stream=stream)
    yield stream
    telemetry.setup_logging()


# The configuration file


def test_rules_are_read(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        GOOD + '[[hooks]]\ncommand = ["/bin/echo", "two words"]\nevents = ["conflict", "offload"]\n'
        'include = ["*.py"]\nexclude = ["/a/**"]\ntimeout = 5\n'
    )
    assert hooks_of(str(file)) == (
        HookRule(("/bin/true",), frozenset((EventKind.WRITE,)), timeout_s=30.0),
        HookRule(
            ("/bin/echo", "two words"),
            frozenset((EventKind.CONFLICT, EventKind.OFFLOAD)),
            (pattern("*.py"),),
            (pattern("/a/**"),),
            5,
        ),
    )


def test_a_file_without_hooks_has_none(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("")
    file.chmod(0o666)
    assert hooks_of(str(file)) == ()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("hooks = 3", "hooks must be tables, [[hooks]]"),
        ("[hooks]\ncommand = []", "hooks must be tables, [[hooks]]"),
        ("[[hooks]]", "hook 1: a hook's command must be a list that begins with the absolute path of a program"),
        (GOOD.replace('["/bin/true"]', '"/bin/true"'), "hook 1: command must be a list of strings"),
        (GOOD.replace("/bin/true", "true"), "begins with the absolute path of a program"),
        (GOOD.replace('["write"]', "[1]"), "hook 1: events must be a list of strings"),
        (GOOD.replace('["write"]', "[]"), "hook 1: a hook needs at least one event"),
        (GOOD.replace('"write"', '"read"'), "hook 1: there is no event read"),
        (GOOD + GOOD + "shell = true", "hook 2: unknown key shell"),
        (GOOD + "timeout = true", "hook 1: timeout must be a number"),
        (GOOD + "timeout = 0", "hook 1: a hook's timeout must be between 0 and 3600 seconds"),
        (GOOD + "timeout = nan", "hook 1: a hook's timeout must be between 0 and 3600 seconds"),
        (GOOD + 'include = [""]', "hook 1: the pattern '' of a hook is not valid: a pattern must have 1 to 1000"),
        (GOOD + 'exclude = ["../x"]', "hook 1: the pattern '../x' of a hook is not valid: a pattern must not contain"),
        (GOOD.replace("/bin/true", "/bin/\\u0000"), "hook 1: a hook's command cannot hold NUL"),
    ],
)
def test_a_rule_that_is_wrong(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(BadConfig) as caught:
        hooks_of(str(file))
    assert complaint in caught.value.message


def test_a_file_that_others_may_write_runs_nothing(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(GOOD)
    for mode in (0o664, 0o646):
        file.chmod(mode)
        with pytest.raises(BadConfig, match="others may write it"):
            hooks_of(str(file))
    file.chmod(0o644)
    assert len(hooks_of(str(file))) == 1


# The queue


def test_an_event_holds_no_content() -> None:
    assert event("/x").as_json() == {
        "event": "write",
        "tenant": "t",
        "agent": "a",
        "session": "s",
        "path": "/x",
        "version": 1,
        "bytes": 3,
    }


async def test_a_full_queue_drops_counts_and_logs(log: io.StringIO, tmp_path: Path) -> None:
    """What waits at the end is counted too; a newer event of a path that waits takes its place and drops nothing."""
    before = telemetry.counters.hooks["dropped"]
    hooks = Hooks([HookRule(("/bin/true",), frozenset((EventKind.WRITE,)))], queue=2)
    for number in range(5):
        hooks.offer(event(f"/{number}"))
        hooks.offer(event("/0", version=number))
        hooks.offer(event(f"/{number}", kind=EventKind.CONFLICT))
    assert telemetry.counters.hooks["dropped"] - before == 3
    with trio.CancelScope() as scope:
        scope.cancel()
        await hooks.run()
    assert telemetry.counters.hooks["dropped"] - before == 5
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [(line["event"], line["level"]) for line in lines] == [
        ("hooks.dropping", "warning"),
        ("hooks.not_run", "info"),
    ]


async def test_a_fault_in_one_hook_ends_nothing(
    log: io.StringIO, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hooks = Hooks([HookRule(("/bin/sh", "-c", f"cat >{tmp_path}/told"), frozenset((EventKind.WRITE,)))])
    hooks.offer(event("/\ud800"))  # no variable can hold it
    hooks.offer(event("/fine"))
    before = telemetry.counters.hooks["ran"]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hooks.run)
        while telemetry.counters.hooks["ran"] == before:
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert json.loads((tmp_path / "told").read_text())["path"] == "/fine"
