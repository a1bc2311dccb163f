package client

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// Garbage is what a sweep of the server's store would remove.
type Garbage struct {
	Layers  []UnusedLayer `json:"layers"`  // nobody holds them
	Objects int           `json:"objects"` // that no layer needs
	Octets  int64         `json:"octets"`  // of these
	Forms   int           `json:"forms"`   // of layers that stay, replaced by others; their objects go later
}

// UnusedLayer is a layer that no project and no pushed name holds.
type UnusedLayer struct {
	ID       string    `json:"id"`
	Source   string    `json:"source"`
	Created  time.Time `json:"created"`
	Octets   int64     `json:"octets"`
	Deferred bool      `json:"deferred"` // its objects stay for a while after it, for hosts that read them on demand
}

// Unused tells what a sweep would remove now that takes what is older than age (at least an hour; 0 is the server's 6 hours). It removes
// nothing. Only keys of the first project may ask.
func (c *Client) Unused(ctx context.Context, age time.Duration) (g Garbage, err error) {
	ctx, cancel := c.bound(ctx)
	defer cancel()
	q := url.Values{}
	if age > 0 {
		q.Set("age", age.String())
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, c.base+"/v1/garbage?"+q.Encode(), nil)
	if err != nil {
		return g, err
	}
	headers{c}.set(r.Header)
	res, err := c.http.Do(r)
	if err != nil {
		return g, err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(res.Body, 4096))
		return g, fmt.Errorf("unused layers: %s: %s", res.Status, strings.TrimSpace(string(text)))
	}
	err = json.NewDecoder(io.LimitReader(res.Body, 64<<20)).Decode(&g)
	return g, err
}
