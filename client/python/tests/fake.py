"""A server in this process: enough of the API to try the clients, and faults on demand.

`calls` holds every request that arrived whole. `faults[procedure]` is a list that is used up one request at a time: "refuse" closes the
connection before anything is done, "drop" does the work and closes without an answer, "unavailable" answers 503, "hang" never answers,
and "cut:N" ends a stream after N messages without its end.
"""

import base64
import collections
import hashlib
import http.server
import json
import os
import socket
import socketserver
import ssl
import struct
import threading
import time
import urllib.parse

STATUS = {"invalid_argument": 400, "failed_precondition": 400, "not_found": 404, "already_exists": 409, "permission_denied": 403,
          "resource_exhausted": 429, "unimplemented": 501, "unavailable": 503, "unauthenticated": 401, "deadline_exceeded": 504}


class Fail(Exception):
    def __init__(self, code, message="told by the fake"):
        super().__init__(message)
        self.code, self.message = code, message


def raw(b):
    return base64.b64encode(b).decode()


class Fake:
    def __init__(self, folder, tcp=False, tls=None):
        self.key = "dsec-test"
        self.calls = []
        self.faults = collections.defaultdict(list)
        self.sandboxes = {}  # key -> sandbox
        self.executed = collections.Counter()  # command ID -> how often it was really run
        self.commands = {}  # ID -> (stdout, stderr, outcome)
        self.polls_before_end = 0
        self.stdin = bytearray()
        self.stdin_room = None
        self.files = {}  # path octets -> octets
        self.steps = {}
        self.renewals = 0
        self.records = [{"seq": str(i + 1), "kind": "output", "data": raw(b"%d" % i)} for i in range(10)]
        self.protocol = (1, 1)
        self.lock = threading.Lock()
        self.hung = threading.Event()
        self.stopping = threading.Event()
        handler = type("Handler", (_Handler,), {"fake": self})
        if tcp:
            self.server = _Tcp(("127.0.0.1", 0), handler)
            if tls is not None:
                self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
            self.url = f"{'https' if tls else 'http'}://localhost:{self.server.server_address[1]}"
        else:
            path = os.path.join(folder, "dsec.sock")
            self.server = _Unix(path, handler)
            self.url = "unix:" + path
        self.connections = 0
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self):
        self.stopping.set()
        self.server.shutdown()
        self.server.server_close()

    def named(self, procedure):
        return [body for name, body in self.calls if name == procedure]

    # Unary calls.

    def answer(self, name, q):
        service, method = name.split("/")
        return getattr(self, f"{service[:-7].lower()}_{method.lower()}")(q)

    def info_getinfo(self, q):
        return {"version": "fake", "protocol": self.protocol[1], "protocolMin": self.protocol[0], "role": "up"}

    def layer_listlayers(self, q):
        return {"names": [{"name": "base/x", "versions": [{"version": "1", "layer": "sha256:1"}], "current": "1"}]}

    def layer_publishlayer(self, q):
        return {"published": q["name"] + "@1"}

    def iam_createkey(self, q):
        return {"info": {"id": "1"}, "key": "text"}

    def sandbox_create(self, q):
        if q.get("environment") == "full":
            raise Fail("resource_exhausted", "no room")
        with self.lock:
            existed = q["key"] in self.sandboxes
            sb = self.sandboxes.setdefault(q["key"], {"id": f"host-{len(self.sandboxes):016d}", "key": q["key"], "job": q.get("job", "-"),
                                                       "state": "running", "created": "2026-01-02T03:04:05.123456789Z"})
        return {"sandbox": sb, "existed": existed}

    def sandbox_createbatch(self, q):
        made = [self.sandbox_create(dict(q["request"], key=f"{q['request']['key']}/{i + 1}"))["sandbox"] for i in range(q["count"])]
        if q["all"]:
            return {"sandboxes": made}
        return {"sandboxes": made[:-1], "errors": [{"id": "k", "code": "resource_exhausted", "message": "full", "index": q["count"] - 1}]}

    def sandbox_migrate(self, q):
        s = self.sandbox_get(q)["sandbox"]
        s["host"] = q.get("to", "another")
        return {"sandbox": s, "from": "here"}

    def sandbox_get(self, q):
        for sb in self.sandboxes.values():
            if sb["id"] == q["id"]:
                return {"sandbox": sb}
        raise Fail("not_found", f"sandbox {q['id']}: unknown")

    def sandbox_list(self, q):
        every = list(self.sandboxes.values())
        at = int(q.get("page_token", 0))
        return {"sandboxes": every[at : at + 2], "nextPageToken": str(at + 2) if at + 2 < len(every) else ""}

    def sandbox_stop(self, q):
        ids = q.get("selector", {}).get("ids") or [q.get("id")]
        hit = [s for s in self.sandboxes.values() if s["id"] in ids or s["key"] == q.get("key")]
        for s in hit:
            s["state"] = "stopped"
        return {"sandboxes": hit}

    def command_start(self, q):
        with self.lock:
            known = q["id"] in self.commands
            if not known:
                self.executed[q["id"]] += 1
                self.commands[q["id"]] = self.run(q)
        running = self.polls_before_end > 0 or "wait_ms" not in q
        return {"existed": known, **self.told(q["id"], running)}

    def run(self, q):
        argv = q.get("argv") or [base64.b64decode(a).decode("latin-1") for a in q.get("argv_raw", [])] or [q.get("text", "")]
        if argv[0] == "fail":
            return b"", b"it broke", {"kind": "exited", "code": 3}
        if argv[0] == "lost":
            return b"", b"", {"kind": "unknown"}
        out = json.dumps(q).encode() if argv[0] == "show" else b"out"
        return out, b"err", {"kind": "exited"}

    def told(self, id, running):
        out, err, outcome = self.commands[id]
        if running:
            return {"command": {"id": id, "state": "running", "stdinTaken": str(len(self.stdin))}}
        return {"command": {"id": id, "state": "ended", "outcome": outcome}, "stdout": raw(out), "stderr": raw(err)}

    def command_wait(self, q):
        with self.lock:
            self.polls_before_end -= 1
            return self.told(q["id"], self.polls_before_end >= 0 or q["wait_ms"] == 1)

    def command_writestdin(self, q):
        data, offset = base64.b64decode(q.get("data", "")), int(q["offset"])
        with self.lock:
            fresh = data[len(self.stdin) - offset :]
            self.stdin += fresh if self.stdin_room is None else fresh[: self.stdin_room]
        return {"taken": str(len(self.stdin))}

    def command_signal(self, q):
        return {}

    def command_opensession(self, q):
        return {"session": {"name": q["name"], "state": "open"}}

    def command_closesession(self, q):
        return {"session": {"name": q["name"], "state": "ended"}}

    def job_put(self, q):
        return {"job": q["job"]}

    def job_renew(self, q):
        self.renewals += 1
        return {"job": {"name": q["name"]}}

    def job_stop(self, q):
        return {}

    def file_stat(self, q):
        path = base64.b64decode(q["at"]["path_raw"]) if "path_raw" in q["at"] else q["at"]["path"].encode()
        if path not in self.files:
            raise Fail("not_found", f"stat {path!r}: no such file")
        return {"info": {"path": q["at"].get("path", ""), "type": "file", "mode": 0o755, "size": str(len(self.files[path])), "modified": "2001-02-03T04:05:06Z"}}

    # Streams.

    def stream(self, name, q):
        if name == "CommandService/Attach":
            out, err, outcome = self.commands[q["id"]]
            for i in range(int(q["stdout_offset"]), len(out), 3):
                yield {"chunk": {"stream": "stdout", "offset": str(i), "data": raw(out[i : i + 3])}}
            yield {"gap": {"stream": "stderr", "from": str(q["stderr_offset"]), "to": "7"}}
            yield {"ended": {"id": q["id"], "outcome": outcome}}
        elif name == "LogService/Read":
            for r in self.records[q["from_seq"] - 1 :]:
                yield {"records": [r]}
        elif name == "FileService/List":
            for path in sorted(self.files):
                yield {"entries": [{"path": "", "pathRaw": raw(path), "type": "file"}]}
        elif name == "FileService/Watch":
            yield {"kind": "ready"}
            yield {"kind": "created", "path": "a"}
        else:
            raise Fail("not_found", name)


class _Server(socketserver.ThreadingMixIn):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, client_address):
        pass


class _Tcp(_Server, socketserver.TCPServer):
    pass


class _Unix(_Server, socketserver.UnixStreamServer):
    pass


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 20  # head and body leave together
    fake = None

    def setup(self):
        if isinstance(self.request.getsockname(), tuple):
            self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().setup()
        self.fake.connections += 1

    def address_string(self):
        return "fake"

    def log_message(self, *_):
        pass

    def body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            out = b""
            while True:
                size = int(self.rfile.readline(), 16)
                out += self.rfile.read(size)
                self.rfile.readline()
                if size == 0:
                    return out
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def reply(self, status, data, kind="application/json", **headers):
        self.send_response(status)
        for k, v in {"Content-Type": kind, "Content-Length": str(len(data)), "Dsec-Protocol": "1", **headers}.items():
            self.send_header(k.replace("_", "-"), v)
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()

    def fail(self, e):
        self.reply(STATUS.get(e.code, 500), json.dumps({"code": e.code, "message": e.message}).encode())

    def fault(self, name, body):
        """True when the request is done with."""
        fault = self.fake.faults[name].pop(0) if self.fake.faults[name] else ""
        self.cut = int(fault[4:]) if fault.startswith("cut:") else None
        if fault == "refuse":
            self.close_connection = True
            return True
        self.fake.calls.append((name, body))
        if fault == "hang":
            self.fake.hung.set()
            self.fake.stopping.wait(20)
            self.close_connection = True
            return True
        if fault == "unavailable":
            self.fail(Fail("unavailable"))
            return True
        self.dropped = fault == "drop"
        return False

    def do_POST(self):
        if self.path.startswith("/v1/ports/"):
            return self.do_GET()
        name = self.path[len("/dsec.v1.") :]
        body = self.body()
        kind = self.headers["Content-Type"]
        if not name.startswith("InfoService/") and self.headers.get("Authorization") != "Bearer " + self.fake.key:
            return self.fail(Fail("unauthenticated", "key: missing or wrong"))
        if kind == "application/connect+json":
            return self.streaming(name, body)
        q = json.loads(body)
        if self.fault(name, q):
            return
        try:
            out = self.fake.answer(name, q)
        except Fail as e:
            return self.fail(e)
        if self.dropped:
            self.close_connection = True
            return
        self.reply(200, json.dumps(out).encode())

    def streaming(self, name, body):
        messages = []
        while body:
            size = struct.unpack(">I", body[1:5])[0]
            messages.append(json.loads(body[5 : 5 + size]))
            body = body[5 + size :]
        if self.fault(name, messages[0]):
            return
        out = self.fake.stream(name, messages[0])
        if self.dropped:
            self.close_connection = True
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/connect+json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        end = {}
        try:
            for i, m in enumerate(out):
                if self.cut is not None and i == self.cut:
                    self.close_connection = True
                    self.wfile.flush()
                    return
                self.piece(struct.pack(">BI", 0, len(json.dumps(m))) + json.dumps(m).encode())
        except Fail as e:
            end = {"error": {"code": e.code, "message": e.message}}
        data = json.dumps(end).encode()
        self.piece(struct.pack(">BI", 2, len(data)) + data)
        self.piece(b"")

    def piece(self, data):
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()

    # Plain HTTP.

    def query(self):
        u = urllib.parse.urlsplit(self.path)
        parts = dict(p.split("=", 1) for p in u.query.split("&") if p)
        return u.path, {k: urllib.parse.unquote_to_bytes(v) for k, v in parts.items()}

    def do_PUT(self):
        route, q = self.query()
        if q.get("path") == b"/refused":
            self.close_connection = True
            self.fail(Fail("permission_denied", "write /refused: no"))
            time.sleep(0.2)  # as real servers do: a close with unread octets could overtake the answer
            return
        data = self.body()
        if self.fault("PUT " + route.split("/")[2], q):
            return
        if route == "/v1/layers":
            out = {"layer": {"id": "sha256:" + hashlib.sha256(data).hexdigest(), "octets": str(len(data))}, "published": q.get("name", b"").decode()}
            if self.dropped:
                self.close_connection = True
                return
            self.reply(200, json.dumps(out).encode())
            return
        step = q["step"]
        existed = step in self.fake.steps
        self.fake.steps[step] = True
        if not existed:
            self.fake.files[q["path"]] = (self.fake.files.get(q["path"], b"") if "append" in q else b"") + data
        if self.dropped:
            self.close_connection = True
            return
        out = {"info": {"path": "x", "size": str(len(data))}, "written": str(len(data)), "existed": existed, "applied": str(len(data)), "entries": "1"}
        self.reply(200, json.dumps(out).encode())

    def do_GET(self):
        if self.path.startswith("/v1/ports/"):
            return self.port()
        route, q = self.query()
        if self.fault("GET " + route.split("/")[2], q):
            return
        data = self.fake.files.get(q["path"])
        if data is None:
            return self.fail(Fail("not_found", f"read {q['path']!r}: no such file"))
        data = data[int(q.get("offset", 0)) :][: int(q["length"]) if "length" in q else None]
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Trailer", "Dsec-Skipped")
        self.end_headers()
        for n, i in enumerate(range(0, len(data), 1000)):
            if self.cut is not None and n == self.cut:
                self.close_connection = True
                return
            self.piece(data[i : i + 1000])
        self.wfile.write(b'0\r\nDsec-Skipped: "a \\u00e4: socket"\r\n\r\n' if "trees" in route else b"0\r\n\r\n")

    def port(self):
        self.fake.calls.append(("port", {"path": self.path, **{k.lower(): v for k, v in self.headers.items()}}))
        port = self.path.split("/")[4].split("?")[0]
        if port == "81":
            return self.reply(502, b"dsec: nothing listens\n", "text/plain", Dsec_Error="failed_precondition")
        upgrade = self.headers.get("Upgrade", "")
        if not upgrade:
            return self.reply(200 if port == "80" else 500, self.body() or b"hello", "text/plain", X_App="yes")
        self.close_connection = True
        self.send_response(101)
        self.send_header("Upgrade", upgrade)
        self.send_header("Connection", "Upgrade")
        if upgrade == "websocket":
            token = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(token.encode()).digest()).decode())
            if self.headers.get("Sec-WebSocket-Protocol"):
                self.send_header("Sec-WebSocket-Protocol", self.headers["Sec-WebSocket-Protocol"].split(",")[0])
        self.end_headers()
        if upgrade == "websocket":
            return self.websocket()
        self.wfile.write(b"early")
        self.wfile.flush()
        while True:
            data = self.request.recv(65536)
            if not data:
                return
            self.wfile.write(data.upper())
            self.wfile.flush()

    def websocket(self):
        """Echoes; pings first; the text "bye" makes it close with 4001."""
        self.frame(9, b"are you there")
        while True:
            head = self.rfile.read(2)
            if len(head) < 2:
                return
            n = head[1] & 0x7F
            if n == 126:
                n = int.from_bytes(self.rfile.read(2), "big")
            elif n == 127:
                n = int.from_bytes(self.rfile.read(8), "big")
            mask = self.rfile.read(4)
            data = self.rfile.read(n)
            data = bytes(b ^ mask[i % 4] for i, b in enumerate(data)) if n < 100000 else data
            opcode = head[0] & 15
            self.fake.calls.append(("frame", (opcode, data[:100])))
            if opcode == 8:
                self.frame(8, data)
                return
            if opcode in (1, 2):
                if data == b"bye":
                    self.frame(8, struct.pack(">H", 4001) + b"enough")
                    continue
                half = len(data) // 2
                self.frame(opcode, data[:half], last=False)
                self.frame(10, b"")
                self.frame(0, data[half:])

    def frame(self, opcode, data, last=True):
        n = len(data)
        head = bytes([(0x80 if last else 0) | opcode]) + (bytes([n]) if n < 126 else bytes([126]) + struct.pack(">H", n) if n < 65536 else bytes([127]) + struct.pack(">Q", n))
        self.wfile.write(head + data)
        self.wfile.flush()
