"""Recorded steps, verdicts and exports against a real `dsec up`."""

import asyncio

import dsec

from test_e2e import client, server  # noqa: F401  the fixtures; client makes the environment py

JOB = "trajectory"


def test_trainer_starts_again(server, client):  # noqa: F811
    with dsec.Client(server.url) as c:
        job = c.job(JOB, lease=0)
        box = job.run_container(environment="py", key="r1")
        for i in range(4):
            assert box.sh("echo >>/tmp/runs; wc -l </tmp/runs", step=f"s{i}", env={"B": "2", "A": "1"}).text.strip() == str(i + 1)
    with dsec.Client(server.url) as c:  # a new process of the trainer
        job = c.job(JOB, lease=0)
        job.resume()
        box = job.run_container(environment="py", key="r1")
        calls = []
        run = box._t.run
        box._t.run = lambda op: (calls.append(1), run(op))[1]
        for i in range(4):
            assert box.sh("echo >>/tmp/runs; wc -l </tmp/runs", step=f"s{i}", env={"B": "2", "A": "1"}).text.strip() == str(i + 1)
        assert not calls
        assert box.sh("echo >>/tmp/runs; wc -l </tmp/runs", step="s4", env={"B": "2", "A": "1"}).text.strip() == "5"
        box._t.run = run
        box.stop()
        said = box.verdict(0.75, {"grader": "py", "parts": [1, 2]})
        assert said.reward == 0.75 and said.metadata == {"grader": "py", "parts": [1, 2]}
        assert box.verdict(0.75, {"grader": "py", "parts": [1, 2]}) == said
        info = box.refresh()
        assert info.summary.steps == 5 and info.summary.failed == 0 and info.verdict.reward == 0.75
        rows = list(job.export(reward=">0.5"))
        assert [r["step"] for r in rows] == [f"s{i}" for i in range(5)] and rows[2]["stdout"]["text"].strip() == "3"
        assert list(job.export(reward=">0.9")) == []
        (row,) = job.export(rows="trajectories")
        assert row["reward"] == 0.75 and row["summary"]["steps"] == "5"
        kinds = [r.kind for r in box.log(output=False)]
        assert kinds.count("command") == 5 and kinds[-1] == "verdict"


def test_asyncio(server, client):  # noqa: F811
    async def go():
        async with dsec.AsyncClient(server.url) as c:
            job = await c.job("trajectory-aio", lease=0)
            box = await job.run_container(environment="py", key="r1")
            first = await box.sh("date +%s; cat /proc/sys/kernel/random/uuid", step="a")
        async with dsec.AsyncClient(server.url) as c:
            job = await c.job("trajectory-aio", lease=0)
            assert await job.fast_forward() == 1
            box = await job.run_container(environment="py", key="r1")
            assert (await box.sh("date +%s; cat /proc/sys/kernel/random/uuid", step="a")).stdout == first.stdout
            await box.verdict(1)
            assert [r["step"] async for r in job.export()] == ["a"]
            await box.stop()

    asyncio.run(go())


def test_restore(server, client):  # noqa: F811
    with dsec.Client(server.url) as c:
        job = c.job("restored-py", lease=0)
        box = job.run_container(environment="py", key="r1", secret_env=["TOKEN"], env={"TOKEN": "s3cret"})
        box.files.write("/tmp/f", b"kept")
        assert box.sh("echo >>/tmp/runs; wc -l </tmp/runs; cat /tmp/f", step="a").text.split() == ["1", "kept"]
        box.sh("cat /proc/sys/kernel/random/uuid", step="uuid")
        box.sh("true", step="asked", restore="never")
        try:
            c.restore(box.id)
            raise AssertionError("a living sandbox was restored")
        except dsec.State as e:
            assert not isinstance(e, dsec.NotRestored) and "lives" in str(e)
        box.stop()
        try:
            job.restore("r1")
            raise AssertionError("nobody was asked")
        except dsec.NotRestored as e:
            assert e.result.state == "asks" and [s.step for s in e.result.asks] == ["asked"] and list(e.result.secrets) == ["TOKEN"], e.result
        secrets = {"TOKEN": "s3cret"}
        try:
            job.restore("r1", secrets=secrets, skip=["asked"])
            raise AssertionError("a strict restore did not end at a difference")
        except dsec.NotRestored as e:
            assert e.result.state == "diverged" and e.result.diverged[0].step == "uuid"
        new = job.restore("r1", secrets=secrets, skip=["asked"], warn=True)
        assert new.id != box.id and new.restored.differing == 1 and new.restored.skipped == 1 and new.info.state == "running"
        calls = []
        run = new._t.run
        new._t.run = lambda op: (calls.append(1), run(op))[1]
        assert new.sh("echo >>/tmp/runs; wc -l </tmp/runs; cat /tmp/f", step="a").text.split() == ["1", "kept"] and not calls
        new._t.run = run
        assert new.sh("wc -l </tmp/runs", step="b").text.strip() == "1"
        assert new.info.epoch == 2 and box.refresh().next == new.id  # the attempt that diverged had an epoch, too
        assert job.run_container(environment="py", key="r1", secret_env=["TOKEN"], env={"TOKEN": "s3cret"}).id == new.id
        new.stop()

    async def again():
        async with dsec.AsyncClient(server.url) as c:
            box = await c.restore(new.id, secrets=secrets, warn=True, skip=["*"])
            assert (await box.sh("wc -l </tmp/runs; echo $TOKEN", step="c")).text.split() == ["1", "s3cret"]
            await box.stop()

    asyncio.run(again())
