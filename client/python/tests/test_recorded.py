"""Recorded steps: the hash of a request, and what is answered without the server."""

import base64
import json
import os

from dsec import _ops as ops
from dsec._octets import Fields
from dsec._recorded import Recorded, request_hash

VECTORS = os.path.join(os.path.dirname(__file__), "..", "..", "testdata", "request_hash.json")


def snake(body):
    names = {"argvRaw": "argv_raw", "cwdRaw": "cwd_raw", "stdinOpen": "stdin_open", "timeoutMs": "timeout_ms", "outputCap": "output_cap", "valueRaw": "value_raw"}
    if isinstance(body, dict):
        return {names.get(k, k): snake(v) for k, v in body.items()}
    return [snake(v) for v in body] if isinstance(body, list) else body


def test_request_hash():
    with open(VECTORS, encoding="utf-8") as f:
        for v in json.load(f):
            body = snake(v["request"])
            if v.get("stdin"):
                body["stdin"] = base64.b64encode(v["stdin"].encode()).decode()
            assert request_hash(body, v["cwd"], v["user"]) == v["hash"], v["name"]


def test_recorded_results():
    body = ops.start_body("h-1", argv=["ls"], step="a", env={"A": "1"})
    hash = request_hash(body, "/w", "u")

    def step(id, total=3, state="ended"):
        return {
            "id": id, "state": state, "requestHash": hash, "stdout": base64.b64encode(b"out").decode(),
            "outcome": {"kind": "exited", "code": 3, "stdout": {"total": str(total), "head": str(total)}},
        }

    r = Recorded()
    r.begin()
    r.take(Fields({"sandbox": {"id": "h-1", "cwd": "/w", "user": "u"}, "steps": [step("a"), step("b", 4)]}))
    r.take(Fields({"steps": [step("c", state="unknown")]}))
    r.end()
    done = r.result(body)
    assert done is not None and done.stdout == b"out" and done.exit_code == 3
    for other in (
        ops.start_body("h-1", argv=["ls"], step="b", env={"A": "1"}), ops.start_body("h-1", argv=["ls"], step="c", env={"A": "1"}),
        ops.start_body("h-1", argv=["ls"], step="a"), ops.start_body("h-1", argv=["ls"], step="a", env={"A": "1"}, secret_env=["A"]),
        ops.start_body("h-2", argv=["ls"], step="a", env={"A": "1"}), ops.start_body("h-1", argv=["ls"], env={"A": "1"}),
    ):
        assert r.result(other) is None, other
