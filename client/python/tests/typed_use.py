"""How users write it; only type-checked."""

from __future__ import annotations

from typing import List, Optional

from dsec import AsyncClient, AsyncSandbox, Batch, Chunk, Client, DsecError, FileInfo, Outcome, Process, Result, Sandbox, Screen, Selector


def sync() -> Optional[int]:
    with Client("unix:/x", key_file="/k", timeout=3) as c, c.run_container(environment="e", memory="1g", disk=1, cwd=b"/", env={"A": b"x"}, cpu=0.5) as sb:
        box: Sandbox = sb
        r: Result = box.exec("a", b"b", timeout=1, stdin="x")
        r = box.exec(["a", b"b"], env={"A": "b"})
        p: Process = box.start("a", terminal=(1, 2))
        chunks: List[Chunk] = list(p)
        outcome: Optional[Outcome] = p.outcome
        with box.session(name="s") as sh:
            sh.run("x", timeout=2).check()
        infos: List[FileInfo] = box.files.list("/")
        x: Screen = box.screen()
        x.drag(1, 2, (3, 4))
        png: bytes = x.shot().png
        batch: Batch = c.run_containers(3, all=True, layers=["a"])
        with batch as many:
            print([s.id for s in many], chunks, outcome, infos, png)
        for s in c.list(Selector(job="j")):
            print(s.info.state if s.info else "")
        try:
            return r.exit_code
        except DsecError as e:
            print(e.code)
    return None


async def asynchronous() -> None:
    async with AsyncClient() as c:
        async with c.run_container(environment="e") as sb:
            box: AsyncSandbox = sb
            r: Result = await box.exec("a")
            async for chunk in await box.start("a"):
                print(chunk.data, r.text)
        other: AsyncSandbox = await c.run_container(layers=["a"])
        async with other.session() as sh:
            print((await sh.run("x")).text)
        async with c.job(lease=3) as job, job.run_containers(2, environment="e") as batch:
            print([s.id for s in batch])
