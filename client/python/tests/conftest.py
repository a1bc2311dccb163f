import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))

from bridge import Bridge, Loop  # noqa: E402
from fake import Fake  # noqa: E402

import dsec  # noqa: E402


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("DSEC_URL", "DSEC_KEY", "DSEC_KEY_FILE", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # never used


@pytest.fixture
def fake(tmp_path):
    f = Fake(str(tmp_path))
    yield f
    f.close()


@pytest.fixture(params=["sync", "asyncio"])
def open_client(request):
    """Makes clients of both kinds with one face."""
    made, loop = [], None if request.param == "sync" else Loop()

    def make(url, key="dsec-test", timeout=60, **more):
        if loop is None:
            c = dsec.Client(url, key, timeout=timeout, **more)
        else:
            c = Bridge(loop, dsec.AsyncClient(url, key, timeout=timeout, **more))
        made.append(c)
        return c

    make.kind = request.param
    make.loop = loop
    yield make
    for c in made:
        c.close()
    if loop is not None:
        loop.close()


@pytest.fixture
def client(open_client, fake):
    return open_client(fake.url)
