"""Drives dsec with SandboxFusion's own client: sync, async, and 128 callers at once. Ends with exit code 0 if every answer was right."""
import asyncio
import base64
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import requests
import sandbox_fusion as sf

url = sys.argv[1]
sf.set_sandbox_endpoint(url)
assert requests.get(url + "/v1/ping", timeout=10).json() == "pong"


def run(language, code, **more):
    return sf.run_code(sf.RunCodeRequest(code=code, language=language, **more), max_attempts=3, client_timeout=120)


def check(what, res, status, run_status="Finished", code=0, stdout=None, compiled=None, stderr=None):
    got = res.run_result
    ok = res.status == status
    if run_status is None:
        ok = ok and got is None and res.compile_result is not None and res.compile_result.return_code == code
    else:
        ok = ok and got is not None and got.status == run_status and got.return_code == code
        ok = ok and (stdout is None or got.stdout == stdout) and (stderr is None or stderr in got.stderr)
    if compiled is not None:
        ok = ok and (res.compile_result is not None) == compiled
    assert ok, f"{what}: {res}"
    print("right:", what)


check("python", run("python", "print(input()[::-1])", stdin="abc\n"), "Success", stdout="cba\n", compiled=False)
check("cpp", run("cpp", "#include <iostream>\nint main(){int a;std::cin>>a;std::cout<<a*2;}", stdin="21", compile_timeout=60), "Success", stdout="42", compiled=True)
check("bash", run("bash", "echo $((6*7))"), "Success", stdout="42\n")
check("nodejs", run("nodejs", "console.log([1,2,3].map(x=>x*x).join())"), "Success", stdout="1,4,9\n")
check("go", run("go", 'package main\nimport "fmt"\nfunc main(){fmt.Println("go")}', compile_timeout=120), "Success", stdout="go\n", compiled=True)
check("pytest passes", run("pytest", "def test_a(): assert 1 + 1 == 2\n"), "Success")
check("pytest fails", run("pytest", "def test_a(): assert 1 + 1 == 3\n"), "Failed", code=1)
check("compile error", run("cpp", "int main({", compile_timeout=60), "Failed", run_status=None, code=1, compiled=True)
check("run-time error", run("python", "raise SystemExit(3)"), "Failed", code=3)
check("a signal", run("cpp", "#include <cstdlib>\nint main(){abort();}", compile_timeout=60), "Failed", code=134)
check("run time limit", run("python", "import time; time.sleep(60)", run_timeout=1), "Failed", run_status="TimeLimitExceeded", code=137)
slow = run("cpp", "template<int N,int M>struct F{static const long v=(F<N-1,M>::v+F<N-1,M+1>::v)%1000003;};template<int M>struct F<0,M>{static const long v=M;};"
           "int main(){return F<800,0>::v;}", compile_timeout=1)
assert slow.status == "Failed" and slow.run_result is None and slow.compile_result.status == "TimeLimitExceeded", str(slow)[:600]
print("right: compile time limit")
files = run("python", "d=open('in/x').read(); open('out','w').write(d.upper())", files={"in/x": base64.b64encode(b"hello").decode()}, fetch_files=["out", "nothing"])
assert files.status == "Success" and {k: base64.b64decode(v) for k, v in files.files.items()} == {"out": b"HELLO"}, files
print("right: files in and out")


async def many(n):
    return await asyncio.gather(*[sf.run_code_async(sf.RunCodeRequest(code=f"print({i})", language="python"), max_attempts=8, client_timeout=60) for i in range(n)])


for i, res in enumerate(asyncio.run(many(16))):
    check(f"async {i}", res, "Success", stdout=f"{i}\n")
begin = time.time()
with ThreadPoolExecutor(128) as pool:
    # verl asks with a read timeout of its own and tries again on 504 alone.
    def call(i):
        for _ in range(20):
            r = requests.post(url + "/run_code", json={"code": f"print({i}+1)", "language": "python", "run_timeout": 10}, timeout=30)
            if r.status_code != 504:
                return r
        return r
    for i, r in enumerate(pool.map(call, range(384))):
        assert r.status_code == 200 and r.json()["run_result"]["stdout"] == f"{i+1}\n", (i, r.status_code, r.text)
print(f"right: 384 calls of 128 callers in {time.time()-begin:.1f} s")
