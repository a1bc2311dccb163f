"""A trainer that may be killed at any moment and started again: it drives rollouts, each a sandbox, to their rewards.

Run by run.py; alone: trainer.py JOB ROLLOUTS STEPS, with DSEC_URL and DSEC_KEY_FILE. It keeps nothing on its own disk. Its keys are made of what
it is about to do, so a second life asks for the same and is answered from the record until the first step that was not done.
"""

import hashlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import dsec

PASSING = (dsec.Unavailable, dsec.DeadlineExceeded, dsec.Exhausted)


def patiently(call):
    """Repeats a call while the service is away: it has a key, so that it is done once."""
    until = time.monotonic() + 120
    while True:
        try:
            return call()
        except PASSING:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def policy(task, n, seen):
    """What to do next, from all that was seen: another observation would lead elsewhere, and to another reward."""
    return int.from_bytes(hashlib.sha256(f"{task} {n} {seen}".encode()).digest()[:4], "big")


# Nothing here may be done twice: the state would be another one, and the line in /srv/steps would be there twice.
ACT = """s=$(cat /srv/state); s=$(( (s * 31 + {a}) % 1000003 )); echo $s > /srv/state; echo {step} >> /srv/steps; sleep 0.0{pause}; echo $s"""


def rollout(job, layer, task, steps):
    box = patiently(lambda: job.run_container(layers=[layer], key=f"task-{task}", memory="64m", disk="32m", pids=64, labels={"task": str(task)}))
    patiently(lambda: box.files.write("/srv/state", f"{task}\n", step="begin"))
    shell, seen = None, []
    for n in range(steps):
        a, step = policy(task, n, seen), f"act-{n}"
        text = ACT.format(a=a % 1000, step=step, pause=a % 10)
        if a % 4 == 0:  # some in a living shell, whose variables count what it did
            shell = shell or patiently(lambda: box.session(name="shell"))
            r = patiently(lambda: shell.run(f"{text}; k=$((k + 1)); echo $k", step=step))
        else:
            r = patiently(lambda: box.sh(text, step=step))
        seen.append(r.check().text)
        if a % 5 == 0:
            note = f"{n}: {r.text.split()[0]}\n"
            patiently(lambda: box.files.write(f"/srv/notes-{n}", note, step=f"note-{n}"))
    reward = int(seen[-1].split()[0]) / 1000003
    patiently(lambda: box.verdict(reward, {"task": task, "seen": hashlib.sha256(repr(seen).encode()).hexdigest()}))


def main():
    name, layer, rollouts, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    c = dsec.Client()
    job = patiently(lambda: c.job(name, lease=30, on_lease_end="pause"))  # who dies leaves paused sandboxes, not running ones
    patiently(job.resume)
    with ThreadPoolExecutor(16) as pool:
        for f in [pool.submit(rollout, job, layer, t, steps) for t in range(rollouts)]:
            f.result()
    job.detach()
    c.close()


main()
