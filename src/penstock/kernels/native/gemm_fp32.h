/* GEMM with packed weights in fp32, for any processor; `limbs` makes no difference. */

#ifndef PENSTOCK_GEMM_FP32_H
#define PENSTOCK_GEMM_FP32_H

#include "packed.h"
#include "pool.h"

enum {
  CHUNK = 768,    /* inputs unpacked at once */
  ROW_BLOCK = 256 /* rows that stay in the second-level cache beside them */
};

/* Rows multiplied at once, and tiles unpacked at once: as many sums as there are registers for. */
#if defined(__AVX512F__)
enum { ROWS = 8, PANEL = 2 };
#else
enum { ROWS = 4, PANEL = 1 };
#endif

typedef struct {
  Gemm gemm;
  const float *sums; /* of the inputs of each group, by row; NULL for more than ROWS rows */
} Job;

INLINE floats load_code(const uint8_t *codes, int input, int vector, Form form) {
  words word = load_words(codes, input * form.bits / 32, vector);
  const int bit = first_bit(input, form);
  if (form.bits == 4) return __builtin_convertvector((ints)(word >> bit & 15), floats);
  return __builtin_convertvector((ints)(word << (24 - bit)) >> 24, floats);
}

/* At most `rows` rows: y = scale * sum(code * x) + minimum * sum(x) over the groups, straight from
   the codes. `chains` accumulators run side by side, since an addition waits for the one before it. */
INLINE void small_m(const Job *job, int64_t first, int64_t last, Form form, int rows,
                     int chains) {
  const Gemm *p = &job->gemm;
  const float *x[ROWS], *sums[ROWS];
  for (int r = 0; r < rows; r++) { /* missing rows repeat the last one */
    int64_t row = r < p->num_rows ? r : p->num_rows - 1;
    x[r] = p->x + row * p->x_stride, sums[r] = job->sums + row * p->num_groups;
  }
  const uint8_t *at = p->weight + first * p->num_groups * record_bytes(form);
  for (int64_t tile = first; tile < last; tile++) {
    floats total[ROWS][VECTORS] = {};
    for (int64_t g = 0; g < p->num_groups; g++, at += record_bytes(form)) {
      const uint8_t *codes = at + 2 * TILE * form.meta_bytes;
      for (int v = 0; v < VECTORS; v++) {
        floats part[ROWS][4] = {};
        UNROLL for (int k = 0; k < form.group; k++) {
          floats code = load_code(codes, k, v, form);
          UNROLL for (int r = 0; r < rows; r++)
            part[r][k % chains] += code * x[r][g * form.group + k];
        }
        floats scale = load_meta(at, v, form);
        floats minimum = load_meta(at + TILE * form.meta_bytes, v, form);
        UNROLL for (int r = 0; r < rows; r++) {
          UNROLL for (int c = 1; c < chains; c++) part[r][0] += part[r][c];
          total[r][v] += scale * part[r][0] + minimum * sums[r][g];
        }
      }
    }
    for (int r = 0; r < rows && r < p->num_rows; r++)
      write_tile(p, (const float *)total[r], r, tile * TILE, TILE, 1);
  }
}

/* Panel of weights [inputs, outputs] of some tiles: inputs begin..begin + depth - 1. */
INLINE void unpack(const Gemm *p, int64_t tile, int tiles, int64_t begin, int depth, Form form,
                   floats panel[][PANEL * VECTORS]) {
  for (int t = 0; t < tiles; t++)
    for (int g = 0; g < depth / form.group; g++) {
      const int64_t group = (tile + t) * p->num_groups + begin / form.group + g;
      const uint8_t *at = p->weight + group * record_bytes(form);
      for (int v = 0; v < VECTORS; v++) {
        floats scale = load_meta(at, v, form);
        floats minimum = load_meta(at + TILE * form.meta_bytes, v, form);
        UNROLL for (int k = 0; k < form.group; k++) {
          floats code = load_code(at + 2 * TILE * form.meta_bytes, k, v, form);
          panel[g * form.group + k][t * VECTORS + v] = code * scale + minimum;
        }
      }
    }
}

/* Any number of rows: a panel of weights is unpacked, then multiplied with a block of them. */
INLINE void large_m(const Gemm *p, int64_t first, int64_t last, Form form) {
  static _Thread_local floats panel[CHUNK][PANEL * VECTORS];
  const int64_t in_features = p->num_groups * form.group;
  for (int64_t top = 0; top < p->num_rows; top += ROW_BLOCK)
    for (int64_t tile = first; tile < last; tile += PANEL)
      for (int64_t begin = 0; begin < in_features; begin += CHUNK) {
        const int64_t bottom = top + ROW_BLOCK < p->num_rows ? top + ROW_BLOCK : p->num_rows;
        const int tiles = last - tile < PANEL ? (int)(last - tile) : PANEL;
        const int depth = in_features - begin < CHUNK ? (int)(in_features - begin) : CHUNK;
        unpack(p, tile, tiles, begin, depth, form, panel);
        for (int64_t row = top; row < bottom; row += ROWS) {
          const int num_rows = bottom - row < ROWS ? (int)(bottom - row) : ROWS;
          const float *x[ROWS];
          for (int r = 0; r < ROWS; r++)
            x[r] = p->x + (row + (r < num_rows ? r : 0)) * p->x_stride + begin;
          floats total[ROWS][PANEL * VECTORS] = {};
          for (int k = 0; k < depth; k++) {
            UNROLL for (int r = 0; r < ROWS; r++)
              UNROLL for (int v = 0; v < PANEL * VECTORS; v++)
                total[r][v] += panel[k][v] * x[r][k];
          }
          for (int r = 0; r < num_rows; r++)
            write_tile(p, (const float *)total[r], row + r, tile * TILE, tiles * TILE, !begin);
        }
      }
}

/* Some of the panels, all rows. */
INLINE void multiply(const void *of, int64_t first, int64_t last, Form form, int limbs) {
  const Job *job = of;
  const Gemm *p = &job->gemm;
  first *= PANEL, last = last * PANEL < num_tiles(p) ? last * PANEL : num_tiles(p);
  if (p->num_rows == 1)
    small_m(job, first, last, form, 1, 4);
  else if (p->num_rows == 2)
    small_m(job, first, last, form, 2, 2);
  else if (p->num_rows <= 4)
    small_m(job, first, last, form, 4, 1);
  else if (p->num_rows <= ROWS)
    small_m(job, first, last, form, ROWS, 1);
  else
    large_m(p, first, last, form);
}

/* The whole GEMM, by as many threads as are worthwhile. */
static void run_gemm(const Gemm *gemm, Form form, int limbs, Chunk multiply_tiles) {
  const int64_t num_groups = gemm->num_groups, num_rows = gemm->num_rows;
  const int num_summed = num_rows <= ROWS ? (int)num_rows : 0;
  float sums[num_summed * num_groups + 1];
  for (int64_t i = 0; i < num_summed * num_groups; i++) {
    const int64_t row = i / num_groups, group = i % num_groups;
    const float *from = gemm->x + row * gemm->x_stride + group * form.group;
    floats total = load(from);
    for (int k = LANES; k < form.group; k += LANES) total += load(from + k);
    sums[i] = sum(total);
  }
  const Job job = {*gemm, sums};
  const int64_t smallest = worthwhile_tiles(num_groups * form.group * num_rows);
  in_chunks(multiply_tiles, &job, (num_tiles(gemm) + PANEL - 1) / PANEL,
            (smallest + PANEL - 1) / PANEL);
}

#endif
