#include "textflag.h"

// func int80()
// getpid by the calling convention of 32-bit programs, whose call table is another.
TEXT ·int80(SB), NOSPLIT, $0
	MOVL $20, AX
	INT $0x80
	RET
