package gateway

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// garbagePath tells, as JSON, what a sweep of layers would remove: `?age=6h` is the age above which it does.
const garbagePath = "/v1/garbage"

func (g *Gateway) garbage(w http.ResponseWriter, r *http.Request) {
	age := 6 * time.Hour
	if s := r.URL.Query().Get("age"); s != "" {
		var err error
		if age, err = time.ParseDuration(s); err != nil || age < time.Hour {
			http.Error(w, fmt.Sprintf("age %.40q: want 1h or more", s), http.StatusBadRequest)
			return
		}
	}
	found, err := g.layers.Unused(r.Context(), age)
	if err != nil {
		code := http.StatusInternalServerError
		switch {
		case errors.Is(err, sandbox.ErrUnsupported):
			code = http.StatusNotImplemented
		case errors.Is(err, sandbox.ErrState):
			code = http.StatusConflict
		}
		http.Error(w, err.Error(), code)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(found)
}
