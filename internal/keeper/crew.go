package keeper

// crew runs requests on goroutines that stay for the next one: a new one's stack is too small for a request, and to copy it two or three
// times is a tenth of what Go costs a birth.
type crew struct {
	idle chan func()
	stay chan struct{} // a place for each that waits for work
}

const crewStays = 16

func newCrew() *crew { return &crew{idle: make(chan func()), stay: make(chan struct{}, crewStays)} }

// run runs f, without waiting for it.
func (c *crew) run(f func()) {
	select {
	case c.idle <- f:
	default:
		go c.member(f)
	}
}

func (c *crew) member(f func()) {
	for {
		f()
		select {
		case c.stay <- struct{}{}:
		default:
			return
		}
		f = <-c.idle
		<-c.stay
	}
}
