/* Threads that share the chunks of one loop. See pool.c. */

#ifndef PENSTOCK_POOL_H
#define PENSTOCK_POOL_H

#include <stdint.h>

typedef void (*Chunk)(const void *job, int64_t first, int64_t last);

/* chunk(job, first, last) for all of 0..size - 1, in even parts of at least `smallest`, by whoever
   is free. */
void in_chunks(Chunk chunk, const void *job, int64_t size, int64_t smallest);

#endif
