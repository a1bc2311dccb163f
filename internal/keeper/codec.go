package keeper

import (
	"encoding/binary"
	"fmt"
	"reflect"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// The codec writes plain values field by field, little endian, and is symmetrical by reflection. A struct is preceded by its
// length, so that either side may know more fields at its end than the other. A slice, string or map is a u32 count and its
// elements; a pointer is a presence octet and the value; a time is nanoseconds since 1970, and the zero time is 0.

var timeType = reflect.TypeFor[time.Time]()

// appendValue appends the encoding of v, which may be a pointer to the value.
func appendValue(b []byte, v any) []byte {
	if v == nil {
		return b
	}
	r := reflect.ValueOf(v)
	if r.Kind() == reflect.Pointer {
		r = r.Elem()
	}
	return appendReflect(b, r)
}

func appendReflect(b []byte, v reflect.Value) []byte {
	switch v.Kind() {
	case reflect.Bool:
		if v.Bool() {
			return append(b, 1)
		}
		return append(b, 0)
	case reflect.Uint8:
		return append(b, byte(v.Uint()))
	case reflect.Uint16:
		return binary.LittleEndian.AppendUint16(b, uint16(v.Uint()))
	case reflect.Uint32:
		return binary.LittleEndian.AppendUint32(b, uint32(v.Uint()))
	case reflect.Uint64, reflect.Uint:
		return binary.LittleEndian.AppendUint64(b, v.Uint())
	case reflect.Int, reflect.Int64, reflect.Int32:
		return binary.LittleEndian.AppendUint64(b, uint64(v.Int()))
	case reflect.String:
		b = binary.LittleEndian.AppendUint32(b, uint32(v.Len()))
		return append(b, v.String()...)
	case reflect.Slice:
		b = binary.LittleEndian.AppendUint32(b, uint32(v.Len()))
		if v.Type().Elem().Kind() == reflect.Uint8 {
			return append(b, v.Bytes()...)
		}
		for i := range v.Len() {
			b = appendReflect(b, v.Index(i))
		}
		return b
	case reflect.Map:
		b = binary.LittleEndian.AppendUint32(b, uint32(v.Len()))
		for it := v.MapRange(); it.Next(); {
			b = appendReflect(b, it.Key())
			b = appendReflect(b, it.Value())
		}
		return b
	case reflect.Pointer:
		if v.IsNil() {
			return append(b, 0)
		}
		return appendReflect(append(b, 1), v.Elem())
	case reflect.Struct:
		if v.Type() == timeType {
			t := v.Interface().(time.Time)
			if t.IsZero() {
				return append(b, make([]byte, 8)...)
			}
			return binary.LittleEndian.AppendUint64(b, uint64(t.UnixNano()))
		}
		at := len(b)
		b = append(b, 0, 0, 0, 0)
		for i := range v.NumField() {
			b = appendReflect(b, v.Field(i))
		}
		binary.LittleEndian.PutUint32(b[at:], uint32(len(b)-at-4))
		return b
	}
	panic("keeper: no encoding for " + v.Type().String()) // a type of ours, found by the first test that sends it
}

// decodeValue decodes b into the value that p points to. It never takes more memory than a small multiple of len(b).
func decodeValue(b []byte, p any) error {
	d := decoder{b: b}
	d.value(reflect.ValueOf(p).Elem(), 0)
	if d.bad {
		return fmt.Errorf("decode %T of %d octets: %w", p, len(b), sandbox.ErrInvalid)
	}
	return nil
}

type decoder struct {
	b   []byte
	bad bool
}

func (d *decoder) take(n int) []byte {
	if n < 0 || n > len(d.b) {
		d.bad, d.b = true, nil
		return nil
	}
	p := d.b[:n]
	d.b = d.b[n:]
	return p
}

func (d *decoder) uint(n int) uint64 {
	p := d.take(n)
	var u uint64
	for i := range p {
		u |= uint64(p[i]) << (8 * i)
	}
	return u
}

// count reads the number of elements, of which each takes at least one octet.
func (d *decoder) count() int {
	n := d.uint(4)
	if n > uint64(len(d.b)) {
		d.bad, d.b = true, nil
		return 0
	}
	return int(n)
}

func (d *decoder) value(v reflect.Value, depth int) {
	if d.bad || depth > 16 {
		d.bad = true
		return
	}
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(d.uint(1) != 0)
	case reflect.Uint8:
		v.SetUint(d.uint(1))
	case reflect.Uint16:
		v.SetUint(d.uint(2))
	case reflect.Uint32:
		v.SetUint(d.uint(4))
	case reflect.Uint64, reflect.Uint:
		v.SetUint(d.uint(8))
	case reflect.Int, reflect.Int64, reflect.Int32:
		v.SetInt(int64(d.uint(8)))
	case reflect.String:
		v.SetString(string(d.take(d.count())))
	case reflect.Slice:
		d.slice(v, depth)
	case reflect.Map:
		n := d.count()
		if n == 0 {
			v.SetZero()
			return
		}
		m := reflect.MakeMap(v.Type())
		for range n {
			key, val := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
			d.value(key, depth+1)
			d.value(val, depth+1)
			if d.bad {
				return
			}
			m.SetMapIndex(key, val)
		}
		v.Set(m)
	case reflect.Pointer:
		if d.uint(1) == 0 {
			v.SetZero()
			return
		}
		v.Set(reflect.New(v.Type().Elem()))
		d.value(v.Elem(), depth+1)
	case reflect.Struct:
		d.structure(v, depth)
	default:
		panic("keeper: no decoding for " + v.Type().String())
	}
}

func (d *decoder) slice(v reflect.Value, depth int) {
	n := d.count()
	if n == 0 {
		v.SetZero()
		return
	}
	if v.Type().Elem().Kind() == reflect.Uint8 {
		v.SetBytes(append([]byte(nil), d.take(n)...))
		return
	}
	s := reflect.MakeSlice(v.Type(), 0, min(n, 256))
	e := reflect.New(v.Type().Elem()).Elem()
	for range n {
		e.SetZero()
		if d.value(e, depth+1); d.bad {
			return
		}
		s = reflect.Append(s, e)
	}
	v.Set(s)
}

func (d *decoder) structure(v reflect.Value, depth int) {
	if v.Type() == timeType {
		if ns := int64(d.uint(8)); ns == 0 {
			v.SetZero()
		} else {
			v.Set(reflect.ValueOf(time.Unix(0, ns)))
		}
		return
	}
	in := decoder{b: d.take(int(d.uint(4)))}
	if d.bad {
		return
	}
	for i := range v.NumField() {
		if len(in.b) == 0 {
			v.Field(i).SetZero() // an older peer ends here
			continue
		}
		in.value(v.Field(i), depth+1)
	}
	d.bad = d.bad || in.bad
}
