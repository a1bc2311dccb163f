package storetest

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Keys that a MemoryS3 lets in. It looks at the name only, not at the signature: a real server is for that.
const (
	AccessKey = "dsectestaccess"
	SecretKey = "dsectestsecretsecretsecret"
	Bucket    = "dsec-test"
)

// S3Fault is what happens to one request.
type S3Fault struct {
	Status    int           // answered instead, when not 0
	Code      string        // its S3 error code
	Delay     time.Duration // before anything
	Drop      bool          // the connection is cut before anything is done
	DropAfter bool          // it is done, and the connection is cut instead of an answer
	Cut       int64         // the connection is cut after so many octets of the answer, when not 0
	Flip      int64         // this octet of the answer, counted from 1, is changed
}

// MemoryS3 is a small S3 server for tests and benchmarks: one bucket, kept in files of a folder. It has a clock that can be put forward, faults
// and a link.
type MemoryS3 struct {
	dir  string
	Link *Link // may be nil

	mu      sync.Mutex
	fault   func(op, key string) S3Fault
	objects map[string]s3object
	keys    []string // sorted; nil when to be made anew
	ahead   time.Duration
	next    int
	counts  map[string]int
}

type s3object struct {
	file     string
	size     int64
	modified time.Time
	etag     string
}

// NewS3 makes an empty server whose objects are files in the folder.
func NewS3(dir string) *MemoryS3 {
	return &MemoryS3{dir: dir, objects: map[string]s3object{}, counts: map[string]int{}}
}

// SetFault has f asked at the start of each request, by several at once; op is GET, HEAD, PUT, DELETE or LIST, key without the bucket. nil ends it.
func (m *MemoryS3) SetFault(f func(op, key string) S3Fault) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fault = f
}

// Advance puts the clock forward.
func (m *MemoryS3) Advance(d time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ahead += d
}

// Now is the server's time.
func (m *MemoryS3) Now() time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	return time.Now().Add(m.ahead)
}

// Requests returns how many requests of each kind there were.
func (m *MemoryS3) Requests() map[string]int {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := map[string]int{}
	for k, v := range m.counts {
		out[k] = v
	}
	return out
}

// Names returns the names that begin with the prefix, with their sizes.
func (m *MemoryS3) Names(prefix string) map[string]int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := map[string]int64{}
	for k, o := range m.objects {
		if strings.HasPrefix(k, prefix) {
			out[k] = o.size
		}
	}
	return out
}

// Octets is the size of all objects.
func (m *MemoryS3) Octets() (n int64) {
	for _, size := range m.Names("") {
		n += size
	}
	return n
}

// Damage changes one octet of a stored object.
func (m *MemoryS3) Damage(key string, off int64) error {
	m.mu.Lock()
	o, ok := m.objects[key]
	m.mu.Unlock()
	if !ok {
		return os.ErrNotExist
	}
	f, err := os.OpenFile(o.file, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	var b [1]byte
	if _, err := f.ReadAt(b[:], off); err != nil {
		return err
	}
	b[0] ^= 0x40
	_, err = f.WriteAt(b[:], off)
	return err
}

// Remove removes an object as if it had been lost.
func (m *MemoryS3) Remove(key string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.drop(key)
}

func (m *MemoryS3) drop(key string) {
	if o, ok := m.objects[key]; ok {
		os.Remove(o.file)
		delete(m.objects, key)
		m.keys = nil
	}
}

func (m *MemoryS3) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	bucket, key, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	op := r.Method
	if op == http.MethodGet && key == "" {
		op = "LIST"
	}
	m.mu.Lock()
	m.counts[op]++
	fault := m.fault
	m.mu.Unlock()
	var f S3Fault
	if fault != nil {
		f = fault(op, key)
	}
	w.Header().Set("Date", m.Now().UTC().Format(http.TimeFormat))
	w.Header().Set("x-amz-request-id", "1")
	if err := sleep(r.Context(), f.Delay); err != nil {
		panic(http.ErrAbortHandler)
	}
	if f.Drop {
		panic(http.ErrAbortHandler)
	}
	if err := m.Link.Begin(r.Context()); err != nil {
		panic(http.ErrAbortHandler)
	}
	if f.Status != 0 {
		refuse(w, f.Status, f.Code)
		return
	}
	if !strings.Contains(r.Header.Get("Authorization"), "Credential="+AccessKey+"/") {
		refuse(w, http.StatusForbidden, "InvalidAccessKeyId")
		return
	}
	if bucket != Bucket {
		refuse(w, http.StatusNotFound, "NoSuchBucket")
		return
	}
	switch op {
	case "LIST":
		m.list(w, r)
	case http.MethodGet, http.MethodHead:
		m.serve(w, r, key, f)
	case http.MethodPut:
		m.put(w, r, key, f)
	case http.MethodDelete:
		m.mu.Lock()
		m.drop(key)
		m.mu.Unlock()
		if f.DropAfter {
			panic(http.ErrAbortHandler)
		}
		w.WriteHeader(http.StatusNoContent)
	default:
		refuse(w, http.StatusNotImplemented, "NotImplemented")
	}
}

type s3error struct {
	XMLName xml.Name `xml:"Error"`
	Code    string
	Message string
}

func refuse(w http.ResponseWriter, status int, code string) {
	w.Header().Set("Content-Type", "application/xml")
	w.WriteHeader(status)
	b, _ := xml.Marshal(s3error{Code: code, Message: "refused: " + code})
	w.Write(b)
}

func (m *MemoryS3) serve(w http.ResponseWriter, r *http.Request, key string, f S3Fault) {
	m.mu.Lock()
	o, ok := m.objects[key]
	var file *os.File
	var err error
	if ok {
		file, err = os.Open(o.file)
	}
	m.mu.Unlock()
	if !ok {
		refuse(w, http.StatusNotFound, "NoSuchKey")
		return
	}
	if err != nil {
		refuse(w, http.StatusInternalServerError, "InternalError")
		return
	}
	defer file.Close()
	from, n, status := int64(0), o.size, http.StatusOK
	if h := r.Header.Get("Range"); h != "" {
		var to int64
		if _, err := fmt.Sscanf(h, "bytes=%d-%d", &from, &to); err != nil || from >= o.size || to < from {
			refuse(w, http.StatusRequestedRangeNotSatisfiable, "InvalidRange")
			return
		}
		to = min(to, o.size-1)
		n, status = to-from+1, http.StatusPartialContent
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, to, o.size))
	}
	w.Header().Set("ETag", o.etag)
	w.Header().Set("Last-Modified", o.modified.UTC().Format(http.TimeFormat))
	w.Header().Set("Content-Length", strconv.FormatInt(n, 10))
	w.WriteHeader(status)
	if r.Method == http.MethodHead {
		return
	}
	buf := make([]byte, 64<<10)
	for sent := int64(0); sent < n; {
		b := buf[:min(int64(len(buf)), n-sent)]
		if _, err := file.ReadAt(b, from+sent); err != nil {
			panic(http.ErrAbortHandler)
		}
		if i := f.Flip - 1 - sent; f.Flip > 0 && i >= 0 && i < int64(len(b)) {
			b[i] ^= 0x10
		}
		if f.Cut > 0 && sent+int64(len(b)) > f.Cut {
			w.Write(b[:f.Cut-sent])
			panic(http.ErrAbortHandler)
		}
		if m.Link.Send(r.Context(), len(b)) != nil {
			return
		}
		if _, err := w.Write(b); err != nil {
			return
		}
		sent += int64(len(b))
	}
}

func (m *MemoryS3) put(w http.ResponseWriter, r *http.Request, key string, f S3Fault) {
	m.mu.Lock()
	m.next++
	name := filepath.Join(m.dir, fmt.Sprintf("o-%d", m.next))
	m.mu.Unlock()
	body := io.Reader(r.Body)
	sum := r.Header.Get("x-amz-content-sha256")
	if strings.HasPrefix(sum, "STREAMING-") {
		body = &awsChunked{r: bufio.NewReader(r.Body)}
	}
	file, err := os.Create(name)
	if err != nil {
		refuse(w, http.StatusInternalServerError, "InternalError")
		return
	}
	h := sha256.New()
	n, err := io.Copy(io.MultiWriter(file, h), &linked{r.Context(), m.Link, body})
	file.Close()
	got := hex.EncodeToString(h.Sum(nil))
	if err == nil && len(sum) == 64 && sum != got {
		err = errors.New("digest")
	}
	if err != nil {
		os.Remove(name)
		refuse(w, http.StatusBadRequest, "XAmzContentSHA256Mismatch")
		return
	}
	m.mu.Lock()
	m.drop(key)
	m.objects[key] = s3object{name, n, time.Now().Add(m.ahead), `"` + got[:32] + `"`}
	m.keys = nil
	m.mu.Unlock()
	if f.DropAfter {
		panic(http.ErrAbortHandler)
	}
	w.Header().Set("ETag", `"`+got[:32]+`"`)
	w.WriteHeader(http.StatusOK)
}

type linked struct {
	ctx  context.Context
	link *Link
	r    io.Reader
}

func (l *linked) Read(p []byte) (int, error) {
	n, err := l.r.Read(p[:min(len(p), 64<<10)])
	if serr := l.link.Send(l.ctx, n); serr != nil {
		return n, serr
	}
	return n, err
}

// awsChunked undoes the framing of a signed stream.
type awsChunked struct {
	r    *bufio.Reader
	left int64
	end  bool
}

func (c *awsChunked) Read(p []byte) (int, error) {
	for c.left == 0 {
		if c.end {
			return 0, io.EOF
		}
		line, err := c.r.ReadString('\n')
		if err != nil {
			return 0, err
		}
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		size, _, _ := strings.Cut(line, ";")
		if c.left, err = strconv.ParseInt(size, 16, 64); err != nil {
			return 0, err
		}
		c.end = c.left == 0
	}
	n, err := c.r.Read(p[:min(int64(len(p)), c.left)])
	c.left -= int64(n)
	return n, err
}

type s3list struct {
	XMLName               xml.Name `xml:"http://s3.amazonaws.com/doc/2006-03-01/ ListBucketResult"`
	Name                  string
	Prefix                string
	KeyCount, MaxKeys     int
	IsTruncated           bool
	NextContinuationToken string `xml:",omitempty"`
	Contents              []s3entry
}

type s3entry struct {
	Key          string
	LastModified string
	ETag         string
	Size         int64
	StorageClass string
}

func (m *MemoryS3) list(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	if q.Has("location") {
		w.Write([]byte(`<LocationConstraint xmlns="http://s3.amazonaws.com/doc/2006-03-01/"></LocationConstraint>`))
		return
	}
	limit, _ := strconv.Atoi(q.Get("max-keys"))
	if limit <= 0 || limit > 1000 {
		limit = 1000
	}
	after := max(q.Get("start-after"), q.Get("continuation-token"))
	prefix := q.Get("prefix")
	out := s3list{Name: Bucket, Prefix: prefix, MaxKeys: limit}
	m.mu.Lock()
	if m.keys == nil {
		for k := range m.objects {
			m.keys = append(m.keys, k)
		}
		slices.Sort(m.keys)
	}
	i, _ := slices.BinarySearch(m.keys, max(prefix, after))
	for ; i < len(m.keys); i++ {
		k := m.keys[i]
		if k <= after && after != "" {
			continue
		}
		if !strings.HasPrefix(k, prefix) {
			break
		}
		if len(out.Contents) == limit {
			out.IsTruncated, out.NextContinuationToken = true, out.Contents[limit-1].Key
			break
		}
		o := m.objects[k]
		out.Contents = append(out.Contents, s3entry{k, o.modified.UTC().Format("2006-01-02T15:04:05.000Z"), o.etag, o.size, "STANDARD"})
	}
	m.mu.Unlock()
	out.KeyCount = len(out.Contents)
	b, err := xml.Marshal(out)
	if err != nil {
		refuse(w, http.StatusInternalServerError, "InternalError")
		return
	}
	_ = m.Link.Send(r.Context(), len(b))
	w.Header().Set("Content-Type", "application/xml")
	w.Write([]byte(xml.Header))
	w.Write(b)
}
