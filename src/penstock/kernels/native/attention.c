/* Attention of one query token per sequence over the paged cache, in fp32.

   Keys and values are read where they lie, block by block; the softmax is kept relative to the
   largest score so far, so the scores of one block are all that is held. */

#include <math.h>
#include <string.h>

#include "pool.h"
#include "vector.h"

enum { WORTHWHILE = 1 << 15 }; /* multiply-adds that are worth handing to another thread */

enum { MAX_TOGETHER = 4 }; /* queries that read a value once */

/* Brings `size` floats near while others are computed with. */
INLINE void expect(const float *at, int64_t size) {
  for (int64_t i = 0; i < size; i += 16) __builtin_prefetch(at + i, 0, 3);
}

/* Scores of LANES keys, which lie one behind the other. */
INLINE floats scores_of(const float *q, const float *keys, int64_t size) {
  floats partial[LANES] = {};
  for (int64_t d = 0; d < size; d += LANES) {
    const floats part = load(q + d);
    UNROLL for (int i = 0; i < LANES; i++) partial[i] += part * load(keys + i * size + d);
  }
  return sum_each(partial);
}

/* cap * tanh(x / cap), of which tanh(u) = 1 - 2 / (e^2u + 1). */
INLINE floats capped(floats x, float cap) {
  return cap - 2.0f * cap / (exp_of(x * (2.0f / cap)) + 1.0f);
}

/* Scores -> their exponentials relative to the largest so far, whose sum goes to `total`. Returns
   what is left of sums relative to the largest before. */
INLINE float soften(float *scores, int64_t num_scores, float *largest, float *total) {
  floats most = all(*largest), sums = {};
  for (int64_t i = 0; i < num_scores; i += LANES)
    most = choose(load(scores + i) > most, load(scores + i), most);
  const float now = max_lane(most), fade = exp_of(all(*largest - now))[0];
  for (int64_t i = 0; i < num_scores; i += LANES) {
    const floats weights = exp_of(load(scores + i) - now);
    store(scores + i, weights), sums += weights;
  }
  *largest = now, *total = *total * fade + sum(sums);
  return fade;
}

/* out[g, d] = fades[g] * out[g, d] + the sum of weights[g, i] * values[i, d], for some queries g
   and `width` vectors of d. */
INLINE void add_some(const float *weights, int64_t stride, const float *fades, const float *values,
                     float *out, int64_t size, int64_t num_values, int queries, int width) {
  floats total[MAX_TOGETHER][4];
  UNROLL for (int g = 0; g < queries; g++)
    UNROLL for (int v = 0; v < width; v++)
      total[g][v] = load(out + g * size + v * LANES) * fades[g];
  for (int64_t i = 0; i < num_values; i++)
    UNROLL for (int v = 0; v < width; v++) {
      const floats value = load(values + i * size + v * LANES);
      UNROLL for (int g = 0; g < queries; g++) total[g][v] += weights[g * stride + i] * value;
    }
  UNROLL for (int g = 0; g < queries; g++)
    UNROLL for (int v = 0; v < width; v++) store(out + g * size + v * LANES, total[g][v]);
}

INLINE void add_to(const float *weights, int64_t stride, const float *fades, const float *values,
                   float *out, int64_t size, int64_t num_values, int queries) {
  int64_t d = 0;
  for (; d + 4 * LANES <= size; d += 4 * LANES)
    add_some(weights, stride, fades, values + d, out + d, size, num_values, queries, 4);
  for (; d < size; d += LANES)
    add_some(weights, stride, fades, values + d, out + d, size, num_values, queries, 1);
}

/* The same for all d and at most MAX_TOGETHER queries. */
INLINE void add_values(const float *weights, int64_t stride, const float *fades,
                       const float *values, float *out, int64_t size, int64_t num_values,
                       int64_t num_queries) {
  if (num_queries >= 4)
    add_to(weights, stride, fades, values, out, size, num_values, 4);
  else if (num_queries == 3)
    add_to(weights, stride, fades, values, out, size, num_values, 3);
  else if (num_queries == 2)
    add_to(weights, stride, fades, values, out, size, num_values, 2);
  else
    add_to(weights, stride, fades, values, out, size, num_values, 1);
}

/* The queries of one kv head of one sequence: keys first..last - 1, in blocks of `table`. Heads and
   blocks are whole vectors. Keys around the wanted ones are multiplied too, and then left out. */
INLINE void attend(const float *q, const float *k_cache, const float *v_cache,
                   const int32_t *table, float *out, int64_t first, int64_t last,
                   int64_t num_queries, int64_t size, int64_t block_size, int64_t block_stride,
                   float scale, float cap, const float *sinks) {
  float scores[num_queries][block_size], largest[num_queries], total[num_queries];
  float fades[num_queries];
  for (int64_t g = 0; g < num_queries; g++) {
    largest[g] = sinks ? sinks[g] : -INFINITY; /* a score without a value */
    total[g] = sinks ? 1.0f : 0.0f;
  }
  memset(out, 0, num_queries * size * sizeof(float));
  for (int64_t block = first / block_size; block * block_size < last; block++) {
    const int64_t base = block * block_size, at = table[block] * block_stride;
    const int64_t begin = first > base ? first - base : 0;
    const int64_t end = last - base < block_size ? last - base : block_size;
    const int64_t from = begin / LANES * LANES, until = (end + LANES - 1) / LANES * LANES;
    for (int64_t i = from; i < until; i += LANES) {
      expect(v_cache + at + i * size, LANES * size);
      for (int64_t g = 0; g < num_queries; g++) {
        const floats found = scores_of(q + g * size, k_cache + at + i * size, size) * scale;
        store(scores[g] + i, cap == 0.0f ? found : capped(found, cap));
      }
    }
    if (base + block_size < last)
      expect(k_cache + table[block + 1] * block_stride, block_size * size);
    for (int64_t g = 0; g < num_queries; g++) {
      for (int64_t i = from; i < begin; i++) scores[g][i] = -INFINITY;
      for (int64_t i = end; i < until; i++) scores[g][i] = -INFINITY;
      fades[g] = soften(scores[g] + from, until - from, &largest[g], &total[g]);
    }
    for (int64_t g = 0; g < num_queries; g += MAX_TOGETHER)
      add_values(scores[g] + begin, block_size, fades + g, v_cache + at + begin * size,
                 out + g * size, size, end - begin, num_queries - g);
  }
  for (int64_t i = 0; i < num_queries * size; i += LANES)
    store(out + i, load(out + i) / total[i / size]);
}

typedef struct {
  const float *q, *k_cache, *v_cache, *sinks;
  const int32_t *rows, *kv_lens, *table;
  float *out;
  int64_t q_stride, num_heads, num_kv_heads, size, block_size, block_stride, table_width, window;
  int64_t has_chunks;
  float scale, cap;
} Decode;

/* The first of a sequence's keys that its last token sees. */
INLINE int64_t first_key(const Decode *d, int64_t length) {
  if (d->has_chunks) return (length - 1) / d->window * d->window;
  return length > d->window ? length - d->window : 0;
}

/* Item i is kv head i % K of entry i / K. */
INLINE void attend_items(const Decode *d, int64_t first, int64_t last, int64_t size) {
  const int64_t group = d->num_heads / d->num_kv_heads;
  for (int64_t item = first; item < last; item++) {
    const int64_t entry = item / d->num_kv_heads, head = item % d->num_kv_heads;
    const int64_t length = d->kv_lens[entry], plane = head * d->block_size * size;
    attend(d->q + entry * d->q_stride + head * group * size, d->k_cache + plane,
           d->v_cache + plane, d->table + d->rows[entry] * d->table_width,
           d->out + (entry * d->num_heads + head * group) * size,
           first_key(d, length), length, group, size, d->block_size, d->block_stride, d->scale,
           d->cap, d->sinks ? d->sinks + head * group : NULL);
  }
}

/* Known sizes are compiled for themselves. */
static void attend_heads(const void *job, int64_t first, int64_t last) {
  const Decode *d = job;
  if (d->size == 64)
    attend_items(d, first, last, 64);
  else if (d->size == 128)
    attend_items(d, first, last, 128);
  else
    attend_items(d, first, last, d->size);
}

/* q and out [N, H, D] (q with a stride), caches [B, K, S, D]; entry n is row rows[n] of the block
   table, kv_lens[n] tokens long, and sees the last `window` of them; with `has_chunks`, those from
   the last multiple of `window` on. `sinks` [H] may be NULL, and `cap` 0: scores are not capped. */
void decode_attention(const float *q, int64_t q_stride, const float *k_cache, const float *v_cache,
                      const int32_t *rows, const int32_t *kv_lens, const int32_t *table,
                      const float *sinks, float *out, int64_t num_entries, int64_t num_heads,
                      int64_t num_kv_heads, int64_t size, int64_t block_size, int64_t block_stride,
                      int64_t table_width, int64_t window, int64_t has_chunks, float scale,
                      float cap) {
  const Decode job = {q,     k_cache,  v_cache,      sinks,       rows,         kv_lens,
                      table, out,      q_stride,     num_heads,   num_kv_heads, size,
                      block_size, block_stride, table_width, window, has_chunks, scale, cap};
  int64_t num_keys = 0;
  for (int64_t i = 0; i < num_entries; i++) num_keys += kv_lens[i] - first_key(&job, kv_lens[i]);
  const int64_t num_items = num_entries * num_kv_heads;
  const int64_t smallest = 1 + WORTHWHILE * num_items / (num_keys * num_heads * size);
  in_chunks(attend_heads, &job, num_items, smallest);
}
