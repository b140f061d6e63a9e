/* How packed weights lie in memory; the layout is that of kernels/gemm/quantized_cpu.py.

   A tile is 16 outputs. Of each tile, group after group of inputs lie 16 scales, 16 minima and the
   codes, in 32-bit words of 16 outputs. A word holds four signed 8-bit codes of consecutive inputs,
   or eight 4-bit codes: those of the first four inputs in the low halves of its bytes, those of the
   next four in the high halves. A weight is scale * code + minimum. */

#ifndef PENSTOCK_PACKED_H
#define PENSTOCK_PACKED_H

#include <string.h>

#include "vector.h"

enum { TILE = 16, VECTORS = TILE / LANES };

typedef struct {
  int bits, group, meta_bytes; /* of a code; inputs that share a scale; of a scale or a minimum */
} Form;

/* y = x times the weight, plus the bias, which may be NULL. */
typedef struct {
  const float *x, *bias;
  const uint8_t *weight;
  float *y;
  int64_t x_stride, y_stride, num_rows, out_features, num_groups;
} Gemm;

INLINE int record_bytes(Form form) {
  return 2 * TILE * form.meta_bytes + TILE * form.group * form.bits / 8;
}

INLINE floats load_meta(const uint8_t *at, int vector, Form form) {
  typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(1), may_alias));
  if (form.meta_bytes == 4) return load((const float *)at + vector * LANES);
  words half = __builtin_convertvector(*(const halves *)(at + 2 * vector * LANES), words);
  floats size = (floats)((half & 0x7fff) << 13) * 0x1p112f; /* rebias the exponent */
  return (floats)((words)size | (half & 0x8000) << 16);
}

INLINE words load_words(const uint8_t *codes, int word, int vector) {
  return *(const words_at *)(codes + (word * TILE + vector * LANES) * 4);
}

/* Where in its word the code of an input begins. */
INLINE int first_bit(int input, Form form) {
  return form.bits == 4 ? 8 * (input % 4) + input % 8 / 4 * 4 : 8 * (input % 4);
}

INLINE int64_t num_tiles(const Gemm *p) { return (p->out_features + TILE - 1) / TILE; }

/* Tiles that are worth handing to another thread, with so many inputs in all rows: about 2 us. */
INLINE int64_t worthwhile_tiles(int64_t in_features) { return 1 + (1 << 15) / (in_features * TILE); }

INLINE void write_tile(const Gemm *p, const float *from, int64_t row, int64_t output, int n,
                       int is_first) {
  float *to = p->y + row * p->y_stride + output;
  if (n > p->out_features - output) n = (int)(p->out_features - output);
  if (!is_first)
    for (int i = 0; i < n; i++) to[i] += from[i];
  else if (p->bias)
    for (int i = 0; i < n; i++) to[i] = from[i] + p->bias[output + i];
  else
    memcpy(to, from, n * sizeof(float));
}

#endif
