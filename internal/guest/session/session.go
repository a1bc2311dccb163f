// Package session holds what a session's shell runs: a loop that takes commands from the host and executes them in the
// shell itself, so that cwd, variables, functions, options and jobs stay.
//
// Nothing of the loop is open while a command runs. The shell opens what it needs by the holder's descriptors
// (/proc/<holder>/fd/<n>, see docs/format/guest.md): the control pipe to read one line, then the command's input, output,
// error and text for as long as the command runs, then the status pipe to write one number. Children inherit none of the
// private ones: the shells keep what they saved behind close-on-exec. A command's text is a file that the shell reads as
// data, so nothing in it can end the loop's own syntax.
//
// The end of a command is its status line. A shell that ends first (exit, exec, set -e, a signal) never writes one: the
// command's result is then the shell's own end, and the session is over. Whoever forges a line fools his own session only.
//
// Bash gets the text into a variable and evaluates it there: `return`, traps on DEBUG and line numbers are as at a prompt.
// Other shells source it, because they can't read a file into a variable without a child; errors name its path.
package session

import (
	"bytes"
	"path"
	"strconv"
)

// bash is the loop for bash, from 3.2 on. $1 is the holder, $2 the control pipe's number.
//
//   - `builtin command eval`: a function of the user may be called eval or read; `command` takes from eval, in posix mode,
//     its right to end the shell on an error.
//   - The text ends in a line of ours where errexit is on or may be switched on: the status of a last `a && b` is no failure at a prompt, but
//     as the status of eval it would be. Not behind a backslash, which would join the lines.
//   - The status of the command before is put back into $? first, unless errexit would take that for a failure.
//   - The loop is doubled, and the status is written at its begin: a text's own `break` or `continue` leads there too.
//   - export -n: `set -a` must not put a long text into the environment of every child.
const bash = `_dsec_h=/proc/$1/fd _dsec_c=$2 _dsec_r=0 _dsec_q=
set --
shopt -s expand_aliases
_dsec_status() { builtin return "$1"; }
while :; do while :; do
	case $_dsec_q in ?*) builtin printf '%s\n' "$_dsec_r" >|"$_dsec_h/$_dsec_q" || : ;; esac
	_dsec_q= _dsec_p=$_dsec_r
	IFS=' ' builtin read -r _dsec_i _dsec_o _dsec_e _dsec_t _dsec_q <"$_dsec_h/$_dsec_c" || { [[ -e $_dsec_h/$_dsec_c ]] || builtin exit 0; builtin continue; }
	IFS= builtin read -r -d '' _dsec_x <"$_dsec_h/$_dsec_t" || :
	builtin export -n _dsec_x
	_dsec_k= _dsec_r=0
	case $_dsec_x in *\\) ;; *)
		case $-:$_dsec_x in *e*:*|*'set -'*)
			_dsec_k=1 _dsec_x=$_dsec_x$'\n_dsec_k=$?'
		esac
	esac
	case $- in *e*) ;; *) _dsec_status "$_dsec_p" ;; esac
	builtin command eval "$_dsec_x" <"$_dsec_h/$_dsec_i" >|"$_dsec_h/$_dsec_o" 2>|"$_dsec_h/$_dsec_e"
	_dsec_r=$? _dsec_x=
	case $_dsec_k:$_dsec_r in ?*:0) _dsec_r=$_dsec_k ;; esac
done; done
`

// posix is the loop for any other shell (dash, busybox ash, bash as sh).
const posix = `_dsec_h=/proc/$1/fd _dsec_c=$2 _dsec_r=0 _dsec_q=
set --
_dsec_status() { return "$1"; }
while :; do while :; do
	case $_dsec_q in ?*) command printf '%s\n' "$_dsec_r" >|"$_dsec_h/$_dsec_q" || : ;; esac
	_dsec_q= _dsec_p=$_dsec_r
	IFS=' ' command read -r _dsec_i _dsec_o _dsec_e _dsec_t _dsec_q <"$_dsec_h/$_dsec_c" || { [ -e "$_dsec_h/$_dsec_c" ] || exit 0; continue; }
	_dsec_r=0
	case $- in *e*) ;; *) _dsec_status "$_dsec_p" ;; esac
	command . "$_dsec_h/$_dsec_t" <"$_dsec_h/$_dsec_i" >|"$_dsec_h/$_dsec_o" 2>|"$_dsec_h/$_dsec_e"
	_dsec_r=$?
done; done
`

// Shells are those to look for in an image, in order, where the request names none.
func Shells() []string { return []string{"/bin/bash", "/usr/bin/bash", "/bin/sh"} }

// Argv is the command line of a session's shell. holder is the holder's process number in the sandbox, control the number
// under which it keeps the control pipe's reading end. Its standard descriptors should be /dev/null: commands get their own.
func Argv(shell string, holder int, control uint32) []string {
	name := path.Base(shell)
	loop := posix
	if name == "bash" || name == "rbash" {
		loop = bash
	}
	return []string{shell, "-c", loop, name, strconv.Itoa(holder), strconv.FormatUint(uint64(control), 10)}
}

// Command names a command's descriptors by their numbers in the holder. The pipes and the text have to be the user's
// (fchown), or the shell can't open them. Text is a file (a memfd) without NUL.
type Command struct{ Stdin, Stdout, Stderr, Text, Status uint32 }

// Line is what starts the command: write it to the control pipe, in one piece.
func (c Command) Line() []byte {
	var b []byte
	for i, n := range []uint32{c.Stdin, c.Stdout, c.Stderr, c.Text, c.Status} {
		if i > 0 {
			b = append(b, ' ')
		}
		b = strconv.AppendUint(b, uint64(n), 10)
	}
	return append(b, '\n')
}

// MaxStatus bounds what is worth reading from a status pipe.
const MaxStatus = 16

// Status reads what came out of a status pipe: the shell's $? for the command. ok is false while there is no whole line
// and for anything else than a number from 0 to 255; then only the shell's end tells more.
func Status(b []byte) (code int, ok bool) {
	line, _, whole := bytes.Cut(b, []byte("\n"))
	if !whole || len(line) == 0 || len(line) > 3 {
		return 0, false
	}
	for _, c := range line {
		if c < '0' || c > '9' {
			return 0, false
		}
		code = code*10 + int(c-'0')
	}
	return code, code <= 255
}
