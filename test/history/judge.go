package history

import "strings"

// Judge reads how a call failed, by the code's name and the text that the service gave.
func Judge(op Op, code, text string) (Reply, string) {
	has := func(parts ...string) bool {
		for _, p := range parts {
			if strings.Contains(text, p) {
				return true
			}
		}
		return false
	}
	file := op == Write || op == Append || op == MakeDir || op == Move || op == Remove || op == Upload
	switch code {
	case "data_loss":
		if has("its end was not seen") {
			return Unknown, ""
		}
	case "already_exists":
		if has("was used ") {
			return Conflict, ""
		}
		if file {
			return Answered, "error " + code
		}
	case "failed_precondition":
		if !file || has("sandbox ", "was interrupted", "its sandbox ended") {
			return Refused, ""
		}
		return Answered, "error " + code
	case "not_found":
		switch {
		case has("sandbox ", "command "):
			return Refused, ""
		case file:
			return Answered, "error " + code
		}
	case "resource_exhausted", "invalid_argument":
		return Refused, ""
	}
	return Lost, ""
}
