package client

import (
	"maps"
	"slices"
	"unicode/utf8"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// The wire has a string and a raw twin for what may be any octets; these put a Go string into the right one.

func octets(s string) (text string, raw []byte) {
	if utf8.ValidString(s) {
		return s, nil
	}
	return "", []byte(s)
}

func octetList(list []string) (text []string, raw [][]byte) {
	for _, s := range list {
		if !utf8.ValidString(s) {
			for _, s := range list {
				raw = append(raw, []byte(s))
			}
			return nil, raw
		}
	}
	return list, nil
}

func fromOctets(text string, raw []byte) string {
	if len(raw) > 0 {
		return string(raw)
	}
	return text
}

func envVars(env map[string]string, secret []string) []*dsecv1.EnvVar {
	hidden := map[string]bool{}
	for _, s := range secret {
		hidden[s] = true
	}
	var out []*dsecv1.EnvVar
	for _, k := range slices.Sorted(maps.Keys(env)) { // always the same order: the same step key is the same request
		e := &dsecv1.EnvVar{Secret: hidden[k]}
		e.Name, e.NameRaw = octets(k)
		e.Value, e.ValueRaw = octets(env[k])
		out = append(out, e)
	}
	return out
}
