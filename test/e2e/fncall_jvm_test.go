package e2e

import (
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

// Java and Rust have environments of their own, of half a gigabyte each, so they are judged in the long runs.
var largeLanguages = map[string][]callCase{
	"java": {
		{name: "ok", code: "import java.util.*;\npublic class Main{record P(int a,int b){}\npublic static void main(String[] x){Scanner s=new Scanner(System.in);P p=new P(s.nextInt(),s.nextInt());System.out.println(p.a()+p.b());}}", stdin: "2 3\n", verdict: "OK", out: "5\n"},
		{name: "exit", code: "class Main{public static void main(String[] x){System.exit(3);}}", verdict: "RE", codes: []int32{3}},
		{name: "exception", code: "class Main{public static void main(String[] x){Object o=null;o.hashCode();}}", verdict: "RE", codes: []int32{1}, err: "NullPointerException"},
		{name: "compile error", code: "class Main{int x(){}}", verdict: "CE", err: "missing return statement"},
		{name: "endless", code: "class Main{public static void main(String[] x){for(;;);}}", limits: &dsecv1.CallLimits{CpuMs: 1000, WallMs: 20000}, verdict: "TLE", limit: "cpu"},
		{name: "forty threads", code: "class Main{public static void main(String[] x)throws Exception{Thread[] t=new Thread[40];int[] n={0};for(int i=0;i<40;i++){t[i]=new Thread(()->{synchronized(n){n[0]++;}});t[i].start();}for(Thread h:t)h.join();System.out.println(n[0]);}}", verdict: "OK", out: "40\n"},
		{name: "memory", code: "class Main{public static void main(String[] x){byte[][] b=new byte[64][];for(int i=0;i<64;i++){b[i]=new byte[32<<20];java.util.Arrays.fill(b[i],(byte)1);}System.out.println(b.length);}}", limits: &dsecv1.CallLimits{Memory: 256 * mib}, verdict: "MLE"},
	},
	"rust": {
		{name: "ok", code: "use std::io::*;fn main(){let mut s=String::new();stdin().read_to_string(&mut s).unwrap();println!(\"{}\",s.split_whitespace().map(|x|x.parse::<i64>().unwrap()).sum::<i64>());}", stdin: "1 2 3\n", verdict: "OK", out: "6\n"},
		{name: "exit", code: "fn main(){std::process::exit(3)}", verdict: "RE", codes: []int32{3}},
		{name: "panic", code: "fn main(){let v:Vec<i32>=vec![];println!(\"{}\",v[v.len()+1]);}", verdict: "RE", codes: []int32{101}, err: "index out of bounds"},
		{name: "compile error", code: "fn main(){let x:i32=\"a\";}", verdict: "CE", err: "mismatched types"},
		{name: "endless", code: "fn main(){let mut i=0usize;loop{i=i.wrapping_add(std::env::args().count());if i==1<<60{break}}}", limits: &dsecv1.CallLimits{CpuMs: 500, WallMs: 20000}, verdict: "TLE", limit: "cpu"},
		{name: "threads", code: "fn main(){let t:Vec<_>=(0..8).map(|i|std::thread::spawn(move||i)).collect();println!(\"{}\",t.into_iter().map(|h|h.join().unwrap()).sum::<i32>());}", verdict: "OK", out: "28\n"},
	},
}

func TestCallsOfLargeLanguages(t *testing.T) {
	if !torture {
		t.Skip("torture: their environments take minutes to make")
	}
	for lang, cases := range largeLanguages {
		t.Run(lang, func(t *testing.T) {
			s := shared(t)
			name := "fncall-" + lang
			s.named(t, name, func() (io.ReadCloser, error) {
				cmd := exec.Command("examples/judge/env.sh", lang)
				cmd.Dir, cmd.Stderr = repository(), os.Stderr
				out, err := cmd.Output()
				if err != nil {
					return nil, err
				}
				return os.Open(filepath.Join(repository(), strings.TrimSpace(string(out))))
			})
			c := s.client()
			_, err := c.PublishEnvironment(within(t), &dsecv1.Environment{Name: name, Base: name})
			must(t, err)
			for i := range cases {
				k := &cases[i]
				t.Run(k.name, func(t *testing.T) {
					ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
					defer cancel()
					res, err := c.Calls.Run(ctx, connect.NewRequest(&dsecv1.RunCallRequest{Job: "large",
						Program: &dsecv1.CallProgram{Lang: lang, Code: k.code}, Input: &dsecv1.CallInput{Stdin: k.stdin, Args: k.args}, Limits: k.limits, QueueMs: 120_000}))
					if err != nil {
						t.Fatal(client.Wrap(err))
					}
					k.judge(t, res.Msg)
				})
			}
		})
	}
}
