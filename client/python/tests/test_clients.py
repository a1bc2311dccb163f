"""Both clients against the fake server: the same tests, once with threads and once with asyncio."""

import asyncio
import io
import json
import os
import signal
import ssl
import subprocess
import threading
import time

import pytest
from fake import Fake

import dsec
from dsec import (
    CommandFailed, DeadlineExceeded, Denied, Exhausted, Lost, NotFound, Selector, State, Unavailable, VersionMismatch, WebSocketClosed,
)
from dsec._aio.transport import within
from dsec._ops import Attempts, Resuming


@pytest.fixture
def sb(client):
    return client.run_container(environment="e", key="K")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(Attempts, "DELAYS", (0.001,) * 6)
    monkeypatch.setattr(Resuming, "failed", _failed)


def _failed(self, e):
    self._failures += 1
    if self._failures > 20:
        raise e
    return 0.001


# Calls.


def test_exec(sb, fake):
    r = sb.exec("show", b"\xff", env={"A": "1"}, secret_env=["A"], cwd="/w", user="u", stdin="in", timeout=1.5, output_cap=10, id="S1")
    assert (r.id, r.ok, r.exit_code, r.stderr) == ("S1", True, 0, b"err") and r.check() is r
    q = json.loads(r.stdout)
    assert q["argv_raw"] == ["c2hvdw==", "/w=="] and q["env"] == [{"name": "A", "value": "1", "secret": True}]
    assert (q["cwd"], q["user"], q["stdin"], q["timeout_ms"], q["output_cap"]) == ("/w", "u", "aW4=", 1500, 10)
    assert sb.exec(["show", "x"]).text.startswith("{")
    failed = sb.exec("fail")
    assert (failed.ok, failed.exit_code) == (False, 3)
    with pytest.raises(CommandFailed, match="exit code 3: it broke"):
        failed.check()
    with pytest.raises(Lost):
        sb.exec("lost").check()
    with pytest.raises(TypeError):
        sb.exec("x", wrong=1)


def test_long_poll(sb, fake):
    fake.polls_before_end = 3
    assert sb.exec("x").stdout == b"out"
    assert len(fake.named("CommandService/Wait")) == 4
    p = sb.start("x")
    fake.polls_before_end = 10**6
    with pytest.raises(DeadlineExceeded):
        p.wait(0.05)


@pytest.mark.parametrize("fault", ["refuse", "drop", "unavailable"])
def test_never_twice(client, fake, fault):
    for name in ("SandboxService/Create", "CommandService/Start"):
        fake.faults[name] += [fault] * 3
    sb = client.run_container(environment="e")
    assert sb.exec("x").ok
    assert len(fake.sandboxes) == 1 and list(fake.executed.values()) == [1]
    assert len({q["key"] for q in fake.named("SandboxService/Create")}) == 1


def test_attempts_are_bounded(client, fake):
    fake.faults["SandboxService/Get"] += ["unavailable"] * 100
    with pytest.raises(Unavailable):
        client.get("x")
    assert len(fake.named("SandboxService/Get")) == 7


def test_what_has_no_key_is_not_sent_again(client, fake):
    for name, call in (("IamService/CreateKey", client.keys.create), ("LayerService/PublishLayer", lambda: client.layers.publish("a", "b"))):
        fake.faults[name] += ["drop"]
        with pytest.raises(Unavailable):
            call()
        assert len(fake.named(name)) == 1
        call()


def test_no_server(open_client, tmp_path):
    c = open_client(f"unix:{tmp_path}/nothing", timeout=5)
    with pytest.raises(Unavailable, match="dsec up") as e:
        c.keys.create()
    assert e.value.unsent


def test_errors(client, fake, open_client):
    with pytest.raises(NotFound) as e:
        client.get("nothing")
    assert e.value.code == "not_found" and "nothing" in e.value.message
    with pytest.raises(Exhausted):
        client.run_container(environment="full").id
    with pytest.raises(Denied):
        open_client(fake.url, key="wrong").get("x")
    with pytest.raises(Denied):
        open_client(fake.url, key="wrong").__enter__()
    fake.protocol = (2, 3)
    with pytest.raises(VersionMismatch, match="upgrade this client"):
        client.__enter__()


def test_deadline(open_client, fake):
    c = open_client(fake.url, timeout=0.5)
    fake.faults["SandboxService/Get"] += ["hang"]
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded) as e:
        c.get("x")
    assert isinstance(e.value, TimeoutError) and time.monotonic() - start > 0.49


def test_idle_connections_are_used_again(client, fake):
    for _ in range(5):
        client.server()
    assert fake.connections == 1


# Life.


def test_context_manager_stops(client, fake):
    with pytest.raises(ZeroDivisionError):
        with client.run_container(environment="e", key="K") as sb:
            assert sb.id and sb.info.created.microsecond == 123456
            1 / 0
    assert fake.sandboxes["K"]["state"] == "stopped"
    fake.faults["SandboxService/Stop"] += ["hang"]
    with pytest.raises(ZeroDivisionError):  # a stop that fails does not hide what ended the block
        with client.run_container(environment="e", key="L"):
            fake.faults["SandboxService/Stop"] = ["unavailable"] * 20
            1 / 0


def test_batch(client, fake):
    with client.run_containers(3, environment="e", key="B") as batch:
        assert len(batch) == 2 and [s.id for s in batch] == [batch[0].id, batch[1].id]
        assert batch.errors[0].index == 2 and isinstance(batch.errors[0].error(), Exhausted)
    assert [fake.sandboxes[f"B/{i}"]["state"] for i in (1, 2)] == ["stopped", "stopped"]
    assert len(client.run_containers(3, all=True, environment="e", key="A")) == 3


def test_lists(client, fake):
    for i in range(5):
        assert client.run_container(environment="e", key=f"k{i}").id
    assert [s.info.key for s in client.list()] == [f"k{i}" for i in range(5)]
    client.stop(Selector(job="j", labels={"a": "b"}))
    assert fake.named("SandboxService/Stop")[-1] == {"selector": {"job": "j", "labels": {"a": "b"}}}


def test_migrate(client, fake):
    sb = client.run_container(environment="e")
    assert sb.migrate().host == "another" and sb.migrate("hother").host == "hother"
    assert fake.named("SandboxService/Migrate") == [{"id": sb.id}, {"id": sb.id, "to": "hother"}]


def test_create_without_an_answer_is_stopped_by_its_key(open_client, fake):
    c = open_client(fake.url, timeout=2)  # of which the stop needs a little
    fake.faults["SandboxService/Create"] += ["hang"]
    with pytest.raises(DeadlineExceeded):
        c.run_container(environment="e", job="j", name="n").__len__()
    q, = fake.named("SandboxService/Create")
    assert fake.named("SandboxService/Stop") == [{"key": q["key"], "job": "j", "name": "n"}]
    fake.faults["SandboxService/Create"] += ["hang"]
    with pytest.raises(DeadlineExceeded):  # the caller's own key: the caller may send it again
        c.run_container(environment="e", key="mine").__len__()
    assert len(fake.named("SandboxService/Stop")) == 1


def test_job(client, fake):
    with client.job("j", lease=0.06, on_lease_end="pause") as job:
        sb = job.run_container(environment="e")
        assert fake.sandboxes[sb.info.key]["job"] == "j"
        until = time.monotonic() + 60
        while fake.renewals < 2 and time.monotonic() < until:
            time.sleep(0.01)
        assert fake.renewals >= 2
    assert fake.named("JobService/Put") == [{"job": {"name": "j", "lease_ms": 60, "on_lease_end": "pause"}}]
    assert fake.named("JobService/Stop") == [{"name": "j"}]
    time.sleep(0.1)
    n = fake.renewals
    time.sleep(0.1)
    assert fake.renewals == n


def test_lost_lease(client, fake):
    job = client.job("j", lease=0.06)
    assert not job.lost
    fake.faults["JobService/Renew"] += ["unavailable"] * 10_000
    until = time.monotonic() + 60
    while not (job.lost and job.error) and time.monotonic() < until:
        time.sleep(0.01)
    assert job.lost and isinstance(job.error, dsec.DsecError)
    job.detach()


# Streams.


@pytest.mark.parametrize("faults", [[], ["cut:0", "cut:1", "cut:2", "unavailable", "refuse"]])
def test_output_is_whole(sb, fake, faults):
    p = sb.start("show", "x" * 100)
    fake.faults["CommandService/Attach"] += faults
    out, at = b"", 0
    for c in p:
        if c.stream == "stderr":
            assert c.missing == 7
            continue
        assert c.offset == at
        out, at = out + c.data, at + len(c.data)
    assert out == fake.commands[p.id][0] and p.outcome.ok
    assert [c.data for c in p.output(stdout_offset=len(out) - 2) if c.stream == "stdout"] == [out[-2:]]


def test_output_of_a_broken_server(sb, fake):
    p = sb.start("x")
    fake.faults["CommandService/Attach"] += ["refuse"] * 100
    with pytest.raises(Unavailable):
        list(p)


@pytest.mark.parametrize("faults", [[], ["cut:3", "cut:0", "drop", "cut:2"]])
def test_log(client, fake, faults):
    fake.faults["LogService/Read"] += faults
    assert [(r.seq, r.data) for r in client.log("x", from_seq=2)] == [(i + 1, b"%d" % i) for i in range(1, 10)]


@pytest.mark.parametrize("fault", ["drop", "refuse"])
def test_stdin(sb, fake, fault):
    p = sb.start("cat", stdin_open=True)
    fake.faults["CommandService/WriteStdin"] += [fault]
    fake.stdin_room = 100_000
    data = os.urandom(700_000)
    p.write(data)
    p.write("more")
    p.close_stdin()
    assert bytes(fake.stdin) == data + b"more"
    sb.process(p.id).write("!")
    assert fake.stdin.endswith(b"more!")
    p.signal("TERM")
    p.kill()
    assert [q.get("name") for q in fake.named("CommandService/Signal")] == ["TERM", "KILL"]


def test_session(sb, fake):
    with sb.session(name="s", cwd=b"/\xff") as sh:
        assert sh.run("show").ok and sh.name == "s"
    assert fake.named("CommandService/OpenSession")[0]["cwd_raw"] == "L/8="
    assert fake.named("CommandService/CloseSession") == [{"sandbox": sb.id, "name": "s"}]


# Files.


@pytest.mark.parametrize("fault", ["", "drop", "refuse", "unavailable"])
def test_write_is_sent_again(sb, fake, fault):
    path = b"/d/\xff n&m?"
    data = os.urandom(900_000)
    for body in (data, io.BytesIO(b"skip" + data)):
        fake.faults["PUT files"] += [fault] if fault else []
        if not isinstance(body, bytes):
            body.seek(4)
        r = sb.files.write(path, body, mode=0o700)
        assert fake.files[path] == data and r.existed == (fault == "drop")
    assert fake.calls[-1][1]["mode"] == b"700" and fake.calls[-1][1]["parents"] == b"true"
    assert sb.files.read(path) == data and sb.files.read(path, offset=10, length=5) == data[10:15] and sb.files.read(path, length=0) == b""
    assert [f.path for f in sb.files.list("/")] == ["/d/\udcff n&m?"]
    sb.files.append("/log", "line\n", start=0, step="S")
    sb.files.append("/log", "line\n", step="S")
    assert fake.files[b"/log"] == b"line\n" and sb.files.read_text("/log") == "line\n"


def test_bodies_that_come_once(sb, fake):
    sb.files.write("/a", iter([b"x" * 300_000, b"", b"y"]))
    assert fake.files[b"/a"] == b"x" * 300_000 + b"y"
    fake.faults["PUT files"] += ["drop"]
    with pytest.raises(Unavailable):
        sb.files.write("/b", iter([b"x"]))

    def broken():
        yield b"x" * 300_000
        raise OSError("the disk")

    with pytest.raises(OSError, match="the disk"):
        sb.files.write("/c", broken())
    with pytest.raises(TypeError):
        sb.files.write("/c", io.StringIO("text"))
    assert sb.files.exists("/a") and not sb.files.exists("/c")


def test_refusal_before_the_body_is_read(sb):
    with pytest.raises(Denied, match="refused"):
        sb.files.write("/refused", (b"x" * 262_144 for _ in range(400)))


def test_a_body_that_breaks_off_is_no_short_body(sb, fake):
    fake.files[b"/f"] = os.urandom(5000)
    fake.faults["GET files"] += ["cut:3"]
    got = []
    with pytest.raises(Unavailable):
        for piece in sb.files.read_stream("/f"):
            got.append(piece)
    assert b"".join(got) == fake.files[b"/f"][:3000]
    assert sb.files.read("/f") == fake.files[b"/f"]


def test_files_and_trees(sb, fake, tmp_path):
    (tmp_path / "src" / "d").mkdir(parents=True)
    (tmp_path / "src" / "d" / "f").write_bytes(os.urandom(100_000))
    fake.faults["PUT trees"] += ["drop"]
    assert sb.files.upload(str(tmp_path / "src"), "/t").applied > 100_000
    assert sb.files.download_tree("/t", tmp_path / "back") == ["a ä: socket"]
    assert (tmp_path / "back" / "d" / "f").read_bytes() == (tmp_path / "src" / "d" / "f").read_bytes()
    assert b"".join(sb.files.download_tar("/t")) == fake.files[b"/t"]
    sb.files.upload(tmp_path / "src" / "d" / "f", "/x/y")
    assert fake.calls[-1][1]["path"] == b"/x"
    fake.files[b"/one"] = b"1" * 5000
    sb.files.download("/one", tmp_path / "one")
    st = os.stat(tmp_path / "one")
    assert (st.st_size, st.st_mode & 0o777, st.st_mtime) == (5000, 0o755, 981173106)
    fake.faults["GET files"] += ["cut:1"]
    with pytest.raises(Unavailable):
        sb.files.download("/one", tmp_path / "two")
    assert sorted(os.listdir(tmp_path)) == ["back", "dsec.sock", "one", "src"]
    with pytest.raises(FileNotFoundError):
        sb.files.upload("/nonexistent", "/x")


def test_watch(sb):
    assert [e.kind for e in sb.files.watch("/")] == ["ready", "created"]


def test_layers(client, fake, tmp_path):
    (tmp_path / "f").write_bytes(b"x" * 700_000)
    got = client.layers.import_folder(tmp_path, "base/x")
    assert got.published == "base/x" and got.layer.octets > 700_000
    assert client.layers.import_tar(b"123").layer.octets == 3
    fake.faults["PUT layers"] += ["drop"]
    with pytest.raises(Unavailable):
        client.layers.import_tar(b"123", "named")
    fake.faults["PUT layers"] += ["drop"]
    assert client.layers.import_tar(b"123").layer.octets == 3
    assert client.layers.list()[0].versions == {1: "sha256:1"}


# Ports.


def test_http_to_a_port(sb, fake):
    port = sb.port(80)
    r = port.get("/a b/ä?q=1 2")
    assert (r.status, r.text, r.header("X-App")) == (200, "hello", "yes")
    assert fake.calls[-1][1]["path"] == f"/v1/ports/{sb.id}/80/a%20b/%C3%A4?q=1%202" and fake.calls[-1][1]["authorization"] == "Bearer dsec-test"
    assert port.request("POST", "x", body=b"data", headers={"Authorization": "app"}).body == b"data"
    assert fake.calls[-1][1]["authorization"] == "app" and fake.calls[-1][1]["x-api-key"] == "dsec-test"
    port.get("/", headers={"authorization": "app", "X-Api-Key": "app"})
    assert fake.calls[-1][1]["path"].endswith("/?dsec_key=dsec-test") and fake.calls[-1][1]["x-api-key"] == "app"
    assert sb.port(82).get("/").status == 500  # the application's own
    with pytest.raises(State, match="^nothing listens"):
        sb.port(81).get("/")
    with pytest.raises(State):
        sb.port(81).wait(timeout=0.05)
    with port.open("GET", "/") as r:
        assert b"".join(r.pieces()) == b"hello"
    for bad in (0, 65536):
        with pytest.raises(dsec.Invalid):
            sb.port(bad)


def test_upgrade(sb):
    with sb.port(80).upgrade("/", "echo") as c:
        got = b""
        while len(got) < 5:
            got += c.recv(5)
        assert got == b"early"
        with pytest.raises(DeadlineExceeded):
            c.recv(0.05)
        c.send(b"hello")
        assert c.recv(5) == b"HELLO"
    with pytest.raises(State):
        sb.port(81).upgrade()


def test_websocket(sb, fake):
    with sb.port(80).websocket("/ws", ["chat", "other"]) as w:
        assert w.protocol == "chat"
        for message in ("hällo", b"\xff" * 70_000, "", b"x" * 300_000):
            w.send(message)
            got = w.recv(60)
            assert got == message if len(message) < 100_000 else len(got) == len(message)
        w.ping(b"p")
        w.send("bye")
        with pytest.raises(WebSocketClosed) as e:
            w.recv(60)
        assert (e.value.code, e.value.reason) == (4001, "enough")
    assert ("frame", (10, b"are you there")) in fake.calls
    w = sb.port(80).websocket("/ws")
    w.close(4002, "done")
    assert fake.calls[-1] == ("frame", (8, b"\x0f\xa2done"))
    with pytest.raises(Unavailable, match="500"):
        sb.port(82).upgrade("/", "")


# TCP, TLS.


def test_tcp(open_client, tmp_path):
    fake = Fake(str(tmp_path), tcp=True)
    with open_client(fake.url) as c:
        assert c.run_container(environment="e").exec("x").ok
    fake.close()


def test_tls(open_client, tmp_path):
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", tmp_path / "key", "-out", tmp_path / "cert",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"], capture_output=True)
    if made.returncode != 0:
        pytest.skip("no openssl to make a certificate")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    fake = Fake(str(tmp_path), tcp=True, tls=server)
    trust = ssl.create_default_context(cafile=str(tmp_path / "cert"))
    with open_client(fake.url, tls=trust) as c:
        sb = c.run_container(environment="e")
        assert sb.files.write("/f", b"x" * 600_000).written == 600_000 and len(sb.files.read("/f")) == 600_000
        with sb.port(80).upgrade("/", "echo") as up:
            up.send(b"a")
            assert up.recv(5)
    with pytest.raises(Unavailable, match="(?i)certificate"):
        open_client(fake.url, timeout=5).server()
    fake.close()


# What only one of them can show.


def test_ctrl_c_during_a_create(fake):
    c = dsec.Client(fake.url, "dsec-test")
    fake.faults["SandboxService/Create"] += ["hang"]
    threading.Thread(target=lambda: (fake.hung.wait(10), os.kill(os.getpid(), signal.SIGINT)), daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        c.run_container(environment="e", key="K", job="j")
    assert fake.named("SandboxService/Stop") == [{"key": "K", "job": "j"}]


def test_ctrl_c_during_a_stop(fake):
    c = dsec.Client(fake.url, "dsec-test")
    fake.faults["SandboxService/Stop"] += ["hang"]
    threading.Thread(target=lambda: (fake.hung.wait(10), os.kill(os.getpid(), signal.SIGINT)), daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        with c.run_container(environment="e", key="K"):
            pass
    assert fake.sandboxes["K"]["state"] == "stopped"


def test_cancelled_creates_leave_nothing(fake):
    async def main():
        async with dsec.AsyncClient(fake.url, "dsec-test") as c:
            fake.faults["SandboxService/Create"] += ["hang"]
            task = asyncio.ensure_future(c.run_container(environment="e", key="K").__aenter__())
            await asyncio.get_running_loop().run_in_executor(None, fake.hung.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert fake.named("SandboxService/Stop") == [{"key": "K"}]
            fake.faults["SandboxService/CreateBatch"] += ["hang"]
            fake.hung.clear()
            task = asyncio.ensure_future(c.run_containers(3, environment="e", key="B").__aenter__())
            await asyncio.get_running_loop().run_in_executor(None, fake.hung.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert fake.named("SandboxService/Stop")[1:] == [{"key": f"B/{i}"} for i in (1, 2, 3)]

    asyncio.run(main())


def test_a_stop_survives_a_second_cancellation(fake):
    async def main():
        async with dsec.AsyncClient(fake.url, "dsec-test") as c:
            async def block():
                async with c.run_container(environment="e", key="K"):
                    inside.set()
                    await asyncio.sleep(60)

            inside = asyncio.Event()
            task = asyncio.ensure_future(block())
            await inside.wait()
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert fake.sandboxes["K"]["state"] == "stopped"  # close waited for it

    asyncio.run(main())


def test_timeout_around_an_exec(fake):
    async def main():
        async with dsec.AsyncClient(fake.url, "dsec-test") as c:
            with pytest.raises(asyncio.TimeoutError):
                async with c.run_container(environment="e", key="K") as sb:
                    fake.faults["CommandService/Start"] += ["hang"]
                    await asyncio.wait_for(sb.exec("x"), 0.1)
            assert fake.sandboxes["K"]["state"] == "stopped"
            assert (await c.server()).version == "fake"

    asyncio.run(main())


def test_cancellation_in_the_moment_of_the_result():
    """A task that is cancelled when its connection has just been made must not go on: a job's renewing would never end."""
    async def main():
        for reached in (True, False):
            opened, dropped = asyncio.get_running_loop().create_future(), []
            waiting = asyncio.ensure_future(within(60, opened, dropped.append))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if reached:
                opened.set_result("connection")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await asyncio.sleep(0)
            assert dropped == (["connection"] if reached else []) and opened.cancelled() != reached
        with pytest.raises(asyncio.TimeoutError):
            await within(0.01, asyncio.get_running_loop().create_future())
        with pytest.raises(OSError):
            await within(60, asyncio.open_unix_connection("/nonexistent/socket"))
        assert await within(60, asyncio.sleep(0, "result")) == "result"

    asyncio.run(main())


def test_one_client_on_several_loops(fake):
    c = dsec.AsyncClient(fake.url, "dsec-test")
    for _ in range(3):
        assert asyncio.run(c.server()).version == "fake"


def test_many_tasks_and_threads(fake):
    async def main():
        async with dsec.AsyncClient(fake.url, "dsec-test") as c:
            sb = await c.run_container(environment="e")
            assert all(r.ok for r in await asyncio.gather(*(sb.exec("x") for _ in range(100))))

    asyncio.run(main())
    with dsec.Client(fake.url, "dsec-test") as c:
        sb = c.run_container(environment="e")
        results = []
        threads = [threading.Thread(target=lambda: results.extend(sb.exec("show", "x").ok for _ in range(10))) for _ in range(10)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert results == [True] * 100
    assert set(fake.executed.values()) == {1}


def test_async_pieces(fake):
    async def pieces():
        for _ in range(5):
            yield b"x" * 100_000
            await asyncio.sleep(0)

    async def main():
        async with dsec.AsyncClient(fake.url, "dsec-test") as c:
            sb = await c.run_container(environment="e")
            assert (await sb.files.write("/f", pieces())).written == 500_000
            with pytest.raises(Denied):
                await sb.files.write("/refused", pieces())

    asyncio.run(main())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_forked_process_has_its_own_connections(fake):
    c = dsec.Client(fake.url, "dsec-test")
    c.server()
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if c.server().version == "fake" and c._t._pid == os.getpid() else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    for _ in range(3):
        assert c.server().version == "fake"
