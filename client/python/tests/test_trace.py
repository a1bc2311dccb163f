"""What steps did, as the wire tells it."""

from __future__ import annotations

import pytest

import dsec
from dsec import _ops
from dsec._octets import Fields
from dsec._trace import Trace


def test_a_trace_is_read() -> None:
    t = Trace()
    t.take(Fields({"step": {"number": "2", "step": "b", "kind": "command", "trace": {
        "level": "full", "readBytes": "-1", "writeBytes": "4096", "moreFiles": "7", "volatilePaths": ["/c"], "lacking": ["pressure: no"],
        "files": [{"path": "/a", "kind": "changed", "before": {"type": "file", "mode": 420, "size": "1", "sha256": "AAE="}, "after": {"type": "link", "link": "x"}},
                  {"pathRaw": "L/8=", "kind": "removed", "before": {"type": "dir"}}],
        "processes": [{"pid": "5", "argv": ["sh", "-c"], "ended": True, "cpuUs": "1500", "code": 3}],
        "reads": [{"path": "/etc/passwd"}], "connections": [{"address": "10.0.0.1:80", "error": 111}]}}}))
    t.take(Fields({"step": {"number": "3", "step": "c", "untraced": "it has not ended"}}))
    t.take(Fields({"file": {"path": "/a", "changedLast": "b", "changedLastNumber": "2"}}))
    b, c = t.steps
    assert (b.number, b.step, b.more_files, b.volatile, b.read_bytes, b.write_bytes, b.whole) == (2, "b", 7, ["/c"], -1, 4096, True)
    first, second = b.files
    assert first.before and first.after and (first.before.sha256, first.after.link) == ("0001", "x")
    assert second.path == "/\udcff" and second.after is None
    assert b.processes[0].argv == ["sh", "-c"] and b.processes[0].cpu == 0.0015 and b.processes[0].code == 3
    assert b.reads == ["/etc/passwd"] and b.connections == ["10.0.0.1:80"]
    assert c.untraced and not c.whole
    assert t.file and t.file.changed_last == "b" and not t.file.reads_traced


@pytest.mark.parametrize("flag", ["shared", "raced", "deferred", "filesPartial"])
def test_what_is_mixed_is_not_whole(flag: str) -> None:
    assert not dsec.TracedStep.of(Fields({"trace": {flag: True}})).whole


def test_the_level_is_asked_for() -> None:
    body = _ops.create_body(environment="e", trace="full", volatile=["/cache"])
    assert body["trace"] == "full" and body["volatile_paths"] == ["/cache"]
    with pytest.raises(dsec.Invalid):
        _ops.create_body(environment="e", volatile="/cache")
