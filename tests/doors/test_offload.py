"""The offload from a shell: the filter, with the database or with nothing but the mounted directory, and the hook."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusefs.rules import agenthooks
from fusefs.rules.errors import NotFound
from fusefs.services import mounted_results
from fusefs.services.offload import Offload, unobserved
from tests import harness
from tests.doors.command import MEASURED, Fusefs

BIG = "".join(f"line {number} of the result\n" for number in range(1, 5001))
BINARY = b"\xff\xfeh\0i\0" * 20_000


@pytest.fixture(scope="module")
def root(module_mount: harness.MountFactory) -> Path:
    """A mounted namespace as session `s-mount` sees it."""
    return module_mount(session="s-mount").path


def stored(root: Path) -> set[Path]:
    """The files of the session's results."""
    return {path for path in (root / "large_tool_results" / "s-mount").rglob("*") if path.is_file()}


# Through the mounted directory


def test_a_mount_tells_its_session_and_its_limit(root: Path) -> None:
    (root / "deep" / "er").mkdir(parents=True, exist_ok=True)
    found = mounted_results.find(str(root / "deep" / "er"))
    assert (found.root, found.session, found.max_file_bytes) == (str(root), "s-mount", harness.MAX_FILE_BYTES)


@pytest.mark.parametrize(
    "status", ["[1]", "{", '{"session": "../x"}', '{"session": "s-mount", "max_file_bytes": 1000}']
)
def test_a_control_directory_that_somebody_made_leads_nowhere(tmp_path: Path, status: str) -> None:
    """Else who may write there would choose where the results go."""
    (tmp_path / ".fusefs").mkdir()
    (tmp_path / ".fusefs" / "status").write_text(status)
    with pytest.raises(NotFound, match="is in no mounted namespace"):
        mounted_results.find(str(tmp_path))


def test_a_control_directory_made_in_the_mount_is_passed_over(root: Path) -> None:
    made = root / "made" / ".fusefs"
    made.mkdir(parents=True)
    (made / "status").write_text('{"session": "s-other"}')
    assert mounted_results.find(str(root / "made")).root == str(root)


@pytest.mark.parametrize("call", [mounted_results.in_place, trio.to_thread.run_sync], ids=["in place", "in a thread"])
@pytest.mark.parametrize("tool_call_id", ["", "same", "../../memories/evil", "x" * 5000])
def test_case_l13_through_the_mount(root: Path, tool_call_id: str, call: mounted_results.Caller) -> None:
    offload = Offload(mounted_results.find(str(root), call), observe=unobserved)
    paths = set()
    for number in range(3):
        text = f"{number}{BIG}"
        done = trio.run(offload.text, tool_call_id, "fetch", text)
        assert done.path is not None, done.text[:300]
        file = Path(f"{root}{done.path}")
        assert file.read_text() == text
        assert file.parent == root / "large_tool_results" / "s-mount"
        assert f"F={file};" in done.text
        paths.add(done.path)
    assert len(paths) == 3


def test_a_stored_result_is_not_the_agents_to_change(root: Path, bare_fusefs: Fusefs) -> None:
    bare_fusefs("offload", "--tool-call-id", "kept", "--dir", str(root), stdin=BIG.encode())
    file = root / "large_tool_results" / "s-mount" / "kept"
    for change in (lambda: file.write_text("x"), lambda: file.open("a").close(), file.unlink):
        with pytest.raises(PermissionError):
            change()
    assert file.read_text() == BIG


# The filter


@pytest.mark.parametrize(
    "data", [b"", b"short", b"a\r\nb\n\n", BINARY[:80_000]], ids=["empty", "short", "crlf", "binary"]
)
def test_what_is_short_comes_out_byte_for_byte(bare_fusefs: Fusefs, data: bytes) -> None:
    done = bare_fusefs("offload", stdin=data)
    assert (done.stdout, done.stderr) == (data, "")


def test_the_filter_stores_through_the_mount(root: Path, bare_fusefs: Fusefs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    before = stored(root)
    done = bare_fusefs("offload", "--tool-call-id", "f-1", stdin=BIG.encode())
    assert stored(root) - before == {root / "large_tool_results" / "s-mount" / "f-1"}
    assert "Path: /large_tool_results/s-mount/f-1\n" in done.text
    assert len(done.text) <= 1000
    assert done.stderr == ""


def test_case_l17_through_the_mount(root: Path, bare_fusefs: Fusefs) -> None:
    done = bare_fusefs("offload", "--tool-call-id", "nul", "--dir", str(root), stdin=BINARY)
    assert (root / "large_tool_results" / "s-mount" / "nul").read_bytes() == BINARY
    assert "NUL is shown as ␀, other bytes as �" in done.text


def test_the_previews_shell_commands_work(root: Path, bare_fusefs: Fusefs) -> None:
    """Those that it prints, run by a shell."""
    text = bare_fusefs("offload", "--tool-call-id", "shell", "--dir", str(root), stdin=BIG.encode()).text
    (line,) = [line for line in text.split("\n") if line.startswith("Shell: ")]
    script = line.removeprefix("Shell: ").replace("TEXT", "'line 777 of'")
    shown = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown == (
        "".join(f"line {number} of the result\n" for number in range(101, 201))
        + "777:line 777 of the result\n"
        + BIG[:4000]
    )


def test_the_token_limit(root: Path, bare_fusefs: Fusefs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANGO_TOOL_RESULT_TOKEN_LIMIT", "100")
    assert bare_fusefs("offload", "--dir", str(root), stdin=b"x" * 400).stdout == b"x" * 400
    assert "Too long to show" in bare_fusefs("offload", "--dir", str(root), stdin=b"x" * 401).text


def test_the_filter_stores_into_the_database(fusefs: Fusefs, agent: harness.Namespace, tmp_path: Path) -> None:
    for _ in range(2):
        done = fusefs("offload", "--tool-call-id", "db-1", "--session", "s-db", stdin=BIG.encode())
        assert "Too long to show" in done.text
        assert done.stderr == ""
    rows = agent.execute("select path, content, updated_by, updated_session from agent_files where content <> ''")
    assert sorted(row[0] for row in rows)[0] == "/large_tool_results/s-db/db-1"
    assert [row[1:] for row in rows] == [(BIG, "system", "s-db")] * 2


def test_agent_on_the_command_line_goes_before_the_mount(
    root: Path, fusefs: Fusefs, agent: harness.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    words = ("offload", "--tool-call-id", "both", "--session", "s-mount")
    fusefs(*words, stdin=BIG.encode())
    assert (root / "large_tool_results" / "s-mount" / "both").read_text() == BIG
    fusefs(*words, "--tenant", agent.tenant, "--agent", agent.agent, stdin=BIG.encode())
    assert agent.execute("select path from agent_files where content <> ''") == [("/large_tool_results/s-mount/both",)]


def is_cut(text: str, reason: str) -> bool:
    """Whether a text is BIG, cut in place, and says why."""
    start, end = BIG[:64_000], BIG[-16_000:].removesuffix("\n")
    return reason in text.partition("\n")[0] and start in text and text.removesuffix("\n").endswith(end)


def test_nowhere_to_store_is_told_and_cut(bare_fusefs: Fusefs, tmp_path: Path) -> None:
    done = bare_fusefs("offload", "--dir", str(tmp_path), stdin=BIG.encode())
    assert is_cut(done.text, f"could not be stored ({tmp_path} is in no mounted namespace of a session)")
    assert "could not be stored (NotFound); it is cut" in done.stderr


def test_a_session_must_be_named_for_the_database(fusefs: Fusefs, agent: harness.Namespace) -> None:
    assert is_cut(fusefs("offload", stdin=BIG.encode()).text, "no session was named")
    assert agent.execute("select count(*) from agent_files where content <> ''") == [(0,)]


def test_another_session_than_the_mounts_is_refused(root: Path, bare_fusefs: Fusefs) -> None:
    done = bare_fusefs("offload", "--dir", str(root), "--session", "s-other", stdin=BIG.encode())
    assert is_cut(done.text, "the mount is session s-mount's, not s-other's")


def test_postgres_away_is_told_and_cut(bare_fusefs: Fusefs, tmp_path: Path) -> None:
    dsn = f"host={tmp_path} dbname=none"
    words = ("offload", "--dsn", dsn, "--tenant", "t", "--agent", "a", "--session", "s")
    done = bare_fusefs(*words, stdin=BIG.encode())
    assert is_cut(done.text, "could not be stored (")
    assert "could not be stored (" in done.stderr


def test_a_read_only_mount_is_told_and_cut(module_mount: harness.MountFactory, bare_fusefs: Fusefs) -> None:
    namespace = module_mount.namespace
    where = module_mount("--tenant", namespace.tenant, layout="all")
    done = bare_fusefs("offload", "--dir", str(where.path / namespace.tenant / namespace.agent), stdin=BIG.encode())
    assert is_cut(done.text, "could not be stored (Read-only file system)")


def test_a_full_quota_is_told_and_cut(module_mount: harness.MountFactory, bare_fusefs: Fusefs) -> None:
    namespace = harness.make_namespace(module_mount.namespace.dsn)
    where = module_mount(session="s-quota", namespace=namespace)
    quota = (namespace.tenant_id, namespace.agent_id, 1000)
    namespace.execute("select fusefs_set_quotas_v1(%s, %s, %s, null)", quota)
    done = bare_fusefs("offload", "--dir", str(where.path), stdin=BIG.encode())
    assert is_cut(done.text, "could not be stored (Disk quota exceeded)")


def test_a_mount_that_is_dead_is_told_and_cut(module_mount: harness.MountFactory, bare_fusefs: Fusefs) -> None:
    where = module_mount(session="s-dead")
    where.kill()
    done = bare_fusefs("offload", "--dir", str(where.path), stdin=BIG.encode())
    assert is_cut(done.text, "could not be stored (Transport endpoint is not connected)")
    where.destroy()


def test_a_text_over_the_mounts_file_limit_is_in_parts(module_mount: harness.MountFactory, bare_fusefs: Fusefs) -> None:
    where = module_mount("--max-file-bytes", "50000", session="s-parts")
    text = bare_fusefs("offload", "--tool-call-id", "p", "--dir", str(where.path), stdin=BIG.encode()).text
    assert "Path: /large_tool_results/s-parts/p/001 to /003, one text in 3 files\n" in text
    parts = where.path / "large_tool_results" / "s-parts" / "p"
    assert subprocess.run(f"cat {parts}/*", shell=True, capture_output=True, check=True).stdout.decode() == BIG


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CONFIG_HOME": str(tmp_path), "HANGO_FS_RUNTIME_DIR": str(tmp_path)}


def test_a_reader_that_has_gone_ends_the_filter(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [harness.FUSEFS, "offload"],
            input=b"x" * 70_000,
            stdout=write,
            stderr=subprocess.PIPE,
            env=environment(tmp_path),
            check=False,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("closed", ["<&-", ">&-"])
def test_a_closed_stream_is_an_error(tmp_path: Path, closed: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f'"$0" offload {closed}', harness.FUSEFS],
        capture_output=True,
        text=True,
        env=environment(tmp_path),
        check=False,
    )
    assert (done.returncode, done.stderr) == (9, "fusefs: stdin or stdout is closed\n")


def test_a_huge_stream_is_not_held(root: Path, tmp_path: Path) -> None:
    """100 MB in, at most 32 MiB kept: the filter's memory stays under 150 MB."""
    source = subprocess.Popen(
        [sys.executable, "-c", "import sys\nfor n in range(100): sys.stdout.write('%07d\\n' % n * 125_000)"],
        stdout=subprocess.PIPE,
    )
    done = subprocess.run(
        [*MEASURED, "offload", "--tool-call-id", "huge", "--dir", str(root)],
        stdin=source.stdout, capture_output=True, text=True, env=environment(tmp_path), check=True,
    )  # fmt: skip
    assert source.stdout is not None
    source.stdout.close()
    assert source.wait() == 0
    assert int(done.stderr) < 150_000
    lost = 100_000_000 - 32 * 1024 * 1024
    assert f"100,000,000 bytes, 12,500,000 lines, about 25,000,000 tokens; all but {lost:,} bytes" in done.stdout
    kept = sorted((root / "large_tool_results" / "s-mount" / "huge").iterdir())
    assert sum(part.stat().st_size for part in kept) == 32 * 1024 * 1024
    assert kept[0].read_bytes()[:16] == b"0000000\n0000000\n"
    assert kept[-1].read_bytes()[-16:] == b"0000099\n0000099\n"


def test_over_a_mount_nothing_heavy_is_imported(root: Path, tmp_path: Path) -> None:
    heavy = ("trio", "psycopg", "pydantic", "structlog", "opentelemetry", "rich", "fusefs.fuse", "asyncio")
    code = (
        "import sys; from fusefs.cli import main; main.run(sys.argv[1:]); "
        f"print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "offload", "--dir", str(root)],
        input=BIG, capture_output=True, text=True, env=environment(tmp_path), check=True,
    )  # fmt: skip
    assert "Too long to show" in done.stdout
    assert done.stderr == "[]\n"


# The hook


def claude(response: object, tool: str = "Bash", **more: object) -> dict[str, object]:
    """What Claude Code tells a hook after a call."""
    return {
        "session_id": "abc", "transcript_path": "/t.jsonl", "permission_mode": "default",
        "hook_event_name": "PostToolUse", "tool_name": tool, "tool_input": {}, "tool_response": response,
        "tool_use_id": "toolu_1", **more,
    }  # fmt: skip


def answer(fusefs: Fusefs, event: Mapping[str, object], root: Path, *args: str) -> Any:
    """What the hook says to an event; None where nothing."""
    done = fusefs("offload-hook", *args, stdin=json.dumps({"cwd": str(root), **event}).encode())
    assert done.stderr == ""
    return json.loads(done.stdout) if done.stdout else None


def path_in(preview: str) -> str:
    (line,) = [line for line in preview.split("\n") if line.startswith("Path: ")]
    return line.removeprefix("Path: ")


def test_claude_codes_bash_keeps_its_form(root: Path, bare_fusefs: Fusefs) -> None:
    response = {"stdout": BIG, "stderr": "a warning", "interrupted": False, "isImage": False}
    said = answer(bare_fusefs, claude(response), root)
    updated = said["hookSpecificOutput"]["updatedToolOutput"]
    assert updated == {**response, "stdout": updated["stdout"]}
    assert said == {
        "suppressOutput": True,
        "hookSpecificOutput": {"hookEventName": "PostToolUse", "updatedToolOutput": updated},
    }
    assert len(updated["stdout"]) < 1000
    assert Path(f"{root}{path_in(updated['stdout'])}").read_text() == BIG


def test_the_whole_of_what_claude_code_keeps_itself_is_stored(root: Path, bare_fusefs: Fusefs, tmp_path: Path) -> None:
    """Of more than about 30 KB a hook is given the start and the name of a file."""
    (tmp_path / "whole.txt").write_text(BIG)
    kept = {"persistedOutputPath": str(tmp_path / "whole.txt"), "persistedOutputSize": len(BIG)}
    said = answer(bare_fusefs, claude({"stdout": BIG[:30_000], "stderr": "", **kept}), root)
    updated = said["hookSpecificOutput"]["updatedToolOutput"]
    assert updated.keys() == {"stdout", "stderr"}
    assert Path(f"{root}{path_in(updated['stdout'])}").read_text() == BIG
    (tmp_path / "whole.txt").write_text(BIG[:40_000])
    assert answer(bare_fusefs, claude({"stdout": BIG[:30_000], **kept}), root) is None


def test_claude_codes_mcp_tool_keeps_its_blocks(root: Path, bare_fusefs: Fusefs) -> None:
    picture = {"type": "image", "data": "A" * 100_000, "mimeType": "image/png"}
    response = [{"type": "text", "text": BIG}, picture, {"type": "text", "text": "short"}]
    said = answer(bare_fusefs, claude(response, "mcp__web__fetch"), root)["hookSpecificOutput"]
    assert said["updatedToolOutput"] == said["updatedMCPToolOutput"]
    first, *others = said["updatedToolOutput"]
    assert others == response[1:]
    assert first["type"] == "text"
    assert Path(f"{root}{path_in(first['text'])}").read_text() == BIG


def test_of_many_texts_the_longest_are_stored(root: Path, bare_fusefs: Fusefs) -> None:
    """Until the rest is no longer over the limit; one id, several files."""
    response = {"a": "x" * 50_000, "b": ["y" * 45_000, "z" * 40_000], "c": "short"}
    updated = answer(bare_fusefs, claude(response, "Task"), root)["hookSpecificOutput"]["updatedToolOutput"]
    assert (updated["b"][1], updated["c"]) == (response["b"][1], "short")
    paths = [path_in(updated["a"]), path_in(updated["b"][0])]
    assert [Path(f"{root}{path}").read_text()[0] for path in paths] == ["x", "y"]


@pytest.mark.parametrize("file", ["/nowhere", "/", "a\0b", "/dev/zero"])
def test_a_file_that_claude_code_does_not_have_is_told(root: Path, bare_fusefs: Fusefs, file: str) -> None:
    event = claude({"stdout": BIG, "persistedOutputPath": file}, cwd=str(root))
    done = bare_fusefs("offload-hook", stdin=json.dumps(event).encode())
    updated = json.loads(done.stdout)["hookSpecificOutput"]["updatedToolOutput"]
    assert Path(f"{root}{path_in(updated['stdout'])}").read_text() == BIG
    assert "only its start is stored" in done.stderr


def test_a_path_in_another_tools_result_is_not_opened(root: Path, bare_fusefs: Fusefs, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a secret" * 20_000)
    response = {"stdout": "short", "persistedOutputPath": str(tmp_path / "key")}
    assert answer(bare_fusefs, claude(response, "mcp__other__run"), root) is None


@pytest.mark.parametrize("result", [BIG, {"content": [{"type": "text", "text": BIG}], "isError": False}])
def test_codex_takes_the_preview_as_the_reason(root: Path, bare_fusefs: Fusefs, result: object) -> None:
    said = answer(bare_fusefs, claude(result, turn_id="1", model="m"), root)
    assert said.keys() == {"decision", "reason"}
    assert said["decision"] == "block"
    assert Path(f"{root}{path_in(said['reason'])}").read_text() == BIG


@pytest.mark.parametrize("content", [BIG, [{"text": BIG}], [BIG]])
def test_gemini_cli_takes_the_preview_as_the_reason(root: Path, bare_fusefs: Fusefs, content: object) -> None:
    event = {
        "session_id": "g", "hook_event_name": "AfterTool", "tool_name": "run_shell_command", "tool_input": {},
        "tool_response": {"llmContent": content, "returnDisplay": BIG},
    }  # fmt: skip
    said = answer(bare_fusefs, event, root)
    assert said["decision"] == "deny"
    assert Path(f"{root}{path_in(said['reason'])}").read_text() == BIG


def test_a_result_of_unknown_form_is_stored_as_json(root: Path, bare_fusefs: Fusefs) -> None:
    result = {"rows": [{"n": number, "text": "x" * 100} for number in range(1000)]}
    said = answer(bare_fusefs, claude(result), root, "--agent-kind", "codex")
    assert json.loads(Path(f"{root}{path_in(said['reason'])}").read_text()) == result


@pytest.mark.parametrize(
    "tool", ["Read", "Grep", "read_file", "mcp__fusefs__read_file", "read_many_files", "write_file"]
)
def test_case_l15_the_hook_leaves_file_tools_alone(root: Path, bare_fusefs: Fusefs, tool: str) -> None:
    before = stored(root)
    assert answer(bare_fusefs, claude({"file": {"content": BIG * 10}}, tool), root) is None
    assert stored(root) == before


@pytest.mark.parametrize(
    "response",
    ["short", {"stdout": "short"}, {"stdout": "A" * 200_000, "isImage": True}, 1, [], {"n": [1, None, True]}],
)
def test_what_is_short_or_no_text_stays(root: Path, bare_fusefs: Fusefs, response: object) -> None:
    before = stored(root)
    assert answer(bare_fusefs, claude(response), root) is None
    assert stored(root) == before


def test_the_hook_stores_into_the_database_as_the_agents_session(
    fusefs: Fusefs, agent: harness.Namespace, tmp_path: Path
) -> None:
    said = answer(fusefs, claude(BIG), tmp_path)
    assert path_in(said["hookSpecificOutput"]["updatedToolOutput"]) == "/large_tool_results/abc/toolu_1"
    assert agent.execute("select content from agent_files where path like '/large%%toolu_1'") == [(BIG,)]


def test_agent_on_the_hooks_command_line_goes_before_the_mount(
    root: Path, fusefs: Fusefs, agent: harness.Namespace
) -> None:
    answer(fusefs, claude(BIG, tool_use_id="hooked"), root, "--tenant", agent.tenant, "--agent", agent.agent)
    assert agent.execute("select path from agent_files where content <> ''") == [("/large_tool_results/abc/hooked",)]
    assert not (root / "large_tool_results" / "s-mount" / "hooked").exists()


def test_a_hook_that_cannot_store_cuts(bare_fusefs: Fusefs, tmp_path: Path) -> None:
    done = bare_fusefs("offload-hook", stdin=json.dumps(claude(BIG, cwd=str(tmp_path))).encode())
    assert is_cut(json.loads(done.stdout)["hookSpecificOutput"]["updatedToolOutput"], "in no mounted namespace")
    assert "could not be stored (NotFound); it is cut" in done.stderr


BAD_INPUTS: list[bytes] = [
    b"", b"\0", b"not json", b"null", b"[]", b"7", b'"x"', b"{}", b'{"hook_event_name": "Stop"}', b"{" * 100_000,
    b"[" * 100_000, b"\xff\xfe", b"9" * 10_000,
    b'{"hook_event_name": "PostToolUse"}',
    b'{"hook_event_name": "PostToolUse", "tool_name": null, "tool_response": "x"}',
    b'{"hook_event_name": "PostToolUse", "tool_name": "Bash", "tool_response": null}',
    b'{"hook_event_name": ["PostToolUse"], "tool_name": "Bash", "tool_response": "x"}',
]  # fmt: skip


@pytest.mark.parametrize("data", BAD_INPUTS, ids=range(len(BAD_INPUTS)))
def test_input_that_is_no_event_changes_nothing(bare_fusefs: Fusefs, data: bytes) -> None:
    done = bare_fusefs("offload-hook", stdin=data)
    assert done.stdout == b""
    assert done.stderr.startswith("fusefs: the hook's input is not understood (it")
    assert done.stderr.endswith("; nothing was changed\n")
    assert done.stderr.count("\n") == 1


def test_huge_input_changes_nothing(bare_fusefs: Fusefs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agenthooks, "MAX_INPUT_BYTES", 1000)
    done = bare_fusefs("offload-hook", stdin=json.dumps(claude(BIG)).encode())
    assert (done.stdout, done.stderr) == (
        b"", "fusefs: the hook's input is not understood (it has more than 1000 bytes); nothing was changed\n"
    )  # fmt: skip


def test_a_fault_of_ours_changes_nothing(bare_fusefs: Fusefs, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object) -> None:
        raise RuntimeError("the secret content")

    monkeypatch.setattr(agenthooks, "long_texts", broken)
    done = bare_fusefs("offload-hook", stdin=json.dumps(claude(BIG)).encode())
    assert (done.stdout, done.stderr) == (b"", "fusefs: internal error (RuntimeError); nothing was changed\n")


@pytest.mark.parametrize("args", [["--nope"], ["--token-limit", "x"], ["--config", "/nowhere.toml"], ["more"]])
def test_a_hook_that_is_set_up_wrongly_does_not_end_with_2(bare_fusefs: Fusefs, args: list[str]) -> None:
    """With 2 Claude Code shows stderr as an error of the tool, and Gemini CLI withholds the result."""
    bare_fusefs.fails(1, "offload-hook", *args)


KEYS = st.sampled_from(
    ["llmContent", "content", "text", "stdout", "persistedOutputPath", "isImage", "mimeType", "data"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | KEYS, inner, max_size=4),
    max_leaves=20,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(JSON, st.text(max_size=20), st.sampled_from(agenthooks.Agent), JSON, JSON)
def test_any_json_leaves_the_agent_whole(
    bare_fusefs: Fusefs, response: object, tool: str, kind: agenthooks.Agent, call_id: object, cwd: object
) -> None:
    event = claude(response, tool, tool_use_id=call_id, cwd=cwd)
    done = bare_fusefs(
        "offload-hook", "--agent-kind", kind.value, "--token-limit", "1", stdin=json.dumps(event).encode()
    )
    if done.stdout:
        json.loads(done.stdout)


# The plugin for OpenCode


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_plugin_for_opencode_replaces_in_place(root: Path, tmp_path: Path) -> None:
    script = f"""
        const {{ FusefsOffload }} = await import({json.dumps(str(harness.ROOT / "docs/howto/opencode-offload.mjs"))});
        const hooks = await FusefsOffload({{ directory: {json.dumps(str(root))} }});
        const big = "x".repeat(100000);
        const after = async (tool, callID, output) => {{
          await hooks["tool.execute.after"]({{ tool, callID, sessionID: "s", args: {{}} }}, output);
          return output;
        }};
        const picture = {{ type: "image", data: "AAAA" }};
        console.log(JSON.stringify([
          await after("bash", "oc-1", {{ title: "t", output: big, metadata: {{}} }}),
          await after("web_fetch", "oc-2", {{ content: [{{ type: "text", text: big }}, picture] }}),
          await after("read", "oc-3", {{ title: "t", output: big }}),
          await after("bash", "oc-4", {{ title: "t", output: "short" }}),
        ]));
    """
    env = {**environment(tmp_path), "PATH": f"{harness.FUSEFS.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["node", "--input-type=module", "-e", script], capture_output=True, env=env, check=True)
    bash, mcp, read, short = json.loads(done.stdout)
    assert path_in(bash["output"]) == "/large_tool_results/s-mount/oc-1"
    assert (bash["title"], bash["metadata"]) == ("t", {})
    assert path_in(mcp["content"][0]["text"]) == "/large_tool_results/s-mount/oc-2"
    assert mcp["content"][1] == {"type": "image", "data": "AAAA"}
    assert read["output"] == "x" * 100_000
    assert short["output"] == "short"
    assert (root / "large_tool_results" / "s-mount" / "oc-1").read_text() == "x" * 100_000
