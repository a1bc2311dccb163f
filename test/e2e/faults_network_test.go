package e2e

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/coder/websocket"

	"github.com/dsec-dev/dsec/client"
)

// echoServer is a server in Python that answers what it was asked, as HTTP or as WebSocket.
const echoServer = `
import base64, hashlib, http.server, json, os, socket, socketserver, struct, sys, threading
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    address_family = family; daemon_threads = True; allow_reuse_address = True
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *a): pass
    def answer(self):
        n = int(self.headers.get("Content-Length") or 0)
        body = json.dumps({"path": self.path, "host": self.headers.get("Host"), "headers": {k.lower(): v for k, v in self.headers.items()}, "body": self.rfile.read(n).decode("latin1")}).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    do_POST = do_PUT = answer
    def do_GET(self):
        if self.headers.get("Upgrade", "").lower() != "websocket": return self.answer()
        key = base64.b64encode(hashlib.sha1((self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()).decode()
        extra = ""
        for p in (self.headers.get("Sec-WebSocket-Protocol") or "").split(","):
            if p.strip() and not p.strip().startswith("dsec."): extra = "Sec-WebSocket-Protocol: %s\r\n" % p.strip(); break
        self.wfile.write(("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: %s\r\n%s\r\n" % (key, extra)).encode())
        self.frames(); self.close_connection = True
    def send(self, op, data):
        n = len(data)
        head = bytes([0x80 | op]) + (bytes([n]) if n < 126 else bytes([126]) + struct.pack(">H", n) if n < 65536 else bytes([127]) + struct.pack(">Q", n))
        self.wfile.write(head + data); self.wfile.flush()
    def frames(self):
        message = b""
        while True:
            h = self.rfile.read(2)
            if len(h) < 2: note("dropped"); return
            n = h[1] & 127
            if n == 126: n = struct.unpack(">H", self.rfile.read(2))[0]
            elif n == 127: n = struct.unpack(">Q", self.rfile.read(8))[0]
            mask = self.rfile.read(4)
            data = self.rfile.read(n)
            m = (mask * (n // 4 + 1))[:n]
            data = (int.from_bytes(data, "big") ^ int.from_bytes(m, "big")).to_bytes(n, "big") if n else b""
            op = h[0] & 15
            if op == 8: note("close %s" % (struct.unpack(">H", data[:2])[0] if len(data) > 1 else "none") + " " + data[2:].decode()); self.send(8, data); return
            if op == 9: self.send(10, data); continue
            message += data
            if not h[0] & 0x80: continue
            text = message[:40].decode("latin1")
            if text == "host": self.send(1, self.headers["Host"].encode())
            elif text.startswith("close "):
                code = int(text.split()[1]); self.send(8, struct.pack(">H", code) + b"bye"); return
            elif text == "close": self.send(8, b""); return
            elif text == "drop": self.connection.shutdown(socket.SHUT_RDWR); return
            else: self.send(2 if len(message) > 1000 else 1, message)
            message = b""
def note(x):
    with open("/tmp/notes", "a") as f: f.write(x + "\n")
Server((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
`

// serve starts the echo server in a sandbox and waits until it listens.
func serve(t testing.TB, sb *client.Sandbox, user, address string, port int) {
	t.Helper()
	_, err := sb.Start(within(t), client.Cmd{User: user, Argv: []string{"python3", "-c", echoServer, address, fmt.Sprint(port)}})
	must(t, err)
	probe := fmt.Sprintf("import socket; socket.create_connection((%q, %d), 5)", map[string]string{"0.0.0.0": "127.0.0.1", "::": "::1"}[address], port)
	if !strings.Contains("0.0.0.0 ::", address) {
		probe = fmt.Sprintf("import socket; socket.create_connection((%q, %d), 5)", address, port)
	}
	must(t, eventually(func() error {
		if r := exe(t, sb, client.Cmd{Argv: []string{"python3", "-c", probe}}); !r.OK() {
			return fmt.Errorf("%s", describe(r))
		}
		return nil
	}))
}

func TestB46PortsAreReachable(t *testing.T) {
	t.Parallel()
	// Proxy variables in the service's environment must not touch what goes to sandboxes.
	s := newService(ownDir(t), "up", "--pool-size", "1g")
	for _, v := range []string{"HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"} {
		s.env = append(s.env, v+"=http://127.0.0.1:9")
	}
	start(t, s)
	for _, network := range []string{"none", "open"} {
		t.Run(network, func(t *testing.T) {
			sb := s.debianBox(t, func(o *client.Options) { o.Network = network })
			for i, c := range []struct {
				address string
				port    int
			}{{"127.0.0.1", 8080}, {"0.0.0.0", 49983}, {"::1", 44772}, {"0.0.0.0", 22}, {"127.0.0.1", 1}, {"::", 8443}, {"127.0.0.1", 65535}} {
				user := []string{"nobody", "root", "alice"}[i%3]
				serve(t, sb, user, c.address, c.port)
				for _, q := range []struct {
					path   string
					header []string
				}{
					{fmt.Sprintf("/v1/ports/%s/%d/a/b?c=d", sb.ID, c.port), nil},
					{"/a/b?c=d", []string{"Dsec-Sandbox", sb.ID, "Dsec-Port", fmt.Sprint(c.port)}},
					{"/a/b?c=d", []string{"Host", fmt.Sprintf("%d-%s.boxes.test", c.port, sb.ID)}},
				} {
					r, err := http.NewRequest("POST", "http://dsec"+q.path, strings.NewReader("the body"))
					must(t, err)
					r.Header.Set("X-API-Key", s.key())
					status, body := s.send(t, r, q.header...)
					if status != 200 || !strings.Contains(body, `"path": "/a/b?c=d"`) || !strings.Contains(body, "the body") || strings.Contains(body, s.key()) {
						t.Errorf("%s:%d by %v %s: %d %s", c.address, c.port, q.header, q.path, status, body)
					}
				}
			}
			if got := strings.TrimSpace(out(t, sb, "cat /proc/net/tcp /proc/net/tcp6 | awk '$4==\"0A\"' | wc -l")); got != "7" {
				t.Errorf("%s listeners inside, want the 7 of the test", got)
			}
			status, body := portCall(t, s, sb.ID, 9999)
			if status != http.StatusBadGateway {
				t.Errorf("a port nobody listens on: %d %s", status, body)
			}
		})
	}
	t.Run("the host's firewall drops", func(t *testing.T) {
		// In a table of its own, for a few seconds, and only for what would go to the sandboxes' network: this machine has other users.
		sb := s.debianBox(t, func(o *client.Options) { o.Network = "open" })
		serve(t, sb, "root", "0.0.0.0", 8080)
		address := strings.TrimSpace(out(t, sb, "hostname -I | awk '{print $1}'"))
		if net.ParseIP(address) == nil {
			t.Fatalf("address %q", address)
		}
		table := "dsec_e2e_" + s.instance()
		rules := fmt.Sprintf(`table ip %[1]s {
 chain input { type filter hook input priority -10; ip saddr %[2]s drop; }
 chain output { type filter hook output priority -10; ip daddr %[2]s drop; }
 chain forward { type filter hook forward priority -10; ip daddr %[2]s drop; ip saddr %[2]s drop; }
}`, table, address)
		cmd := exec.Command("nft", "-f", "-")
		cmd.Stdin = strings.NewReader(rules)
		if b, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("nft: %v %s", err, b)
		}
		defer exec.Command("nft", "delete", "table", "ip", table).Run()
		if status, body := portCall(t, s, sb.ID, 8080); status != 200 {
			t.Errorf("%d %s", status, body)
		}
	})
}

func portCall(t testing.TB, s *service, id string, port int) (int, string) {
	t.Helper()
	r, err := http.NewRequest("GET", fmt.Sprintf("http://dsec/v1/ports/%s/%d/", id, port), nil)
	must(t, err)
	r.Header.Set("X-API-Key", s.key())
	return s.send(t, r)
}

func TestB47WebSockets(t *testing.T) {
	t.Parallel()
	s := shared(t)
	sb := s.debianBox(t)
	serve(t, sb, "nobody", "127.0.0.1", 8080)
	host := "8080-" + sb.ID + ".boxes.test"
	tr := s.transport()
	dial := func(query string, protocols []string, header ...string) (*websocket.Conn, *http.Response, error) {
		h := http.Header{}
		for i := 0; i+1 < len(header); i += 2 {
			h.Set(header[i], header[i+1])
		}
		ctx, cancel := context.WithTimeout(within(t), patience)
		defer cancel()
		c, resp, err := websocket.Dial(ctx, "ws://dsec/x"+query, &websocket.DialOptions{Host: host, HTTPHeader: h, Subprotocols: protocols,
			HTTPClient: &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}})
		if c != nil {
			c.SetReadLimit(64 << 20)
		}
		return c, resp, err
	}
	key := s.key()
	open := func() *websocket.Conn {
		t.Helper()
		c, _, err := dial("", nil, "X-API-Key", key)
		must(t, err)
		return c
	}
	notes := func(want string) {
		t.Helper()
		must(t, eventually(func() error {
			got := strings.TrimSpace(out(t, sb, "tail -n1 /tmp/notes 2>/dev/null || true"))
			if !strings.HasPrefix(got, want) {
				return fmt.Errorf("the server saw %q, want %q", got, want)
			}
			return nil
		}))
	}
	t.Run("the client closes", func(t *testing.T) {
		for _, c := range []struct {
			code   websocket.StatusCode
			reason string
			seen   string
		}{{1000, "", "close 1000"}, {4001, "own reason", "close 4001 own reason"}, {websocket.StatusNoStatusRcvd, "", "close none"}, {1001, "away", "close 1001 away"}} {
			w := open()
			_ = w.Close(c.code, c.reason)
			notes(c.seen)
		}
		w := open()
		_ = w.CloseNow()
		notes("dropped")
	})
	t.Run("the server closes", func(t *testing.T) {
		for _, c := range []struct {
			ask  string
			code websocket.StatusCode
		}{{"close 1000", 1000}, {"close 4002", 4002}, {"close 1011", 1011}, {"close", websocket.StatusNoStatusRcvd}, {"drop", -1}} {
			w := open()
			must(t, w.Write(within(t), websocket.MessageText, []byte(c.ask)))
			_, _, err := w.Read(within(t))
			if err == nil || websocket.CloseStatus(err) != c.code {
				t.Errorf("%s: %v (code %d), want %d", c.ask, err, websocket.CloseStatus(err), c.code)
			}
			_ = w.CloseNow()
		}
	})
	t.Run("messages", func(t *testing.T) {
		w := open()
		defer w.CloseNow()
		go func() { // a reader, so that the ping's answer is taken
			<-within(t).Done()
		}()
		must(t, w.Write(within(t), websocket.MessageText, []byte("hello")))
		if _, b, err := w.Read(within(t)); err != nil || string(b) != "hello" {
			t.Errorf("%q, %v", b, err)
		}
		reading := w.CloseRead(within(t))
		ctx, cancel := context.WithTimeout(reading, patience)
		defer cancel()
		if err := w.Ping(ctx); err != nil {
			t.Errorf("ping: %v", err)
		}
		w = open()
		defer w.CloseNow()
		large := bytes.Repeat([]byte("0123456789abcdef"), 1<<20)
		must(t, w.Write(within(t), websocket.MessageBinary, large))
		if _, b, err := w.Read(within(t)); err != nil || !bytes.Equal(b, large) {
			t.Errorf("16 MB: %d octets, %v", len(b), err)
		}
		// The server goes while the client sends.
		w = open()
		must(t, w.Write(within(t), websocket.MessageText, []byte("drop")))
		ctx, cancel = context.WithTimeout(within(t), patience)
		defer cancel()
		for range 200 {
			if err := w.Write(ctx, websocket.MessageBinary, large[:1<<20]); err != nil {
				break
			}
		}
		if ctx.Err() != nil {
			t.Error("sending to a server that is gone hangs")
		}
		_ = w.CloseNow()
	})
	t.Run("host name", func(t *testing.T) {
		w := open()
		defer w.CloseNow()
		must(t, w.Write(within(t), websocket.MessageText, []byte("host")))
		_, seen, err := w.Read(within(t))
		must(t, err)
		r, err := http.NewRequest("GET", "http://dsec/", nil)
		must(t, err)
		r.Header.Set("X-API-Key", key)
		_, body := s.send(t, r, "Host", host)
		if !strings.Contains(body, fmt.Sprintf(`"host": %q`, seen)) || string(seen) != host {
			t.Errorf("host of the upgrade %q, of HTTP %s, want %q", seen, body, host)
		}
	})
	t.Run("keys", func(t *testing.T) {
		for name, c := range map[string]struct {
			query     string
			protocols []string
			header    []string
			status    int
		}{
			"header":       {header: []string{"X-API-Key", key}, status: 101},
			"bearer":       {header: []string{"Authorization", "Bearer " + key}, status: 101},
			"query":        {query: "?dsec_key=" + key, status: 101},
			"protocol":     {protocols: []string{"dsec.key." + key}, status: 101},
			"with another": {protocols: []string{"dsec.key." + key, "chat"}, status: 101},
			"none":         {status: 401},
			"wrong":        {header: []string{"X-API-Key", "dsec_wrong"}, status: 401},
			"wrong query":  {query: "?dsec_key=x", status: 401},
		} {
			w, resp, err := dial(c.query, c.protocols, c.header...)
			if resp == nil || resp.StatusCode != c.status {
				t.Errorf("%s: %v, %v; want %d", name, resp, err, c.status)
			}
			if w == nil {
				continue
			}
			if name == "with another" && w.Subprotocol() != "chat" {
				t.Errorf("%s: protocol %q", name, w.Subprotocol())
			}
			must(t, w.Write(within(t), websocket.MessageText, []byte("hi")))
			if _, b, err := w.Read(within(t)); err != nil || string(b) != "hi" {
				t.Errorf("%s: %q, %v", name, b, err)
			}
			_ = w.CloseNow()
		}
		host = "8081-" + sb.ID + ".boxes.test"
		if _, resp, err := dial("", nil, "X-API-Key", key); resp == nil || resp.StatusCode != 502 {
			t.Errorf("nobody listens: %v, %v", resp, err)
		}
	})
	if b, err := os.ReadFile(s.logFile()); err == nil {
		for line := range strings.Lines(string(b)) {
			if strings.Contains(line, "level=ERROR") && strings.Contains(line, "port") {
				t.Errorf("logged as an error: %s", line)
			}
		}
	}
}

// What "none" and "open" let through: nothing to anywhere, and out to the host's networks but not to the host's own daemons.
func TestNetworkPolicies(t *testing.T) {
	t.Parallel()
	s := shared(t)
	l, err := net.Listen("tcp", "0.0.0.0:0")
	must(t, err)
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, "host\n")
			c.Close()
		}
	}()
	port := l.Addr().(*net.TCPAddr).Port
	var addresses []string
	list, err := net.InterfaceAddrs()
	must(t, err)
	for _, a := range list {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && !n.IP.IsLoopback() {
			addresses = append(addresses, n.IP.String())
		}
	}
	none, other := s.box(t), s.box(t)
	out(t, other, "true")
	for _, a := range append(addresses, "127.0.0.1", "169.254.169.254", "1.1.1.1") {
		if r := exe(t, none, sh(fmt.Sprintf("echo | timeout 3 nc %s %d", a, port))); r.OK() && strings.Contains(string(r.Stdout), "host") {
			t.Errorf("network none reached %s", a)
		}
	}
	if got := out(t, none, "ls /sys/class/net 2>/dev/null; cat /proc/net/dev | grep -c :"); strings.TrimSpace(got) != "1" {
		t.Errorf("interfaces of none: %q", got)
	}
	open := s.box(t, func(o *client.Options) { o.Network = "open" })
	peer := s.box(t, func(o *client.Options) { o.Network = "open" })
	_, err = peer.Start(within(t), client.Cmd{Argv: []string{"nc", "-l", "-p", "7777", "-e", "echo", "peer"}})
	must(t, err)
	address := strings.TrimSpace(out(t, peer, "ip -4 -o addr | awk '$2!=\"lo\" {split($4,a,\"/\"); print a[1]}'"))
	if r := exe(t, open, sh(fmt.Sprintf("echo | timeout 3 nc %s 7777", address))); strings.Contains(string(r.Stdout), "peer") {
		t.Errorf("one sandbox reached another at %s", address)
	}
	for _, a := range append(addresses, "169.254.169.254") {
		if r := exe(t, open, sh(fmt.Sprintf("echo | timeout 3 nc %s %d", a, port))); strings.Contains(string(r.Stdout), "host") {
			t.Errorf("network open reached the host's own port at %s", a)
		}
	}
}
