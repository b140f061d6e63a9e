/* The small ops of a step, in fp32: norm, activation, rotation with cache write, gather, argmax.
   Tensors have no gaps unless a stride is given. */

#include <math.h>
#include <string.h>

#include "pool.h"
#include "vector.h"

enum { WORTHWHILE = 1 << 11 }; /* values that are worth handing to another thread, about 1 us */

INLINE float square_sum(const float *x, int64_t size) {
  floats total[2] = {};
  float rest = 0.0f;
  int64_t i = 0;
  for (; i + 2 * LANES <= size; i += 2 * LANES) {
    total[0] += load(x + i) * load(x + i);
    total[1] += load(x + i + LANES) * load(x + i + LANES);
  }
  for (; i < size; i++) rest += x[i] * x[i];
  return sum(total[0] + total[1]) + rest;
}

INLINE void norm_row(const float *x, const float *weight, float *out, int64_t size, float eps) {
  float scale = 1.0f / sqrtf(square_sum(x, size) / (float)size + eps);
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) store(out + i, load(x + i) * scale * load(weight + i));
  for (; i < size; i++) out[i] = x[i] * scale * weight[i];
}

typedef struct {
  const float *x, *residual, *weight;
  float *total, *out;
  int64_t stride, size;
  float eps;
} Norm;

static void norm_rows(const void *job, int64_t first, int64_t last) {
  const Norm *n = job;
  for (int64_t row = first; row < last; row++) {
    const float *from = n->x + row * n->stride;
    if (n->residual) {
      const float *other = n->residual + row * n->size;
      float *to = n->total + row * n->size;
      int64_t i = 0;
      for (; i + LANES <= n->size; i += LANES) store(to + i, load(from + i) + load(other + i));
      for (; i < n->size; i++) to[i] = from[i] + other[i];
      from = to;
    }
    norm_row(from, n->weight, n->out + row * n->size, n->size, n->eps);
  }
}

/* out = norm(total), total = x + residual; without a residual (NULL) total is x. */
void rms_norm(const float *x, int64_t stride, const float *residual, float *total,
              const float *weight, float *out, int64_t num_rows, int64_t size, float eps) {
  const Norm job = {x, residual, weight, total, out, stride, size, eps};
  in_chunks(norm_rows, &job, num_rows, 1 + WORTHWHILE / size);
}

INLINE floats silu(floats x) { return x / (1.0f + exp_of(-x)); }

typedef struct {
  const float *x;
  float *out;
  int64_t stride, size;
} Gate;

static void gate_rows(const void *job, int64_t first, int64_t last) {
  const Gate *g = job;
  for (int64_t row = first; row < last; row++) {
    const float *gate = g->x + row * g->stride, *up = gate + g->size;
    float *to = g->out + row * g->size;
    int64_t i = 0;
    for (; i + LANES <= g->size; i += LANES) store(to + i, silu(load(gate + i)) * load(up + i));
    for (; i < g->size; i++) to[i] = silu(all(gate[i]))[0] * up[i];
  }
}

/* out[t, c] = silu(x[t, c]) * x[t, size + c] */
void silu_mul(const float *x, int64_t stride, float *out, int64_t num_rows, int64_t size) {
  const Gate job = {x, out, stride, size};
  in_chunks(gate_rows, &job, num_rows, 1 + WORTHWHILE / size);
}

/* The first 2 * half channels of one head turn by the token's angles; the others stay. */
INLINE void rotate(const float *x, const float *angles, float *out, int64_t half, int64_t size) {
  const float *cosines = angles, *sines = angles + half;
  int64_t i = 0;
  for (; i + LANES <= half; i += LANES) {
    floats a = load(x + i), b = load(x + half + i), c = load(cosines + i), s = load(sines + i);
    store(out + i, a * c - b * s);
    store(out + half + i, b * c + a * s);
  }
  for (; i < half; i++) {
    float a = x[i], b = x[half + i];
    out[i] = a * cosines[i] - b * sines[i];
    out[half + i] = b * cosines[i] + a * sines[i];
  }
  memcpy(out + 2 * half, x + 2 * half, (size - 2 * half) * sizeof(float));
}

typedef struct {
  const float *qkv, *q_weight, *k_weight, *table;
  const int64_t *positions, *slots;
  float *q_out, *k_cache, *v_cache;
  int64_t stride, num_heads, q_step, num_kv_heads, size, num_rotated, block_size, block_stride;
  float eps;
} Heads;

static void rope_tokens(const void *job, int64_t first, int64_t last) {
  const Heads *h = job;
  const int64_t size = h->size, plane = h->block_size * size;
  for (int64_t t = first; t < last; t++) {
    const float *x = h->qkv + t * h->stride, *angles = h->table + h->positions[t] * h->num_rotated;
    const int64_t block = h->slots[t] / h->block_size, offset = h->slots[t] % h->block_size;
    const int64_t place = block * h->block_stride + offset * size;
    for (int64_t head = 0; head < h->num_heads + h->num_kv_heads; head++) {
      const int64_t kv_head = head - h->num_heads;
      const float *weight = kv_head < 0 ? h->q_weight : h->k_weight, *from = x;
      float normed[size];
      if (weight) {
        norm_row(x, weight, normed, size, h->eps);
        from = normed;
      }
      float *to = kv_head < 0 ? h->q_out + (t * h->num_heads + head) * size
                              : h->k_cache + place + kv_head * plane;
      rotate(from, angles, to, h->num_rotated / 2, size);
      x += kv_head < 0 ? h->q_step * size : size;
    }
    for (int64_t kv_head = 0; kv_head < h->num_kv_heads; kv_head++, x += size)
      memcpy(h->v_cache + place + kv_head * plane, x, size * sizeof(float));
  }
}

/* qkv[T, q_step * H + 2K, D], every q_step-th of the first heads a query. Queries and keys are
   normed (unless the weights are NULL) and rotated, queries go to q_out[T, H, D], keys and values
   to slot slots[t] of the caches [B, K, S, D]. */
void rope_kv_write(const float *qkv, int64_t stride, const float *q_weight, const float *k_weight,
                   float eps, const float *table, const int64_t *positions, const int64_t *slots,
                   float *q_out, float *k_cache, float *v_cache, int64_t num_tokens,
                   int64_t num_heads, int64_t q_step, int64_t num_kv_heads, int64_t size,
                   int64_t num_rotated, int64_t block_size, int64_t block_stride) {
  const Heads job = {qkv,     q_weight, k_weight,  table,        positions, slots,
                     q_out,   k_cache,  v_cache,   stride,       num_heads, q_step,
                     num_kv_heads, size, num_rotated, block_size, block_stride, eps};
  const int64_t smallest = 1 + WORTHWHILE / (num_heads * size);
  in_chunks(rope_tokens, &job, num_tokens, smallest);
}

/* One token per entry, read from the rows: see kernels/gather. */
void decode_inputs(const int32_t *rows, const int64_t *last_tokens, const int32_t *lengths,
                   const int32_t *table, int64_t *ids, int64_t *positions, int32_t *kv_lens,
                   int64_t *slots, int64_t num_entries, int64_t table_width, int64_t block_size) {
  for (int64_t i = 0; i < num_entries; i++) {
    const int64_t row = rows[i], position = lengths[row];
    const int64_t block = table[row * table_width + position / block_size];
    ids[i] = last_tokens[row];
    positions[i] = position;
    kv_lens[i] = (int32_t)(position + 1);
    slots[i] = block * block_size + position % block_size;
  }
}

typedef struct {
  const float *x;
  int64_t *out, *is_finite;
  int64_t stride, size;
} Largest;

static void largest_of_rows(const void *job, int64_t first, int64_t last) {
  const Largest *l = job;
  for (int64_t row = first; row < last; row++) {
    const float *from = l->x + row * l->stride;
    floats most = all(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= l->size; i += LANES) {
      const floats x = load(from + i), here = choose(x == x, x, all(INFINITY)); /* NaN wins, too */
      most = choose(here > most, here, most);
    }
    float best = max_lane(most);
    for (; i < l->size; i++) best = from[i] <= best ? best : from[i] == from[i] ? from[i] : INFINITY;
    for (i = 0; i < l->size - 1 && from[i] != best; i++) {}
    l->out[row] = i;
    l->is_finite[row] = best > -INFINITY && best < INFINITY;
  }
}

/* The lowest index of the largest value of each row, and behind these whether each row has one:
   0 where a value is NaN or INFINITY, or all are -INFINITY. */
void argmax(const float *x, int64_t stride, int64_t *out, int64_t num_rows, int64_t size) {
  const Largest job = {x, out, out + num_rows, stride, size};
  in_chunks(largest_of_rows, &job, num_rows, 1 + WORTHWHILE / size);
}
