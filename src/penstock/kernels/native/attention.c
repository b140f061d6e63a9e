/* Attention of one query token per sequence over the paged cache, in fp32.

   Keys and values are read where they lie, block by block; the softmax is kept relative to the
   largest score so far, so the scores of one block are all that is held. */

#include <math.h>
#include <string.h>

#include "pool.h"
#include "vector.h"

enum { WORTHWHILE = 1 << 15 }; /* products that are worth handing to another thread */

/* Scores of LANES keys, which lie one behind the other. */
INLINE floats scores_of(const float *q, const float *keys, int64_t size) {
  floats products[LANES] = {};
  for (int64_t d = 0; d < size; d += LANES) {
    const floats part = load(q + d);
    UNROLL for (int i = 0; i < LANES; i++) products[i] += part * load(keys + i * size + d);
  }
  return sum_each(products);
}

/* out[d] = fade * out[d] + the sum of weights[i] * values[i, d], for `width` vectors of d. */
INLINE void add_values(const float *weights, const float *values, float *out, int64_t size,
                       int64_t num_values, float fade, int width) {
  floats total[4];
  UNROLL for (int v = 0; v < width; v++) total[v] = load(out + v * LANES) * fade;
  for (int64_t i = 0; i < num_values; i++)
    UNROLL for (int v = 0; v < width; v++)
      total[v] += weights[i] * load(values + i * size + v * LANES);
  UNROLL for (int v = 0; v < width; v++) store(out + v * LANES, total[v]);
}

/* The queries of one kv head of one sequence: keys first..last - 1, in blocks of `table`. Heads and
   blocks are whole vectors. Keys around the wanted ones are multiplied too, and then left out. */
static void attend(const float *q, const float *k_cache, const float *v_cache,
                   const int32_t *table, float *out, int64_t first, int64_t last,
                   int64_t num_queries, int64_t size, int64_t block_size, int64_t block_stride,
                   float scale) {
  float scores[block_size], largest[num_queries], total[num_queries];
  for (int64_t g = 0; g < num_queries; g++) largest[g] = -INFINITY, total[g] = 0.0f;
  memset(out, 0, num_queries * size * sizeof(float));
  for (int64_t block = first / block_size; block * block_size < last; block++) {
    const int64_t base = block * block_size, at = table[block] * block_stride;
    const int64_t begin = first > base ? first - base : 0;
    const int64_t end = last - base < block_size ? last - base : block_size;
    for (int64_t g = 0; g < num_queries; g++) {
      for (int64_t i = begin / LANES * LANES; i < end; i += LANES)
        store(scores + i, scores_of(q + g * size, k_cache + at + i * size, size) * scale);
      float most = largest[g];
      for (int64_t i = begin; i < end; i++) most = scores[i] > most ? scores[i] : most;
      const float fade = exp_of(all(largest[g] - most))[0];
      for (int64_t i = begin / LANES * LANES; i < end; i += LANES)
        store(scores + i, exp_of(load(scores + i) - most));
      float added = 0.0f;
      for (int64_t i = begin; i < end; i++) added += scores[i];
      largest[g] = most, total[g] = total[g] * fade + added;
      const float *values = v_cache + at + begin * size;
      float *to = out + g * size;
      int64_t d = 0;
      for (; d + 4 * LANES <= size; d += 4 * LANES)
        add_values(scores + begin, values + d, to + d, size, end - begin, fade, 4);
      for (; d < size; d += LANES)
        add_values(scores + begin, values + d, to + d, size, end - begin, fade, 1);
    }
  }
  for (int64_t i = 0; i < num_queries * size; i += LANES)
    store(out + i, load(out + i) / total[i / size]);
}

typedef struct {
  const float *q, *k_cache, *v_cache;
  const int32_t *rows, *kv_lens, *table;
  float *out;
  int64_t q_stride, num_heads, num_kv_heads, size, block_size, block_stride, table_width, window;
  float scale;
} Decode;

/* Item i is kv head i % K of entry i / K. */
static void attend_heads(const void *job, int64_t first, int64_t last) {
  const Decode *d = job;
  const int64_t group = d->num_heads / d->num_kv_heads;
  for (int64_t item = first; item < last; item++) {
    const int64_t entry = item / d->num_kv_heads, head = item % d->num_kv_heads;
    const int64_t length = d->kv_lens[entry], plane = head * d->block_size * d->size;
    attend(d->q + entry * d->q_stride + head * group * d->size, d->k_cache + plane,
           d->v_cache + plane, d->table + d->rows[entry] * d->table_width,
           d->out + (entry * d->num_heads + head * group) * d->size,
           length > d->window ? length - d->window : 0, length, group, d->size, d->block_size,
           d->block_stride, d->scale);
  }
}

/* q and out [N, H, D] (q with a stride), caches [B, K, S, D]; entry n is row rows[n] of the block
   table, kv_lens[n] tokens long, and sees the last `window` of them. */
void decode_attention(const float *q, int64_t q_stride, const float *k_cache, const float *v_cache,
                      const int32_t *rows, const int32_t *kv_lens, const int32_t *table,
                      float *out, int64_t num_entries, int64_t num_heads, int64_t num_kv_heads,
                      int64_t size, int64_t block_size, int64_t block_stride, int64_t table_width,
                      int64_t window, float scale) {
  const Decode job = {q,        k_cache,   v_cache,      rows,         kv_lens, table,
                      out,      q_stride,  num_heads,    num_kv_heads, size,    block_size,
                      block_stride, table_width, window, scale};
  int64_t num_keys = 0;
  for (int64_t i = 0; i < num_entries; i++) num_keys += kv_lens[i] < window ? kv_lens[i] : window;
  const int64_t num_items = num_entries * num_kv_heads;
  const int64_t smallest = 1 + WORTHWHILE * num_items / (num_keys * num_heads * size);
  in_chunks(attend_heads, &job, num_items, even_step(num_items, smallest));
}
