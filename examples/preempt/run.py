"""Kills a trainer, and the host under it, at random moments, and compares what comes out with a run that nobody disturbed.

Starts a `dsec up` of its own on temporary folders, ends it, and leaves nothing. Needs root, bin/dsec and busybox-static.
"""

import argparse
import os
import pathlib
import random
import signal
import shutil
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "client" / "python"))

import dsec  # noqa: E402


class Service:
    """A `dsec up` that is killed and started again; its sandboxes live on."""

    def __init__(self, binary, root, args):
        self.binary, self.root, self.args, self.process = binary, root, args, None
        self.url, self.key = f"unix:{root}/run/dsec.sock", f"{root}/run/key"

    def start(self):
        self.log = open(f"{self.root}/up.log", "ab")
        self.process = subprocess.Popen(
            [self.binary, "up", "--state", f"{self.root}/state", "--run", f"{self.root}/run", "--pool-size", "4g", "--listen", "", *self.args],
            stdout=self.log, stderr=self.log, start_new_session=True)
        until = time.monotonic() + 60
        while True:
            try:
                with self.client() as c:
                    c.list(dsec.Selector(job="none"))  # the host has taken back what lives
                    return
            except dsec.DsecError:
                if self.process.poll() is not None or time.monotonic() > until:
                    raise SystemExit("dsec up did not start: " + pathlib.Path(f"{self.root}/up.log").read_text()[-3000:]) from None
            time.sleep(0.05)

    def client(self):
        return dsec.Client(self.url, key_file=self.key)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)


def busybox(client):
    """A layer with a shell."""
    with tempfile.TemporaryDirectory() as d:
        for name in ("bin", "etc", "root", "srv", "tmp"):
            os.mkdir(f"{d}/{name}")
        shutil.copy("/bin/busybox", f"{d}/bin/busybox")
        for name in subprocess.run(["/bin/busybox", "--list"], capture_output=True, text=True, check=True).stdout.split():
            if name != "busybox":
                os.symlink("busybox", f"{d}/bin/{name}")
        pathlib.Path(f"{d}/etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
        return client.layers.import_folder(d, publish="preempt/busybox").layer.id


def trainer(service, job, layer, args):
    env = dict(os.environ, DSEC_URL=service.url, DSEC_KEY_FILE=service.key, PYTHONPATH=str(ROOT / "client" / "python"), PYTHONDONTWRITEBYTECODE="1")
    return subprocess.Popen([sys.executable, str(HERE / "trainer.py"), job, layer, str(args.rollouts), str(args.steps)], env=env)


def wait(process, seconds):
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False


def results(service, job, rollouts, steps):
    """Rewards, what the trainer saw, and files, by task; and how often each step was done."""
    out, twice = {}, []
    with service.client() as c:
        rows = {int(r["labels"]["task"]): r for r in c.job(job, lease=0).export(rows="trajectories")}
        if len(rows) != rollouts:
            raise SystemExit(f"job {job}: {len(rows)} trajectories, want {rollouts}")
        for task, row in sorted(rows.items()):
            files = c.sandbox(row["sandbox"]).files
            there = {e.path: files.read(f"/srv/{e.path}") for e in files.list("/srv")}
            done = there["steps"].decode().split()
            twice += [f"{job} task {task}: {s} done {done.count(s)} times" for s in sorted(set(done) | {f"act-{n}" for n in range(steps)}) if done.count(s) != 1]
            out[task] = (row["reward"], row["metadata"], there)
    return out, twice


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--rollouts", type=int, default=64)
    p.add_argument("--steps", type=int, default=12)
    p.add_argument("--kills", type=int, default=10, help="of the trainer; the host is killed half as often, besides")
    p.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    p.add_argument("--dsec", default=str(ROOT / "bin" / "dsec"))
    p.add_argument("up", nargs="*", help="more arguments for dsec up, after --")
    args = p.parse_args()
    chance = random.Random(args.seed)
    print(f"seed {args.seed}: {args.rollouts} rollouts of {args.steps} steps")
    root = tempfile.mkdtemp(prefix="dsec-preempt-", dir="/var/tmp")
    service = Service(args.dsec, root, ["--keep", *args.up])
    try:
        service.start()
        with service.client() as c:
            layer = busybox(c)
        begin = time.monotonic()
        if not wait(trainer(service, "calm", layer, args), 600):
            raise SystemExit("the undisturbed trainer failed")
        calm = time.monotonic() - begin
        print(f"undisturbed: {calm:.1f} s")

        begin, kills, hosts = time.monotonic(), 0, 0
        run = trainer(service, "storm", layer, args)
        plan = ["trainer"] * args.kills + ["host"] * (args.kills // 2)
        chance.shuffle(plan)
        pause = calm / args.kills  # so spread that kills meet the work and not its end, whatever this machine's speed
        for victim in plan:
            time.sleep(chance.uniform(0.2, 1.0) * pause)
            if victim == "host":
                service.kill()
                time.sleep(chance.choice((0, chance.uniform(0, 0.3))))
                service.start()
                hosts += 1
            elif run.poll() is None:
                run.kill()
                run.wait()
                kills += 1
                run = trainer(service, "storm", layer, args)
        if not wait(run, 600):
            raise SystemExit("the last life of the trainer failed")
        print(f"disturbed: {time.monotonic() - begin:.1f} s, trainer killed {kills} times, host {hosts} times")
        if kills < args.kills:
            raise SystemExit(f"the work ended after {kills} kills: give it more --rollouts or --steps")

        want, one = results(service, "calm", args.rollouts, args.steps)
        got, two = results(service, "storm", args.rollouts, args.steps)
        bad = one + two + [f"task {t}: {want[t]} and {got[t]}" for t in want if want[t] != got[t]]
        for line in bad[:20]:
            print("WRONG:", line)
        if bad:
            raise SystemExit(f"{len(bad)} differences; again: --seed {args.seed}")
        files = sum(len(w[2]) for w in want.values())
        print(f"equal: {len(want)} rewards, {files} files; each of {len(want) * args.steps} steps was done once")
    finally:
        if service.process:
            if service.process.poll() is None:
                service.end()
            service.args = [a for a in service.args if a != "--keep"]
            service.start()  # takes back what the kept service left, to end it
            service.end()
        if sys.exc_info()[0] not in (None,):
            sys.stderr.write(pathlib.Path(f"{root}/up.log").read_text()[-3000:])
        shutil.rmtree(root, ignore_errors=True)


main()
