package filewire

import (
	"encoding/binary"
	"fmt"
)

// Queue keeps the frames of one call that came and were not taken yet, in one buffer that never exceeds Window. It grows as it
// is needed, so an idle or small call costs nothing. It is not safe for concurrent use.
type Queue struct {
	buf  []byte
	head int
	used int // cost of what is inside or was taken and not granted again
	done int // cost taken and not granted again
	rest int // octets left of the front frame, 0: its header comes next
	kind Type

	dropped bool
}

const queueHeader = 5

// Push adds a frame; an error means that the sender passed over the window.
func (q *Queue) Push(t Type, body []byte) error {
	c := Cost(len(body))
	if q.used+c > Window {
		return fmt.Errorf("%d octets more than the window of %d", q.used+c-Window, Window)
	}
	q.used += c
	if q.dropped {
		return nil
	}
	if q.head == len(q.buf) {
		q.buf, q.head = q.buf[:0], 0
	} else if q.head > 0 && len(q.buf)+queueHeader+len(body) > cap(q.buf) {
		n := copy(q.buf, q.buf[q.head:])
		q.buf, q.head = q.buf[:n], 0
	}
	q.buf = append(q.buf, byte(t))
	q.buf = binary.LittleEndian.AppendUint32(q.buf, uint32(len(body)))
	q.buf = append(q.buf, body...)
	return nil
}

// Front is the type of the frame in front; false when the queue is empty.
func (q *Queue) Front() (Type, bool) {
	for q.rest == 0 {
		if q.head == len(q.buf) {
			return 0, false
		}
		q.kind = Type(q.buf[q.head])
		q.rest = int(binary.LittleEndian.Uint32(q.buf[q.head+1:]))
		q.head += queueHeader
		q.done += HeaderSize
		if q.rest == 0 { // an empty frame says nothing
			continue
		}
	}
	return q.kind, true
}

// Take copies octets of the frame in front into p and returns how many; the frame leaves the queue with its last octet.
func (q *Queue) Take(p []byte) int {
	if _, ok := q.Front(); !ok {
		return 0
	}
	n := copy(p, q.buf[q.head:q.head+q.rest])
	q.head += n
	q.rest -= n
	q.done += n
	if q.head == len(q.buf) {
		q.buf, q.head = q.buf[:0], 0
	}
	return n
}

// TakeAll returns a copy of what is left of the frame in front.
func (q *Queue) TakeAll() []byte {
	if _, ok := q.Front(); !ok {
		return nil
	}
	b := make([]byte, q.rest)
	q.Take(b)
	return b
}

// Grant returns the credit that the sender should get now: nothing until a quarter of the window was taken.
func (q *Queue) Grant() uint32 {
	if q.done < Window/4 {
		return 0
	}
	n := q.done
	q.used -= n
	q.done = 0
	return uint32(n)
}

// Drop forgets what is inside; later frames are counted against the window and not kept.
func (q *Queue) Drop() { q.buf, q.head, q.rest, q.dropped = nil, 0, 0, true }
