"""What an operator sees of a running daemon: the endpoint for Prometheus, and what is sent by OTLP."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests import harness
from tests.collector import Collector, Scrape, attributes, collecting
from tests.mount.sides import eventually
from tests.relay import Line

pytestmark = pytest.mark.kernel
METRICS = ("--metrics", "127.0.0.1:0")
HOWTO = harness.ROOT / "docs" / "howto"
LABELS = {"op", "error_type", "handler", "cache", "hango_tenant_id", "le"}
"""Every label that a metric of ours may have."""


def scrape(mount: harness.Mount) -> Scrape:
    return Scrape(str(mount.ready["metrics"]))


def settled(mount: harness.Mount) -> Scrape:
    """A scrape after the first files: what happens once in a mount has happened, and the files are counted."""
    (mount.path / "first").write_text("first")
    released(mount, 1)
    eventually(
        lambda: scrape(mount).value("hango_fs_file_count", hango_tenant_id=mount.ready["tenant_id"]) > 1, "usage"
    )
    return scrape(mount)


def released(mount: harness.Mount, count: float) -> None:
    """Wait for the kernel's last word on so many open files: RELEASE is asynchronous."""
    eventually(lambda: scrape(mount).by("hango_fs_requests_total", "handler").get("release", 0) >= count, "release")


# Prometheus


def test_operations_are_counted_exactly(mount: harness.MountFactory) -> None:
    mounted = mount(*METRICS, session="s1")
    tenant = {"hango_tenant_id": mounted.ready["tenant_id"]}
    before = settled(mounted)
    for number in range(3):
        (mounted.path / f"f{number}").write_bytes(b"x" * 10 * (number + 1))
    for number in range(2):
        os.unlink(mounted.path / f"f{number}")
    released(mounted, 4)
    after = scrape(mounted)

    def grew(name: str, /, **labels: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    assert grew("hango_fs_operations_total", op="write") == 3
    assert grew("hango_fs_operations_total", op="delete") == 2
    assert grew("hango_fs_duration_seconds_count", op="write") == 3
    assert grew("hango_fs_duration_seconds_bucket", op="write", le="+Inf") == 3
    assert 0 < grew("hango_fs_duration_seconds_sum", op="write") < harness.READY_DEADLINE_S
    assert grew("hango_fs_bytes_written_bytes_total") == 60
    assert grew("hango_fs_file_count", **tenant) == 1
    assert after.value("hango_fs_file_count", **tenant) == 4  # with /memories and /skills
    handlers = ("create", "write", "release", "unlink")
    assert [grew("hango_fs_requests_total", handler=name) for name in handlers] == [3, 3, 3, 2]
    assert grew("hango_fs_pool_trips_total") >= 5
    assert after.value("hango_fs_listener_live") == 1
    assert (after.value("hango_fs_sessions"), after.value("hango_fs_namespaces")) == (1, 1)
    assert after.value("hango_fs_handles") == 0
    quiet = ("conflicts_total", "rescued_total", "log_errors_total", "announcements_total", "pool_waiting")
    assert [after.value(f"hango_fs_{name}") for name in quiet] == [0] * len(quiet)
    assert all(f"hango_fs_{name}" in after.names for name in quiet)


def test_the_endpoint_agrees_with_the_control_directory(mount: harness.MountFactory) -> None:
    mounted = mount(*METRICS, session="s1")
    settled(mounted)
    with open(mounted.path / "first") as held:
        assert held.read() == "first"
        status = mounted.status()
        seen = scrape(mounted)
        for name in ("sessions", "namespaces", "nodes"):
            assert seen.value(f"hango_fs_{name}") == status[name], name
        assert seen.value("hango_fs_content_cache_bytes") == status["content_cache_bytes"]
        assert seen.value("hango_fs_pool_size") == status["pool"]["open"]
        assert seen.value("hango_fs_cache_hits_total", cache="content") == status["cache_hits"]["content"]
        assert seen.value("hango_fs_cache_misses_total", cache="directory") == status["cache_misses"]["directory"]
        assert seen.value("hango_fs_listener_reconnects_total") == status["listener_reconnects"] == 0
        assert seen.value("hango_fs_inodes") >= 2
        assert seen.value("hango_fs_handles") >= 1


def test_another_writer_and_a_lost_race_are_seen(mount: harness.MountFactory) -> None:
    mine, other = mount(*METRICS, session="s1"), mount(session="s2")
    settled(mine)
    fd = os.open(mine.path / "first", os.O_RDWR)
    os.write(fd, b"mine!")
    (other.path / "first").write_text("theirs")
    eventually(lambda: scrape(mine).value("hango_fs_announcements_total") == 1, "the announcement")
    with pytest.raises(OSError, match="Stale"):
        os.close(fd)
    seen = scrape(mine)
    assert seen.value("hango_fs_conflicts_total") == 1
    assert seen.value("hango_fs_operations_total", op="write") == 1


def test_postgres_away_is_seen(mount: harness.MountFactory, pg: str, tmp_path: Path) -> None:
    with Line(pg) as line:
        rescue = ("--rescue-dir", str(tmp_path / "rescue"))
        mounted = mount(*METRICS, "--write-timeout", "0.5", *rescue, session="s1", dsn=line.dsn)
        mounted.expect_log(r"fs\.write_rescued|NotConnected|LostInFlight|Unavailable")
        settled(mounted)
        fd = os.open(mounted.path / "first", os.O_WRONLY | os.O_APPEND)
        os.write(fd, b"more")
        line.shut()
        with pytest.raises(OSError):
            os.close(fd)
        eventually(lambda: scrape(mounted).value("hango_fs_listener_live") == 0, "the loss")
        away = scrape(mounted)
        assert away.value("hango_fs_operations_total", op="append", error_type="NotConnected") == 1
        assert away.value("hango_fs_duration_seconds_count", op="append", error_type="NotConnected") == 1
        eventually(lambda: scrape(mounted).value("hango_fs_rescued_total") == 1, "the rescue")
        eventually(
            lambda: (
                scrape(mounted).value("hango_fs_listener_silence_seconds")
                > away.value("hango_fs_listener_silence_seconds")
            ),
            "the silence grows",
        )
        line.open()
        eventually(lambda: scrape(mounted).value("hango_fs_listener_live") == 1, "the way back")
        back = scrape(mounted)
        assert back.value("hango_fs_listener_reconnects_total") == 1
        assert back.value("hango_fs_listener_lag_seconds") > 0
        mounted.umount()


def test_no_path_and_no_content_is_in_a_label(mount: harness.MountFactory) -> None:
    mounted = mount(*METRICS, session="session-of-the-test")
    (mounted.path / "telltale-directory").mkdir()
    (mounted.path / "telltale-directory" / "telltale-name").write_text("telltale-content")
    seen = settled(mounted)
    for word in ("telltale", "session-of-the-test", str(mounted.path), mounted.ready["agent"], mounted.ready["tenant"]):
        assert word not in seen.text
    labels = {label for name, labels, _ in seen.samples if name.startswith("hango_") for label in labels}
    assert labels <= LABELS


def test_a_client_that_says_nothing_holds_up_nobody(mount: harness.MountFactory) -> None:
    mounted = mount(*METRICS, session="s1")
    host, _, port = str(mounted.ready["metrics"]).rpartition(":")
    with socket.create_connection((host, int(port))), socket.create_connection((host, int(port))) as half:
        half.sendall(b"GET /metrics HT")
        assert settled(mounted).value("hango_fs_listener_live") == 1
        mounted.umount()


def test_a_host_has_its_sessions(mount: harness.MountFactory, namespace: harness.Namespace) -> None:
    mounted = mount(*METRICS, layout="host")
    for session in ("s-1", "s-2"):
        folder = mounted.path / namespace.tenant / namespace.agent / session
        folder.mkdir()
        (folder / f"of-{session}").write_text("x")
    seen = scrape(mounted)
    assert (seen.value("hango_fs_sessions"), seen.value("hango_fs_namespaces")) == (2, 1)
    assert seen.value("hango_fs_operations_total", op="write") == 2


def test_the_endpoint_ends_with_the_mount(mount: harness.MountFactory) -> None:
    mounted = mount(*METRICS, session="s1")
    assert scrape(mounted).value("hango_fs_sessions") == 1
    mounted.terminate()
    with pytest.raises(urllib.error.URLError, match="refused"):
        scrape(mounted)
    mount("--metrics", str(mounted.ready["metrics"]), session="s2")


# What stands in the way


def command(suite_dir: Path, namespace: harness.Namespace, where: Path, *args: str, **env: str) -> tuple[int, str]:
    """Run `fusefs mount` in the background as a person does, where it must fail; its exit code and stderr."""
    names = ("--tenant", namespace.tenant, "--agent", namespace.agent)
    done = subprocess.run(
        [harness.FUSEFS, "mount", where, *names, *args],
        env=harness.command_environment(suite_dir, namespace.dsn) | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=harness.READY_DEADLINE_S,
        check=False,
    )
    assert harness.mounts_under(where) == []
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@pytest.fixture
def where(suite_dir: Path, namespace: harness.Namespace) -> Iterator[Path]:
    harness.require_fuse()
    path = suite_dir / f"obs-{namespace.agent}"
    path.mkdir()
    yield path
    path.rmdir()


def test_a_port_in_use_is_an_error_and_no_mount(suite_dir: Path, namespace: harness.Namespace, where: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, text = command(suite_dir, namespace, where, "--metrics", f":{port}")
    assert code == 14
    first, hint = text.splitlines()[-2:]
    assert first == f"fusefs: metrics cannot be served at 127.0.0.1:{port} (Address already in use)"
    assert f"sport = :{port}" in hint


@pytest.mark.parametrize("address", ["", "x", "host:", "127.0.0.1:65536", "::1:9464", "/run/x.sock"])
def test_what_is_no_address_is_refused(
    suite_dir: Path, namespace: harness.Namespace, where: Path, address: str
) -> None:
    code, text = command(suite_dir, namespace, where, "--metrics", address)
    assert code == 2
    assert text == f"fusefs: {address!r} is not an address\nhint: Write HOST:PORT, or :PORT for the loopback.\n"


@pytest.mark.parametrize(
    ("package", "extra", "args", "env"),
    [
        ("prometheus_client", "metrics", METRICS, {}),
        ("google", "otlp", (), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}),
    ],
    ids=["metrics", "otlp"],
)
def test_a_missing_extra_is_named(
    suite_dir: Path,
    namespace: harness.Namespace,
    where: Path,
    tmp_path: Path,
    package: str,
    extra: str,
    args: tuple[str, ...],
    env: dict[str, str],
) -> None:
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('none here', name={package!r})")
    code, text = command(suite_dir, namespace, where, *args, **env, PYTHONPATH=str(tmp_path))
    assert code == 2
    assert f"needs a library that is not installed ({package})" in text
    assert f"hint: Run `pip install 'fusefs[{extra}]'`." in text


# Off


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"OTEL_SERVICE_NAME": "somebody"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
    ],
    ids=["bare", "named", "disabled"],
)
def test_nothing_of_it_is_imported_while_it_is_off(mount: harness.MountFactory, more: dict[str, str]) -> None:
    mounted = mount(session="s1", env={"PYTHONPROFILEIMPORTTIME": "1", **more})
    mounted.expect_log("^import time:")
    (mounted.path / "a").write_text("a")
    mounted.umount()
    imported = re.findall(r"^import time: .*\| +(\S+)$", mounted.log_path.read_text(), re.M)
    assert "fusefs.telemetry.metrics" in imported
    heavy = ("opentelemetry", "prometheus_client", "requests", "google", "wsgiref", "http")
    assert [name for name in imported if name.split(".")[0] in heavy] == []
    own = {"fusefs.rules.address", "fusefs.telemetry.exporters", "fusefs.telemetry.mounts"}
    assert more or not own & set(imported)


# OTLP


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


def test_spans_and_metrics_are_sent(mount: harness.MountFactory, collector: Collector) -> None:
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
        "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=ours",
        "OTEL_SERVICE_NAME": "files",
    }
    mounted = mount(session="s1", env=environment)
    (mounted.path / "a.md").write_text("hello")
    (mounted.path / "b.md").write_text("hello, world")
    mounted.umount()
    writes = [span for span in collector.spans if span.name == "fs.write"]
    assert sorted(attributes(span.attributes)["hango.fs.path"] for span in writes) == ["/a.md", "/b.md"]
    assert {attributes(span.attributes)["hango.agent.id"] for span in writes} == {mounted.ready["agent_id"]}
    assert sorted(attributes(span.attributes)["hango.fs.bytes"] for span in writes) == [5, 12]
    assert all(span.end_time_unix_nano > span.start_time_unix_nano for span in writes)
    assert b"hello" not in b"".join(request.SerializeToString() for request in collector.traces)
    found = collector.last_metrics()
    (count,) = [
        point.as_int
        for point in found["hango.fs.operations"].sum.data_points
        if attributes(point.attributes) == {"op": "write"}
    ]
    assert count == 2
    assert found["hango.fs.bytes_written"].sum.data_points[0].as_int == 17
    assert found["hango.fs.bytes_written"].unit == "By"
    for request in (collector.traces[0].resource_spans, collector.metrics[0].resource_metrics):
        resource = attributes(request[0].resource.attributes)
        assert (resource["service.name"], resource["service.version"]) == ("files", "0.1.0")
    assert {headers["x-tenant"] for headers in collector.headers} == {"ours"}


def test_metrics_are_sent_while_it_runs_and_beside_the_endpoint(
    mount: harness.MountFactory, collector: Collector
) -> None:
    environment = {
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"{collector.endpoint}/v1/metrics",
        "OTEL_METRIC_EXPORT_INTERVAL": "50",
    }
    mounted = mount(*METRICS, session="s1", env=environment)
    (mounted.path / "a").write_text("hello")
    eventually(
        lambda: collector.metrics and collector.last_metrics()["hango.fs.bytes_written"].sum.data_points[0].as_int == 5,
        "the metrics",
    )
    assert collector.last_metrics()["hango.fs.listener.live"].gauge.data_points[0].as_int == 1
    assert scrape(mounted).value("hango_fs_bytes_written_bytes_total") == 5
    mounted.umount()
    assert collector.traces == []


def test_a_collector_that_is_away_costs_a_line_and_no_file(mount: harness.MountFactory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        endpoint = f"http://127.0.0.1:{gone.getsockname()[1]}"
    mounted = mount(session="s1", env={"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "10"})
    mounted.expect_log(r'"event": "telemetry\.(trouble|given_up|not_ended)"')
    (mounted.path / "a").write_text("hello")
    eventually(lambda: [one for one in mounted.log_events() if one["event"] == "telemetry.trouble"], "the complaint")
    (mounted.path / "b").write_text("hello")
    assert (mounted.path / "a").read_text() == "hello"
    mounted.terminate()
    assert not any("Traceback" in str(one) for one in mounted.log_events())


def test_a_collector_that_does_not_answer_does_not_keep_the_daemon(mount: harness.MountFactory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "600",
        }
        mounted = mount(session="s1", env=environment)
        mounted.expect_log(r'"event": "telemetry\.given_up"')
        (mounted.path / "a").write_text("hello")
        mounted.umount()  # fails after harness.EXIT_DEADLINE_S
    assert "telemetry.given_up" in [one["event"] for one in mounted.log_events()]


# The pages


def everything(mount: harness.Mount) -> Scrape:
    """A scrape with every metric in it: some appear with their first event."""
    settled(mount)
    assert (mount.path / "first").read_text() == "first"
    eventually(lambda: "hango_fs_listener_lag_seconds" in scrape(mount).names, "the first probe")
    return scrape(mount)


def named(text: str) -> set[str]:
    """The metrics that a text names, as Prometheus has them."""
    return set(re.findall(r"\b(?:hango_fs|process|target)_\w+", text)) - LABELS


def test_every_metric_of_dashboard_rules_and_page_exists(mount: harness.MountFactory) -> None:
    seen = everything(mount(*METRICS, session="s1"))
    dashboard = json.loads((HOWTO / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    rules = re.findall(r"^ +expr: (.+)$", (HOWTO / "alerts.yml").read_text(), re.M)
    assert len(expressions) > 10
    assert len(rules) > 5
    for expression in (*expressions, *rules):
        assert named(expression) or expression.startswith("up{"), expression  # Prometheus' own
        assert named(expression) <= seen.names, expression
    page = (HOWTO / "observability.md").read_text()
    families = {re.sub(r"(?<=_seconds)_(bucket|count|sum)$", "", name) for name in seen.names if "hango_fs_" in name}
    described = set(re.findall(r"^\| `(hango_fs_\w+)`", page, re.M))
    assert described == families
    for name in described:
        (dotted,) = re.findall(rf"^\| `{name}` \| `([\w.]+)` \|", page, re.M)
        assert name.startswith(dotted.replace(".", "_")), name


def test_status_says_where_the_metrics_are(mount: harness.MountFactory, suite_dir: Path, pg: str) -> None:
    mounted = mount(*METRICS, session="s1")
    done = subprocess.run(
        [harness.FUSEFS, "status", "--json"],
        env=harness.command_environment(suite_dir, pg),
        capture_output=True,
        text=True,
        check=True,
    )
    (one,) = [one for one in json.loads(done.stdout) if one["mountpoint"] == str(mounted.path)]
    assert one["metrics"] == mounted.ready["metrics"]
    assert Scrape(one["metrics"]).value("hango_fs_sessions") == one["status"]["sessions"] == 1
    assert one["status"]["listener_reconnects"] == 0
    with psycopg.connect(pg) as conn:
        assert conn.execute("select count(*) from agent_files").fetchone() == (2,)
