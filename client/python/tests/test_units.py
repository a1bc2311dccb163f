"""The parts without I/O."""

import ast
import inspect
import io
import json
import os
import pathlib
import random
import stat
import struct
import tarfile

import pytest

import dsec
from dsec import _config, _connect, _files, _http1, _octets, _ops, _screen, _websocket
from dsec._tar import pack
from dsec._unpack import Unpacker
from dsec.errors import Denied, DsecError, Exists, Internal, Invalid, NotFound, Unavailable, VersionMismatch, from_code


def read_all(raw, method="GET", step=1, eof=True):
    r = _http1.Reader(method)
    out = b""
    for i in range(0, len(raw), step):
        r.feed(raw[i : i + step])
        while r.head is not None:
            d = r.data()
            if not d:
                break
            out += d
    if eof and not r.done:
        r.feed(b"")
        out += r.data()
    return r, out


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
@pytest.mark.parametrize("raw,body,reusable", [
    (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A:  b \r\n\r\nhello", b"hello", True),
    (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"", True),
    (b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\nT: v\r\n\r\n", b"abc0123456789", True),
    (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", b"until the end", False),
    (b"HTTP/1.1 204 No\r\n\r\n", b"", True),
    (b"HTTP/1.1 200 OK\r\nConnection: keep-alive, Close\r\nContent-Length: 1\r\n\r\nx", b"x", False),
])
def test_http_answers(raw, body, reusable, step):
    r, got = read_all(raw, step=step)
    assert (got, r.done, r.reusable) == (body, True, reusable)
    if b"T: v" in raw:
        assert r.trailers == (("t", "v"),)


@pytest.mark.parametrize("raw", [
    b"", b"HTTP/1.1 200 OK\r\nConte", b"hello\r\n\r\n", b"HTTP/1.1 2x0 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nbad line\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell", b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 5, 6\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-3\r\nabc\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 2000, b"HTTP/1.1 200 OK\r\nA: " + b"a" * 70000,
])
def test_http_refuses(raw):
    with pytest.raises(_http1.ProtocolError):
        read_all(raw)


def test_http_survives_noise():
    r = random.Random(1)
    good = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    for _ in range(3000):
        raw = bytearray(good)
        for _ in range(r.randrange(1, 4)):
            raw[r.randrange(len(raw))] = r.randrange(256)
        try:
            read_all(bytes(raw), step=r.randrange(1, 20))
        except _http1.ProtocolError:
            pass


def test_heads_can_not_be_split():
    for headers in ({"A": "b\r\nC: d"}, {"A\n": "b"}, {"": "b"}, {"A:": "b"}):
        with pytest.raises(ValueError):
            _http1.request_head("GET", "/", headers, None)
    for target in ("/a b", "/a\r\nX: y", "/\xe4"):
        with pytest.raises(ValueError):
            _http1.request_head("GET", target, {}, None)


@pytest.mark.parametrize("value", ["plain", "ä€", b"bytes", b"\xff\xfe", "a\udcffb", "", b"a\x00b"])
def test_octets_come_back(value):
    body = {}
    _octets.put(body, "path", value)
    answer = {"path": body.get("path", "")}
    if "path_raw" in body:
        answer = {"pathRaw": body["path_raw"]}
    assert _octets.encode(_octets.Fields(answer).octets("path")) == _octets.encode(value)
    json.dumps(body)


def test_octets_refuse():
    with pytest.raises(Invalid):
        _octets.encode("\ud800")
    with pytest.raises(TypeError):
        _octets.encode(3)
    body = {}
    _octets.put_list(body, "argv", ["a", b"\xff"])
    assert body == {"argv_raw": ["YQ==", "/w=="]}


def test_environment():
    assert _octets.env_vars({"A": b"\xff", "B": "x"}, ["B"]) == [{"name": "A", "value_raw": "/w=="}, {"name": "B", "value": "x", "secret": True}]
    with pytest.raises(Invalid, match="secret_env"):
        _octets.env_vars({}, ["X"])


@pytest.mark.parametrize("seconds,ms", [(None, 0), (0, 0), (0.0001, 1), (1.5, 1500), (-1, -1000), (-0.0001, -1), (60, 60000)])
def test_durations(seconds, ms):
    assert _octets.milliseconds(seconds, "x") == ms


def test_answers_of_the_wrong_type():
    f = _octets.Fields({"a": [], "b": "x", "c": "!", "t": "yesterday"})
    for bad in (lambda: f.text("a"), lambda: f.number("b"), lambda: f.flag("b"), lambda: f.raw("c"), lambda: f.time("t"), lambda: f.sub("b"),
                lambda: f.subs("b", str)):
        with pytest.raises(Internal):
            bad()
    assert str(_octets.Fields({"t": "2026-01-02T03:04:05.123456789Z"}).time("t")) == "2026-01-02 03:04:05.123456+00:00"


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_stream_messages(step):
    end = json.dumps({}).encode()
    raw = _connect.envelope({"a": 1}) + _connect.envelope({}) + struct.pack(">BI", 2, len(end)) + end
    m, got = _connect.Messages(), []
    for i in range(0, len(raw), step):
        got += m.feed(raw[i : i + step])
    m.finish()
    assert got == [{"a": 1}, {}]


def test_stream_ends():
    m = _connect.Messages()
    m.feed(_connect.envelope({}))
    with pytest.raises(Unavailable):
        m.finish()
    told = json.dumps({"error": {"code": "not_found", "message": "gone"}}).encode()
    m = _connect.Messages()
    m.feed(struct.pack(">BI", 2, len(told)) + told)
    with pytest.raises(NotFound, match="gone"):
        m.finish()
    with pytest.raises(Internal):
        _connect.Messages().feed(struct.pack(">BI", 0, 1 << 31))


def test_codes():
    head = _http1.Head(400, "", (("dsec-protocol", "1"),))
    assert type(_connect.failure(head, b'{"code":"already_exists","message":"m"}')) is Exists
    assert type(_connect.failure(head, b"<html>")) is Unavailable
    e = _connect.failure(_http1.Head(400, "", (("dsec-protocol", "2"),)), b'{"code":"failed_precondition","message":"client speaks protocol 1"}')
    assert type(e) is VersionMismatch
    assert isinstance(from_code("unauthenticated", "x"), Denied) and from_code("unauthenticated", "x").code == "unauthenticated"
    assert type(from_code("brand_new", "x")) is DsecError
    for versions, side in (((2, 3), "this client"), ((0, 0), "the server")):
        with pytest.raises(VersionMismatch, match="upgrade " + side):
            _connect.check_version("9", versions[1], versions[0])


def test_where_the_server_is(tmp_path, monkeypatch):
    def at(url=None, key=None, file=None):
        return _config.resolve(url, key, file, 1, None)

    assert at().socket == "/run/dsec/dsec.sock"
    (tmp_path / "key").write_text("beside\n")
    assert at(f"unix:{tmp_path}/dsec.sock").key == "beside"
    monkeypatch.setenv("DSEC_URL", "http://h:1/pre/")
    monkeypatch.setenv("DSEC_KEY", "k")
    c = at()
    assert (c.address, c.prefix, c.key, c.base, c.host) == (("h", 1), "/pre", "k", "http://h:1/pre", "h:1")
    (tmp_path / "other").write_text("given")
    assert at(file=str(tmp_path / "other")).key == "given"
    assert at("https://[::1]:9").address == ("::1", 9)
    for bad in ("ftp://x", "http://", "unix:", "http://h:x"):
        with pytest.raises(Invalid):
            at(bad)
    with pytest.raises(Invalid):
        at(file="/nonexistent")
    with pytest.raises(Invalid):
        at(key="a\r\nb")


def test_argv_and_modes():
    assert _ops.argv_of(("a", b"b")) == _ops.argv_of((["a", b"b"],)) == ["a", b"b"]
    for bad in ((), ([],)):
        with pytest.raises(Invalid):
            _ops.argv_of(bad)
    with pytest.raises(TypeError):
        _ops.argv_of(("a", ["b"]))
    assert [_files.mode_of(m) for m in (0o755, "0755", "755", 493, None)] == [0o755, 0o755, 0o755, 0o755, 0]
    for bad in (755, 644, 0o17777, "rwx", -1):
        with pytest.raises(Invalid):
            _files.mode_of(bad)


def test_unknown_keywords_are_refused():
    with pytest.raises(TypeError):
        _ops.create_body(enviroment="x")
    with pytest.raises(Invalid):
        _ops.create_body(layers="one")
    c = dsec.Client("http://127.0.0.1:1", key="k")
    for call, said in (
        (lambda: c.run_container(enviroment="x"), "run_container() got an unexpected keyword argument 'enviroment'. Did you mean 'environment'?"),
        (lambda: c.run_containers(2, al=True), "run_containers() got an unexpected keyword argument 'al'. Did you mean 'all'?"),
        (lambda: c.sandbox("s").exec("true", time_out=1), "exec() got an unexpected keyword argument 'time_out'. Did you mean 'timeout'?"),
        (lambda: c.environments.publish("e", zzzz=1), "environments.publish() got an unexpected keyword argument 'zzzz'"),
    ):
        with pytest.raises(TypeError) as e:
            call()
        assert str(e.value) == said


def test_sizes():
    for value, octets in ((1 << 30, 1 << 30), ("512m", 512 << 20), ("1g", 1 << 30), ("1.5G", 3 << 29), ("2GiB", 2 << 30), ("10kb", 10240), ("7", 7), (1e9, 10**9), (0, 0)):
        r = _ops.create_body(environment="e", memory=value, disk=value).get("resources", {})
        assert r == ({"memory": octets, "disk": octets} if octets else {})
        assert type(r.get("memory", 0)) is int
    for bad in ("", "g", "1x", "-1g", "nan", "inf", "1e9", "9" * 30, -1, 1.5, float("nan"), float("inf"), True, b"1g", [1]):
        for field in ("memory", "disk"):
            with pytest.raises(ValueError, match=field) as e:
                _ops.create_body(environment="e", **{field: bad})
            assert isinstance(e.value, Invalid)
            with pytest.raises(Invalid, match=field):
                _ops.environment_body("e", **{field: bad})


def test_websocket_frames():
    p = _websocket.Parser(1000)
    p.feed(b"\x01\x03abc\x89\x00\x80\x02de\x82\x00")
    assert list(p.events()) == [(9, b""), (1, b"abcde"), (2, b"")]
    for bad in (b"\xc1\x00", b"\x81\x80aaaa", b"\x80\x00", b"\x82\x7f" + struct.pack(">Q", 2000), b"\x89\x7e\x00\x80" + bytes(128)):
        p = _websocket.Parser(1000)
        p.feed(bad)
        with pytest.raises(_http1.ProtocolError):
            list(p.events())
    for n in (0, 1, 125, 126, 65535, 65536):
        f = _websocket.frame(2, bytes(n))
        assert len(f) == n + 6 + (0 if n < 126 else 2 if n < 65536 else 8)
    with pytest.raises(ValueError):
        _websocket.close_frame(1005, "")


# Trees.


def describe(root):
    out = {}
    for folder, dirs, names in os.walk(root):
        for n in dirs + names:
            p = os.path.join(folder, n)
            st = os.lstat(p)
            kind = stat.S_IFMT(st.st_mode)
            what = os.readlink(p) if stat.S_ISLNK(kind) else pathlib.Path(p).read_bytes() if stat.S_ISREG(kind) else None
            out[os.path.relpath(p, root)] = (kind, None if stat.S_ISLNK(kind) else stat.S_IMODE(st.st_mode), what,
                                             None if stat.S_ISLNK(kind) else st.st_mtime_ns)
    return out


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    (root / "sub" / "empty").mkdir(parents=True)
    (root / "sub" / "big").write_bytes(os.urandom(700_001))
    (root / ("n" * 200)).write_text("long name")
    deep = root.joinpath(*["d" * 50] * 8)
    deep.mkdir(parents=True)
    (deep / "f").write_text("long path")
    (root / "run.sh").write_text("#!/bin/sh\n")
    os.chmod(root / "run.sh", 0o755)
    os.utime(root / "run.sh", ns=(0, 1_000_000_000_123_456_789))
    os.chmod(root / "sub" / "big", 0o600)
    os.symlink("sub/big", root / "link")
    os.symlink("../run.sh", root / "sub" / "up")
    os.link(root / "run.sh", root / "sub" / "hard")
    (root / "none").write_text("")
    with open(os.fsencode(root) + b"/odd-\xff", "w") as f:
        f.write("odd")
    return root


@pytest.mark.parametrize("step", [1 << 20, 1000, 512, 37])
def test_tree_there_and_back(tree, tmp_path, step):
    os.mkfifo(tree / "fifo")
    skipped = []
    tar = b"".join(pack(str(tree), "", skipped))
    assert skipped == []
    u = Unpacker(str(tmp_path / "back"), 1 << 30, 1000)
    for i in range(0, len(tar), step):
        u.feed(tar[i : i + step])
    assert u.close() == ["fifo: devices, FIFOs and the like are not made"]
    want = describe(tree)
    del want["fifo"]
    assert describe(tmp_path / "back") == want
    assert os.stat(tmp_path / "back" / "sub" / "hard").st_nlink == 2


def test_other_tools_read_our_tar(tree):
    names = {m.name: m for m in tarfile.open(fileobj=io.BytesIO(b"".join(pack(str(tree), "opt/x")))).getmembers()}
    assert {"opt", "opt/x", "opt/x/run.sh"} <= set(names) and names["opt/x/run.sh"].mode == 0o755
    one = tarfile.open(fileobj=io.BytesIO(b"".join(pack(str(tree / "run.sh"), "go.sh")))).getmembers()
    assert [(m.name, m.mode) for m in one] == [("go.sh", 0o755)]


def test_socket_is_told(tmp_path):
    import socket

    s = socket.socket(socket.AF_UNIX)
    s.bind(str(tmp_path / "s"))
    skipped = []
    b"".join(pack(str(tmp_path), "", skipped))
    s.close()
    assert len(skipped) == 1 and "sockets" in skipped[0]


def entry(name, kind=tarfile.REGTYPE, data=b"", link="", **more):
    t = tarfile.TarInfo(name)
    t.type, t.size, t.linkname = kind, len(data), link
    for k, v in more.items():
        setattr(t, k, v)
    return t.tobuf(tarfile.PAX_FORMAT) + data + bytes(-len(data) % 512)


def unpack(folder, *entries, octets=1 << 20, count=100):
    u = Unpacker(str(folder), octets, count)
    try:
        u.feed(b"".join(entries) + bytes(1024))
        return u.close()
    finally:
        u.abort()


def test_hostile_tars_touch_nothing_outside(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("s")
    box = tmp_path / "box"
    box.mkdir()
    os.symlink(outside, box / "there")  # a link that lies there already
    for name in ("../outside/x", "a/../../outside/x"):
        with pytest.raises(Invalid):
            unpack(box, entry(name, data=b"x"))
    told = unpack(
        box,
        entry("there/x", data=b"x"),  # through the link
        entry("/abs", data=b"x"),  # below the folder
        entry("l", tarfile.SYMTYPE, link=str(outside)),
        entry("l2", tarfile.SYMTYPE, link="../outside"),
        entry("ok", tarfile.SYMTYPE, link="abs"),
        entry("ok/x", data=b"x"),
        entry("h", tarfile.LNKTYPE, link="there/secret"),
        entry("h2", tarfile.LNKTYPE, link="nothing"),
        entry("dev", tarfile.CHRTYPE),
        entry("suid", data=b"x", mode=0o4755),
    )
    assert [t.split(":")[0] for t in told] == ["there/x", "l", "l2", "ok/x", "h", "h2", "dev"]
    assert os.listdir(outside) == ["secret"]
    assert sorted(os.listdir(box)) == ["abs", "ok", "suid", "there"] and stat.S_IMODE(os.stat(box / "suid").st_mode) == 0o755


def test_hostile_tars_are_bounded(tmp_path):
    with pytest.raises(Invalid, match="max_octets"):
        unpack(tmp_path, entry("a", data=b"x" * 1000), octets=999)
    with pytest.raises(Invalid, match="max_entries"):
        unpack(tmp_path, *[entry(f"d{i}", tarfile.DIRTYPE) for i in range(3)], count=2)
    huge = bytearray(entry("x", data=b""))
    t = tarfile.TarInfo("x")
    t.type, t.size = b"x", 1 << 30
    with pytest.raises(Internal):
        unpack(tmp_path, t.tobuf())
    huge[0] ^= 1
    with pytest.raises(Internal, match="checksum"):
        unpack(tmp_path, bytes(huge))
    u = Unpacker(str(tmp_path), 1000, 10)
    u.feed(entry("half", data=b"x" * 600)[:700])
    with pytest.raises(Internal, match="broke off"):
        u.close()


def test_sparse_files(tmp_path):
    body = b"2\n4096\n3\n1000000\n0\n"
    body += bytes(-len(body) % 512) + b"abc"
    e = entry("GNUSparseFile/x", data=body, pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "holes", "GNU.sparse.realsize": "1000000"})
    assert unpack(tmp_path, e) == []
    data = (tmp_path / "holes").read_bytes()
    assert len(data) == 1_000_000 and data[4096:4099] == b"abc" and not any(data[:4096])
    with pytest.raises(Invalid):
        unpack(tmp_path, e, octets=999_999)


def test_noise_in_tars(tree, tmp_path):
    r = random.Random(2)
    good = b"".join(pack(str(tree)))[:200_000]
    for i in range(300):
        raw = bytearray(good[: r.randrange(512, 40_000)])
        for _ in range(r.randrange(1, 5)):
            raw[r.randrange(len(raw))] = r.randrange(256)
        u = Unpacker(str(tmp_path / "noise"), 1 << 20, 100)
        try:
            u.feed(bytes(raw))
            u.close()
        except (DsecError, OSError):
            pass
        finally:
            u.abort()
    assert set(os.listdir(tmp_path)) == {"noise", "tree"}


def test_both_clients_have_the_same_calls():
    for name in ("Client", "Sandbox", "Batch", "Process", "Session", "Files", "Port", "WebSocket", "Job"):
        a, b = getattr(dsec, name), getattr(dsec, "Async" + name)
        names = {n for n in dir(a) if not n.startswith("_")}
        assert names == {n for n in dir(b) if not n.startswith("_")}, name
        for n in names:
            f, g = getattr(a, n), getattr(b, n)
            if inspect.isfunction(f):
                assert list(inspect.signature(f).parameters) == list(inspect.signature(g).parameters), f"{name}.{n}"


def test_everything_public_is_documented():
    for name in dsec.__all__:
        thing = getattr(dsec, name)
        if not inspect.isclass(thing):
            continue
        assert thing.__doc__, name
        for n, f in vars(thing).items():
            if inspect.isfunction(f) and not n.startswith("_") and not thing.__module__.endswith("model"):
                assert f.__doc__, f"{name}.{n}"


def test_syntax_of_the_oldest_python():
    root = os.path.dirname(dsec.__file__)
    for folder, _, names in os.walk(root):
        for n in names:
            if n.endswith(".py"):
                with open(os.path.join(folder, n), encoding="utf-8") as f:
                    ast.parse(f.read(), feature_version=(3, 9))


def test_view_url():
    c = _config.resolve("https://gw.example:7300/base/", "k", None, 1, None)
    assert _screen.view_url(c, "mine", 0) == "https://gw.example:7300/base/v1/screens/mine"
    assert _screen.view_url(c, "mine", 5901) == "https://gw.example:7300/base/v1/screens/mine?port=5901"
    with pytest.raises(Invalid):
        _screen.view_url(c, "mine", 70000)
