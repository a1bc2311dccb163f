package vmm

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
)

// QEMU says that a state is written a moment before it lets the machine go on. A save is done when it does: what comes next is refused before.
func TestSaveEndsWhenTheMachineMayGoOn(t *testing.T) {
	dir, err := os.MkdirTemp("", "dsec-qmp-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	l, err := net.Listen("unix", filepath.Join(dir, qmpSocket))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	left, early := 5, make(chan bool, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		fmt.Fprintln(c, `{"QMP": {}}`)
		for s := bufio.NewScanner(c); s.Scan(); {
			var q struct {
				Execute string
				ID      int
			}
			json.Unmarshal(s.Bytes(), &q)
			answer := `{}`
			switch q.Execute {
			case "query-status":
				answer = `{"status": "postmigrate"}`
				if left > 0 {
					left--
					answer = `{"status": "finish-migrate"}`
				}
			case "cont":
				early <- left > 0
			}
			fmt.Fprintf(c, `{"return": %s, "id": %d}`+"\n", answer, q.ID)
			if q.Execute == "migrate" {
				fmt.Fprintln(c, `{"event": "MIGRATION", "data": {"status": "completed"}}`)
			}
		}
	}()
	v := &qemuVM{id: "m", dir: dir}
	if err := v.connect(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer v.Release()
	f, err := os.Create(filepath.Join(dir, "state"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := v.Save(t.Context(), f, false); err != nil {
		t.Fatal(err)
	}
	if err := v.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	if <-early {
		t.Error("the machine was told to go on before it may")
	}
}
