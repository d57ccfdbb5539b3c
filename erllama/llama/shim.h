/* The project's own native part, as C sees it.
 *
 * What lives here: everything that must not be Python because ggml's threads call it or because it
 * runs once per row or candidate, namely the abort flag, the load progress, log capture, the batch
 * check and sampling. The declarations are those of cdef/shim.h, so there is one copy of them.
 *
 * Functions may throw: nothing calls them but the generated noexcept wrappers (wrappers.py). */

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

#include "cdef/shim.h"

#ifdef __cplusplus
}

// Between the shim's own files: from now on, this thread's lines are of level debug, whatever they say.
void log_quietly(bool quiet);
#endif
