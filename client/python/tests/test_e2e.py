"""Against a real `dsec up` on temporary folders, with a layer made of busybox. Numbers such as B36 name reported faults of their kind."""

import asyncio
import hashlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time

import pytest

import dsec
from dsec import DeadlineExceeded, DsecError, Exists, Invalid, NotFound, Selector, State, Unavailable, Unsupported

HERE = pathlib.Path(__file__).resolve()
BINARY = os.environ.get("DSEC_BIN") or str(HERE.parents[3] / "bin" / "dsec")
BUSYBOX = "/bin/busybox"

if os.geteuid() != 0:
    pytest.skip("a host needs root", allow_module_level=True)
if not os.access(BINARY, os.X_OK):
    pytest.skip("bin/dsec is not built", allow_module_level=True)
if not os.access(BUSYBOX, os.X_OK):
    pytest.skip("no busybox-static for the layer", allow_module_level=True)


class Server:
    def __init__(self, root):
        self.root = root
        self.url = f"unix:{root}/run/dsec.sock"
        self.process = None

    def start(self):
        self.log = open(f"{self.root}/log", "ab")
        self.process = subprocess.Popen(
            [BINARY, "up", "--state", f"{self.root}/state", "--run", f"{self.root}/run", "--pool-size", "1g", "--listen", ""],
            stdout=self.log, stderr=self.log, start_new_session=True)
        until = time.monotonic() + 180
        while True:
            try:
                with dsec.Client(self.url):
                    return
            except dsec.DsecError:
                if self.process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("dsec up did not start: " + pathlib.Path(f"{self.root}/log").read_text()[-3000:]) from None
            time.sleep(0.05)

    def end(self, sig):
        self.process.send_signal(sig)
        self.process.wait(180)
        self.log.close()


@pytest.fixture(scope="module")
def server():
    root = tempfile.mkdtemp(prefix="dsec-py-")
    s = Server(root)
    try:
        s.start()
        yield s
    finally:
        if s.process is not None and s.process.poll() is None:
            s.end(signal.SIGTERM)
        shutil.rmtree(root, ignore_errors=True)


def make_root(folder):
    for d in ("bin", "etc", "root", "dev", "proc", "sys"):
        os.makedirs(folder / d)
    shutil.copy(BUSYBOX, folder / "bin" / "busybox")
    for name in subprocess.run([BUSYBOX, "--list"], check=True, capture_output=True, text=True).stdout.split():
        if not (folder / "bin" / name).exists():
            os.symlink("busybox", folder / "bin" / name)
    os.mkdir(folder / "tmp")
    os.chmod(folder / "tmp", 0o1777)
    (folder / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n")
    (folder / "etc" / "group").write_text("root:x:0:\nalice:x:1000:\nnogroup:x:65534:\n")
    os.makedirs(folder / "home" / "alice")
    os.chown(folder / "home" / "alice", 1000, 1000)


@pytest.fixture(scope="module")
def client(server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("root") / "r"
    folder.mkdir()
    make_root(folder)
    with dsec.Client(server.url) as c:
        made = c.layers.import_folder(folder, "base/busybox")
        assert made.published == "base/busybox@1" and not made.existed
        assert c.layers.import_folder(folder).existed
        assert c.environments.publish("py", base="base/busybox", env={"FROM": "env"}).ref == "py@1"
        yield c


@pytest.fixture(scope="module")
def sb(client, server):
    """One for all tests that leave no trace in it."""
    s = client.run_container(environment="py", memory=512 << 20, disk=256 << 20)
    yield s
    if server.process.poll() is None:
        s.stop()


def test_catalogue(client):
    layer = client.layers.get("base/busybox@1")
    assert layer.id.startswith("sha256:") and layer.entries > 100 and "base/busybox@1" in layer.names
    assert client.layers.list("base/")[0].current == 1
    env = client.environments.get("py")
    assert env.layers == [layer.id] and env.env == {"FROM": "env"} and client.environments.versions("py") == [1]
    with pytest.raises(NotFound):
        client.environments.get("nothing")
    with pytest.raises(NotFound):
        client.run_container(environment="nothing")


# E: commands.


def test_images(client):
    """From a registry of a few lines: one manifest, one config, one layer."""
    import gzip
    import hashlib
    import http.server
    import io
    import json
    import tarfile
    import threading

    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as t:
        t.add(BUSYBOX, "bin/busybox")
        for name in ("sh", "cat", "echo"):
            link = tarfile.TarInfo("bin/" + name)
            link.type, link.linkname, link.mode = tarfile.SYMTYPE, "busybox", 0o777
            t.addfile(link)
    digest = lambda b: "sha256:" + hashlib.sha256(b).hexdigest()  # noqa: E731
    layer = gzip.compress(raw.getvalue())
    arch = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    config = json.dumps({"os": "linux", "architecture": arch, "rootfs": {"type": "layers", "diff_ids": [digest(raw.getvalue())]},
                         "config": {"Env": ["PATH=/bin", "WHO=image"], "Cmd": ["sh"], "Labels": {"a": "b"}}}).encode()
    kind = "application/vnd.oci.image.manifest.v1+json"
    manifest = json.dumps({"schemaVersion": 2, "mediaType": kind, "layers": [
        {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": digest(layer), "size": len(layer)}],
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest(config), "size": len(config)}}).encode()
    answers = {"/v2/": b"{}", "/v2/py/app/manifests/v1": manifest, "/v2/py/app/blobs/" + digest(layer): layer, "/v2/py/app/blobs/" + digest(config): config}

    class Registry(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = answers.get(self.path)
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_):
            pass

    registry = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    threading.Thread(target=registry.serve_forever, daemon=True).start()
    try:
        ref = f"127.0.0.1:{registry.server_address[1]}/py/app:v1"
        with pytest.raises(NotFound):
            client.images.get(ref)
        image = client.images.pull(ref)
        assert image.digest == digest(manifest) and image.cmd == ["sh"] and image.labels == {"a": "b"} and len(image.layers) == 1
        assert client.images.get(ref) == image and [i.ref for i in client.images.list(ref)] == [ref]
        with client.run_container(image=ref) as sb:
            assert sb.exec("sh", "-c", "echo $WHO").stdout == b"image\n"
        with pytest.raises(NotFound):
            client.images.pull(ref.replace("v1", "v2"))
        with pytest.raises(Invalid):
            client.run_container(image=ref, environment="x").__enter__()
        client.images.login("registry.example", "u", "secret")
        client.images.logout("registry.example")
        client.images.remove(ref)
    finally:
        registry.shutdown()
        registry.server_close()


def test_octets(sb):
    r = sb.exec("printf", "%s|", "a b", b"\xff\xfe", "ä", "")
    assert r.check().stdout == b"a b|\xff\xfe|\xc3\xa4||"
    env = {"A": "hello world", "B": "l1\nl2", "C": "x=y", "D": " $HOME ", "E": "", "G": b"\xff"}  # B37
    got = dict(e.split(b"=", 1) for e in sb.exec("env", "-0", env=env).stdout.split(b"\0") if e)
    assert {k: got[k.encode()] for k in env} == {k: v if isinstance(v, bytes) else v.encode() for k, v in env.items()}
    assert got[b"FROM"] == b"env"
    for bad in ({"": "x"}, {"x=y": "z"}):
        with pytest.raises(Invalid):
            sb.exec("true", env=bad)
    assert sb.exec("true", "x" * 131_071).ok
    with pytest.raises(Invalid, match="131,?072"):
        sb.exec("true", "x" * 131_072)


def test_start_failures_name_their_reason(sb):  # B36
    for argv, more, word in ((["nosuch"], {}, "nosuch"), (["/etc/passwd"], {}, "passwd"), (["/etc"], {}, "/etc"), (["true"], {"cwd": "/missing"}, "/missing"),
                             (["true"], {"user": "nosuch"}, "nosuch")):
        r = sb.exec(argv, **more)
        assert r.outcome.kind == "start_failed" and word in r.outcome.error, r
        assert r.exit_code == 127
    r = sb.sh("nosuch")
    assert (r.outcome.kind, r.exit_code) == ("exited", 127) and b"nosuch" in r.stderr


def test_output_at_the_cap(sb):  # B33
    for n in (999, 1000, 1001, 50_000):
        r = sb.exec("head", "-c", str(n), "/dev/zero", output_cap=1000)
        end = r.outcome.stdout
        assert r.ok and end.total == n and end.truncated == (n > 1000) and end.head + end.tail == min(n, 1000)
        p = sb.process(r.id)
        chunks = list(p)
        assert sum(len(c.data) for c in chunks) + sum(c.missing for c in chunks) == n


def test_no_last_byte_is_lost(sb):  # B15
    for i in range(40):
        assert sb.exec("printf", f"x{i}").stdout == f"x{i}".encode()
    assert len(sb.exec("head", "-c", "3000000", "/dev/zero").stdout) == 3_000_000


def test_children_and_timeouts(sb):  # B42
    start = time.monotonic()
    r = sb.sh("sleep 300 & echo hi")
    assert (r.text, r.ok, r.outcome.output_open) == ("hi\n", True, True)
    r = sb.sh('setsid sh -c "trap \\"\\" TERM; sleep 301" & sleep 301', timeout=0.3)
    assert (r.outcome.kind, r.exit_code) == ("timed_out", 124) and time.monotonic() - start < 60
    assert b"sleep 301" not in sb.exec("ps").stdout


def test_signals_and_codes(sb):
    assert sb.sh("exit 7").exit_code == 7
    r = sb.sh("kill -9 $$")
    assert (r.outcome.kind, r.outcome.signal, r.exit_code) == ("signalled", 9, 137)
    p = sb.start("sleep", "100")
    p.signal("TERM")
    assert p.wait(60).outcome.signal == 15
    r = sb.exec("grep", "-E", "Sig(Blk|Ign)", "/proc/self/status")  # B34
    assert re.findall(r":\t(\w+)", r.text) == ["0" * 16] * 2


def test_streams(sb):
    p = sb.start("sh", "-c", "for i in 1 2 3; do echo o$i; echo e$i >&2; sleep 0.05; done; exit 4")
    out = {"stdout": b"", "stderr": b""}
    for c in p:
        assert c.offset == len(out[c.stream])
        out[c.stream] += c.data
    assert out == {"stdout": b"o1\no2\no3\n", "stderr": b"e1\ne2\ne3\n"} and p.outcome.exit_code == 4
    assert b"".join(c.data for c in p.output(stdout_offset=6, stderr_offset=9)) == b"o3\n"
    with pytest.raises(DeadlineExceeded):
        sb.start("sleep", "5").wait(0.1)


def test_stdin(sb):
    assert sb.exec("cat", stdin="whole\n").text == "whole\n"
    p = sb.start("sha256sum", stdin_open=True)
    data = os.urandom(3_000_000)
    p.write(data)
    p.close_stdin()
    assert p.wait(60).text.split()[0] == __import__("hashlib").sha256(data).hexdigest()


def test_terminal(sb):  # B41
    p = sb.start("sh", "-c", "stty size; read x; stty size", terminal=(40, 100))
    got = b""
    for c in p:
        got += c.data
        if got == b"40 100\r\n":
            p.resize(50, 120)
            p.write("\n")
    assert got.split() == [b"40", b"100", b"50", b"120"]


def test_users_and_std_files(sb):  # B02
    for user in ("root", "nobody"):
        r = sb.sh("echo a >/dev/stdout; echo b >/dev/stderr; echo c >/proc/self/fd/1; id -un", user=user)
        assert (r.text, r.stderr) == (f"a\nc\n{user}\n", b"b\n")


def test_a_command_never_runs_twice(sb):
    a = sb.sh("echo x >>/tmp/once; cat /tmp/once", id="step-1")
    b = sb.sh("echo x >>/tmp/once; cat /tmp/once", id="step-1")
    assert a.stdout == b.stdout == b"x\n"
    with pytest.raises(Exists):
        sb.sh("echo y", id="step-1")
    assert [c.id for c in sb.commands()].count("step-1") == 1


# S: sessions.


def test_session_keeps_state(sb):
    with sb.session() as sh:
        assert sh.run("cd /tmp; X=1; f() { echo f$X; }").ok
        r = sh.run("pwd; f; echo err >&2; (exit 5)")
        assert (r.text, r.stderr, r.exit_code) == ("/tmp\nf1\n", b"err\n", 5)
        for text, out in (("cat <<'EOF'\nhi\nEOF", "hi\n"), ("echo a # note", "a\n"), ("cat <<X\n1\nX\necho 2", "1\n2\n")):  # B05
            assert sh.run(text, timeout=20).text == out
        assert sh.run("echo 'c", timeout=20).exit_code == 2
        assert sh.run(b"printf '\\377'").stdout == b"\xff"
        assert sh.run("sleep 100", timeout=0.3).outcome.kind == "timed_out"
        assert sh.run("echo ok $X").text == "ok 1\n"


def test_session_ends(sb):  # B17
    for text, code in (("set -e; false", 1), ("echo before; exit 3", 3), ("exec sh -c 'exit 5'", 5)):
        with sb.session() as sh:
            r = sh.run(text, timeout=20)
            assert r.outcome.session_end and r.exit_code == code, r
            with pytest.raises(State):
                sh.run("echo next", timeout=20)
    assert all(s.state == "ended" for s in sb.sessions())


# F: files.


def test_files(sb):
    f = sb.files
    r = f.write("/srv/a/b", b"0123456789", mode="0640")
    assert r.written == 10 and f.stat("/srv/a/b").mode == 0o640 and f.stat("/srv/a").mode == 0o755
    assert f.read("/srv/a/b", offset=3, length=4) == b"3456"
    f.append("/srv/a/b", "x", start=10)
    with pytest.raises(State):
        f.append("/srv/a/b", "x", start=10)
    f.make_dir("/srv/d/e")
    f.move("/srv/a/b", b"/srv/d/\xff")
    assert f.read(b"/srv/d/\xff") == f.read("/srv/d/\udcff") == b"0123456789x"
    assert {e.path for e in f.list("/srv", depth=3)} == {"a", "d", "d/e", "d/\udcff"}
    with pytest.raises(NotFound):
        f.read("/srv/none")
    with pytest.raises(dsec.DsecError):
        f.remove("/srv")
    f.remove("/srv", recursive=True)
    f.remove("/srv", missing_ok=True)
    assert not f.exists("/srv")
    sb.files_as("alice").write("/home/alice/n1/f", "x")
    assert f.stat("/home/alice/n1").owner == "alice"
    with pytest.raises(dsec.Denied):
        sb.files_as("alice").write("/root/f", "x")


def test_odd_files(sb):  # B12, B19, B22
    sb.sh("mkdir -p /odd /odd/run && cd /odd && ln -s run link && ln -s nowhere dangling && ln -s loop loop && mkfifo fifo").check()
    sb.files.write("/odd/link/app/x", "through")
    assert sb.sh("cat /odd/run/app/x").text == "through"
    types = {e.path: (e.type, e.target) for e in sb.files.list("/odd")}
    assert types["dangling"] == ("link", "nowhere") and types["fifo"][0] == "fifo" and types["loop"] == ("link", "loop")
    assert sb.files.stat("/odd/dangling").type == "link"
    with pytest.raises(dsec.DsecError):
        sb.files.read("/odd/loop")
    assert b"Name:" in sb.files.read("/proc/self/status") and sb.files.read("/dev/zero", length=100_000) == bytes(100_000)


def describe(root):
    out = {}
    for p in sorted(pathlib.Path(root).rglob("*")):
        st = p.lstat()
        what = os.readlink(p) if p.is_symlink() else p.read_bytes() if p.is_file() else None
        out[str(p.relative_to(root))] = (what, None if p.is_symlink() else (st.st_mode, st.st_mtime_ns))
    return out


def test_trees(sb, tmp_path):  # B21
    src = tmp_path / "src"
    (src / "d" / "empty").mkdir(parents=True)
    (src / ("n" * 200)).write_text("long")
    (src / "run.sh").write_text("#!/bin/sh\necho run\n")
    os.chmod(src / "run.sh", 0o755)
    os.utime(src / "run.sh", ns=(0, 978307200_123456789))
    (src / "d" / "secret").write_bytes(os.urandom(1_000_000))
    os.chmod(src / "d" / "secret", 0o600)
    os.symlink("d/secret", src / "link")
    f = sb.files_as("alice")
    assert f.upload(src, "/home/alice/t").entries >= 6
    assert sb.exec("/home/alice/t/run.sh", user="alice").text == "run\n"
    assert f.download_tree("/home/alice/t", tmp_path / "back") == []
    assert describe(tmp_path / "back") == describe(src)
    f.upload(src / "run.sh", "/home/alice/n1/n2/go.sh")
    info = f.stat("/home/alice/n1/n2/go.sh")
    assert (info.mode, info.owner, info.modified.year) == (0o755, "alice", 2001)
    f.download("/home/alice/n1/n2/go.sh", tmp_path / "go.sh")
    assert (tmp_path / "go.sh").read_text() == "#!/bin/sh\necho run\n" and os.stat(tmp_path / "go.sh").st_mode & 0o777 == 0o755
    sb.sh("mkdir -p /h && cd /h && ln -s /etc out && mkfifo p && touch f").check()
    told = sb.files.download_tree("/h", tmp_path / "hostile")
    assert len(told) == 2 and os.listdir(tmp_path / "hostile") == ["f"]


def test_large_file_is_streamed(sb, tmp_path):
    piece = os.urandom(1 << 20)
    sb.files.write("/tmp/large", (piece for _ in range(64)))
    n = 0
    for got in sb.files.read_stream("/tmp/large"):
        assert len(got) <= 1 << 20
        n += len(got)
    assert n == 64 << 20
    sb.files.remove("/tmp/large")


def test_watch(sb):
    sb.files.make_dir("/watched")
    events = sb.files.watch("/watched", timeout=60)
    assert next(events).kind == "ready"
    sb.sh("echo x >/watched/f; mv /watched/f /watched/g")
    seen = []
    for e in events:
        seen.append((e.kind, e.path))
        if e.kind == "moved_to":
            break
    events.close()
    kinds = [k for k, _ in seen]
    assert "created" in kinds and "moved_from" in kinds


# N: ports.


def test_ports(sb):
    port = sb.port(8080)
    with pytest.raises(State, match="nothing listens"):
        port.get("/")
    sb.sh("mkdir -p /www && echo page >/www/index.html && head -c 3000000 /dev/zero >/www/big && httpd -p 127.0.0.1:8080 -h /www").check()
    assert port.wait().text == "page\n"
    assert port.get("/nothing").status == 404
    assert len(port.get("/big").body) == 3_000_000


# C: life.


def test_life(client):
    with client.run_container(environment="py", name="mine", labels={"l": "1"}, idle=60, total=600) as sb:
        assert client.get("mine").id == sb.id and sb.info.lifetime.idle == 60
        assert [s.id for s in client.list(Selector(labels={"l": "1"}))] == [sb.id]
        sb.pause()
        assert sb.refresh().state == "paused"
        assert sb.exec("true").ok  # wakes it
        sb.pause()
        sb.resume()
        with pytest.raises(Unsupported):
            sb.pause("saved")
        assert sb.set_lifetime(idle=120).lifetime.idle == 120
        assert sb.stats().memory > 0
        sb.sh("echo changed >/root/answer").check()
        snap = sb.snapshot("work/answer")
        assert snap.ref.startswith("work/answer@")
    assert client.get(sb.id).info.state == "stopped" and client.get(sb.id).info.cause.cls == "none"
    with pytest.raises(State):
        sb.exec("true")
    sb.stop()
    # A snapshot stands on the layers that it was made on.
    with client.run_container(layers=["base/busybox", snap.ref]) as again:
        assert again.files.read_text("/root/answer") == "changed\n"


def test_screen(client):
    """The server's side of RFB does not depend on what is said to it: a file of it, served again and again, is a screen of two pixels."""
    said = b"RFB 003.008\n" + b"\x01\x01" + bytes(4)  # one way in: no password; it was right
    said += bytes([0, 2, 0, 1, 32, 24, 0, 1, 0, 255, 0, 255, 0, 255, 16, 8, 0, 0, 0, 0]) + bytes([0, 0, 0, 1]) + b"x"
    said += bytes([0, 0, 0, 1, 0, 0, 0, 0, 0, 2, 0, 1, 0, 0, 0, 0]) + bytes([0, 0, 255, 0, 255, 0, 0, 0])  # red and blue
    with client.run_container(environment="py") as sb:
        with pytest.raises(DsecError):
            sb.screen().shot()
        sb.files.write("/tmp/rfb", said)
        sb.start("sh", "-c", "while true; do nc -l -p 5901 </tmp/rfb >>/tmp/heard; done")
        x = sb.screen(5901)
        for _ in range(600):
            try:
                shot = x.shot()
                break
            except DsecError:
                time.sleep(0.1)
        assert (shot.width, shot.height) == (2, 1) and shot.png.startswith(b"\x89PNG") and shot.sha256 == hashlib.sha256(shot.png).hexdigest()

        def done(act):
            for _ in range(600):  # the file is served to one at a time
                try:
                    return act()
                except (NotFound, Unavailable, State):
                    time.sleep(0.1)
            return act()

        done(lambda: x.type("a", step="t"))
        done(lambda: x.type("a", step="t"))
        done(lambda: x.click(1, 0, "right"))
        pressed = b"\x04\x01\0\0\0\0\0a"
        for _ in range(600):
            heard = sb.files.read("/tmp/heard")
            if pressed in heard and b"\x05\x04\0\x01\0\0" in heard:
                break
            time.sleep(0.1)
        assert heard.count(pressed) == 1, "typed once under its key"
        assert b"\x05\x04\0\x01\0\0" in heard, "the right button is down at 1, 0"
        with pytest.raises(Invalid):
            x.scroll(0, 0, 1000)
        with pytest.raises(Exists):
            x.type("b", step="t")


def test_fork(client):
    with client.run_container(environment="py", labels={"l": "1"}, env={"A": "1", "T": "hidden"}, secret_env=["T"]) as sb:
        sb.sh("echo before >/root/state").check()
        with sb.fork(3, key="f", labels={"m": "2"}, env={"B": "2"}) as forks:
            assert len(forks) == 3 and not forks.errors and len({f.id for f in forks} | {sb.id}) == 4
            sb.sh("echo after >/root/state").check()
            forks[0].sh("echo own >/root/state").check()
            assert [f.files.read_text("/root/state") for f in forks] == ["own\n", "before\n", "before\n"]
            assert forks[1].sh("echo $A$B$T").stdout == b"12hidden\n"
            assert forks[1].info.labels == {"l": "1", "m": "2"} and forks[1].info.key == "f/2"
            assert [f.id for f in sb.fork(3, key="f", labels={"m": "2"}, env={"B": "2"})] == [f.id for f in forks]
            with pytest.raises(Invalid):
                sb.fork(0)
    with pytest.raises(State):
        sb.fork()


def test_limits(client):  # B10
    with client.run_container(environment="py", memory=64 << 20, disk=32 << 20, pids=50) as sb:
        r = sb.exec("dd", "if=/dev/zero", "of=/dev/null", "bs=200M", "count=1")
        assert (r.outcome.kind, r.exit_code) == ("out_of_memory", 137)
        assert (sb.sh("exit 137").outcome.kind, sb.sh("kill -9 $$").outcome.kind) == ("exited", "signalled")
        assert not sb.exec("dd", "if=/dev/zero", "of=/root/x", "bs=1M", "count=100").ok
        r = sb.sh("for i in $(seq 100); do sleep 100 & done; wait", timeout=3)
        assert r.outcome.pids_hit and r.outcome.kind != "unknown"
        assert sb.exec("echo", "still there").ok


def test_keys(client):
    a = client.run_container(environment="py", job="keys", key="one")
    b = client.run_container(environment="py", job="keys", key="one")
    assert (a.id, a.existed, b.id, b.existed) == (b.id, False, a.id, True)
    with pytest.raises(Exists):
        client.run_container(environment="py", job="keys", key="one", memory=1 << 30)
    client.stop_key("one", job="keys").check()
    assert client.get(a.id).info.state == "stopped"
    client.stop_key("two", job="keys")
    with pytest.raises(dsec.DsecError):  # stopped before it came
        client.run_container(environment="py", job="keys", key="two")
    with pytest.raises(Invalid, match="layers|environment"):
        client.run_container()


def test_log(client):
    with client.run_container(environment="py") as sb:
        sb.exec("echo", "hello", id="s1")
        records = list(sb.log())
        follow = sb.log(follow=True, timeout=60)
        assert [r.seq for r in records] == list(range(1, len(records) + 1))
        assert [r.data for r in records if r.kind == "output"] == [b"hello\n"] and any(r.step == "s1" and r.kind == "command" for r in records)
        next(follow)
        sb.stop()
        rest = list(follow)
        assert rest[-1].seq > records[-1].seq and "stopped" in {r.state for r in rest}


def test_cancelled_creates_leave_nothing(client):  # B39
    async def main():
        async with dsec.AsyncClient(client._t.config.url) as c:
            for i in range(20):
                task = asyncio.ensure_future(c.run_container(environment="py", job="cut", key=f"k{i}").__aenter__())
                await asyncio.sleep(i * 0.003)
                task.cancel()
                try:
                    await (await task).stop()
                except asyncio.CancelledError:
                    pass
            assert [s.id for s in await c.list(Selector(job="cut"))] == []

    asyncio.run(main())


def test_jobs(client):
    with client.job(lease=10, on_lease_end="stop") as job:
        with job.run_containers(5, all=True, environment="py") as batch:
            assert len(batch) == 5 and not batch.errors
            assert job.info().running == 5
            assert {sb.exec("echo", str(i)).text for i, sb in enumerate(batch)} == {f"{i}\n" for i in range(5)}
        sb = job.run_container(environment="py")
    assert client.get(sb.id).info.state == "stopped"
    job = client.job("short", lease=3)
    sb = job.run_container(environment="py")
    job.detach()
    until = time.monotonic() + 60
    while client.get(sb.id).info.state != "stopped" and time.monotonic() < until:
        time.sleep(0.05)
    assert (client.get(sb.id).info.cause.cls, client.get(sb.id).info.cause.reason) == ("client", "lease")


def test_idle(client):  # B52
    sb = client.run_container(environment="py", idle=3)
    p = sb.start("sleep", "4")
    assert p.wait(60).ok
    until = time.monotonic() + 60
    while client.get(sb.id).info.state != "stopped" and time.monotonic() < until:
        time.sleep(0.05)
    assert (client.get(sb.id).info.cause.cls, client.get(sb.id).info.cause.reason) == ("limit", "idle")


def test_api_keys(client, server):
    made = client.keys.create(note="n", ttl=3600)
    with dsec.Client(server.url, made.key) as c:
        assert [k.note for k in c.keys.list() if k.id == made.info.id] == ["n"]
    client.keys.revoke(made.info.id)
    with pytest.raises(dsec.Denied):
        dsec.Client(server.url, made.key).list()


# Both blocks of the README, word for word.


def test_readme(client, server, monkeypatch, capsys):
    monkeypatch.setenv("DSEC_URL", server.url)
    blocks = re.findall(r"```python\n(.*?)```", (HERE.parents[1] / "README.md").read_text(), re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    out = capsys.readouterr().out
    for line in ("hello\n", "False 3 b'no\\n'", "exit code 3: no", "b'42\\n'", "/work\n1\n", "stdout 0 b'1\\n'", "True", "[42, 42, 42, 42, 42, 42, 42, 42]"):
        assert line in out, (line, out)


def test_a_restart_of_the_server_loses_nothing(client, server):
    """kill -9 of the daemon under a stream, a wait and a session: the same calls go on when it is back."""
    sb = client.run_container(environment="py")
    try:
        p = sb.start("sh", "-c", "for i in $(seq 1 40); do echo line $i; sleep 0.1; done; exit 6")
        got, killed = b"", False
        for c in p:
            assert c.offset == len(got)
            got += c.data
            if not killed and len(got) > 30:
                killed = True
                server.end(signal.SIGKILL)
                server.start()
        assert killed and got == b"".join(b"line %d\n" % i for i in range(1, 41)) and p.outcome.exit_code == 6
        assert sb.exec("true").ok
    finally:
        sb.stop()


def test_function_calls(client, server):
    """Everything of calls that the SDK offers, with the shell of busybox."""
    def sh(script, **more):
        return client.fncall(cmd=["sh", "-c", script], environment="py", **more)

    a = sh('read a; echo "$a-$1-$V"; echo err >&2; exit 3', stdin="in\n", env={"V": "v"}, limits=dsec.CallLimits(cpu=5, memory="64m"))
    assert (a.verdict, a.result.code, a.result.stdout, a.result.stderr) == ("RE", 3, b"in--v\n", b"err\n") and a.compile is None and not a.result.ok
    assert sh("sleep 60", limits=dsec.CallLimits(wall=0.3)).result.limit == "wall"
    assert sh("yes", limits=dsec.CallLimits(output="4k")).result.stdout_truncated
    # Files in and out, and by their content.
    a = sh("cat d/in >out; printf \'\\377\' >>out", files={"d/in": b"octets \x00"}, outputs=["out"], keep=["out"])
    data, kept = a.result.files
    assert data.data == b"octets \x00\xff" and kept.content and client.get_call_file(kept.content) == data.data
    mine = client.put_call_file(b"kept")
    a = sh("cat - f", stdin=dsec.Kept(kept.content), files={"f": dsec.Kept(mine)})
    assert a.result.stdout == data.data + b"kept"
    with pytest.raises(NotFound):
        sh("true", files={"f": dsec.Kept("0" * 64)})
    b = client.fncall_batch([dsec.CallInput(stdin=str(i), id=f"n{i}") for i in range(5)], cmd=["sh", "-c", "read n; exit $n"], environment="py")
    assert [(r.id, r.code) for r in b.results] == [(f"n{i}", i) for i in range(5)] and b.verdict == "RE"
    p = client.fncall_pair(dsec.CallSide(cmd=["sh", "-c", "read x; echo $((x*2)); read y; exit $y"], environment="py"),
                           dsec.CallSide(cmd=["sh", "-c", "echo 21; read r; [ $r = 42 ] && echo 7; cat >/dev/null"], environment="py"))
    assert p.program.code == 7 and p.interactor.ok
    # Keys.
    first = sh("cat /proc/sys/kernel/random/uuid || echo $RANDOM", key="k", job="calls")
    again = sh("cat /proc/sys/kernel/random/uuid || echo $RANDOM", key="k", job="calls")
    assert again.recorded and not first.recorded and again.result == first.result
    with pytest.raises(Exists):
        sh("true", key="k", job="calls")
    with pytest.raises(NotFound):
        client.cancel_call("k", job="calls")
    for gpu, error in (("shared", Unsupported), ("many", (Invalid, Unsupported))):
        with pytest.raises(error):
            sh("true", gpu=gpu)
    with pytest.raises(Unsupported):  # a command is no interpreter
        sh("true", warm=True)
    with pytest.raises(Invalid):
        sh("true", warm=True, pooled=True)
    langs = client.call_languages()
    assert "python" in langs and "fncall" in langs["python"]  # its environment is missing here

    async def many():
        async with dsec.AsyncClient(server.url) as c:
            return await asyncio.gather(*[c.fncall(cmd=["echo", str(i)], environment="py") for i in range(20)])

    assert [a.result.stdout for a in asyncio.run(many())] == [b"%d\n" % i for i in range(20)]


def test_end_leaves_nothing(client, server):
    """The last one: SIGTERM stops all, and no mount, process or cgroup stays."""
    client.run_container(environment="py")
    server.end(signal.SIGTERM)
    with pytest.raises(Unavailable):
        client.list()
    mounts = pathlib.Path("/proc/self/mountinfo").read_text()
    assert server.root not in mounts
