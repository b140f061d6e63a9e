/* A pool made for many short loops on a machine that others use too.

   The caller works as well, and waits only for parts that another thread has begun. A thread that
   is not running just then, because the machine is busy or the thread asleep, costs nothing. A
   barrier of OpenMP would wait for it: with other busy processes on two cores that made a decode
   step several times as long. Threads spin for a moment before they sleep, long enough for the gap
   between two ops of a step. */

#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

enum { MAX_THREADS = 256, SPINS_BEFORE_SLEEP = 5000, SPINS_BEFORE_YIELD = 500 };
enum { PARTS_PER_THREAD = 4 }; /* some may start late */
#define NO_PART UINT32_MAX

/* Generation of the loop in the upper half, next part in the lower: a part is taken by one compare
   and swap, which fails if the loop has ended in the meantime. Between two loops it is NO_PART: then
   nobody takes one while the values below change. */
static _Atomic uint64_t turn;
static _Atomic(Chunk) turn_chunk;
static _Atomic(const void *) turn_job;
static _Atomic int64_t turn_size;
static _Atomic uint32_t num_parts, num_done;

static _Atomic int num_threads = 1, num_asleep;
static int num_started = 1; /* the caller is one */
static pthread_mutex_t sleep_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t caller_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;

static void take_parts(uint32_t generation) {
  for (;;) {
    uint64_t now = atomic_load(&turn);
    const uint32_t part = (uint32_t)now;
    const int64_t parts = atomic_load(&num_parts), size = atomic_load(&turn_size);
    if (now >> 32 != generation || part >= parts) return;
    const Chunk chunk = atomic_load(&turn_chunk);
    const void *job = atomic_load(&turn_job);
    if (!atomic_compare_exchange_strong(&turn, &now, now + 1)) continue;
    chunk(job, part * size / parts, (part + 1) * size / parts);
    atomic_fetch_add(&num_done, 1);
  }
}

static void *work(void *place) {
  const int index = (int)(intptr_t)place;
  uint32_t seen = 0;
  for (int spins = 0;;) {
    const uint32_t generation = (uint32_t)(atomic_load(&turn) >> 32);
    if (generation != seen) {
      seen = generation, spins = 0;
      if (index < atomic_load(&num_threads)) take_parts(generation);
    } else if (++spins < SPINS_BEFORE_SLEEP) {
      PAUSE();
    } else {
      pthread_mutex_lock(&sleep_mutex);
      atomic_fetch_add(&num_asleep, 1);
      while ((uint32_t)(atomic_load(&turn) >> 32) == seen) pthread_cond_wait(&wake, &sleep_mutex);
      atomic_fetch_sub(&num_asleep, 1);
      pthread_mutex_unlock(&sleep_mutex);
    }
  }
  return 0;
}

/* How many threads share a loop, the caller included. */
void set_num_threads(int64_t count) {
  count = count < 1 ? 1 : count > MAX_THREADS ? MAX_THREADS : count;
  pthread_mutex_lock(&caller_mutex);
  for (; num_started < count; num_started++) {
    pthread_t thread;
    if (pthread_create(&thread, 0, work, (void *)(intptr_t)num_started)) break;
    pthread_detach(thread);
  }
  atomic_store(&num_threads, (int)(count < num_started ? count : num_started));
  pthread_mutex_unlock(&caller_mutex);
}

void in_chunks(Chunk chunk, const void *job, int64_t size, int64_t smallest) {
  if (size <= 0) return;
  const int64_t threads = atomic_load(&num_threads), most = PARTS_PER_THREAD * threads;
  const uint32_t parts = (uint32_t)(size / smallest < most ? size / smallest : most);
  /* A second caller, and a loop of one part, run alone. */
  if (parts < 2 || threads == 1 || pthread_mutex_trylock(&caller_mutex)) {
    chunk(job, 0, size);
    return;
  }
  const uint32_t generation = (uint32_t)(atomic_load(&turn) >> 32) + 1;
  atomic_store(&turn_chunk, chunk), atomic_store(&turn_job, job);
  atomic_store(&turn_size, size), atomic_store(&num_parts, parts), atomic_store(&num_done, 0);
  atomic_store(&turn, (uint64_t)generation << 32);
  if (atomic_load(&num_asleep)) {
    pthread_mutex_lock(&sleep_mutex);
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&sleep_mutex);
  }
  take_parts(generation);
  for (int spins = 0; atomic_load(&num_done) < parts; spins++)
    if (spins < SPINS_BEFORE_YIELD)
      PAUSE();
    else
      sched_yield(); /* whoever has the part may need this core */
  atomic_store(&turn, (uint64_t)generation << 32 | NO_PART);
  pthread_mutex_unlock(&caller_mutex);
}
