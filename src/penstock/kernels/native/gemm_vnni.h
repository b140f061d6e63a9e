/* GEMM with packed weights in integers, for processors with AVX-512 VNNI.


   The inputs of a group are x = unit * X: the unit is a power of two, X is an integer of at most 2^22.
   So X holds x to 2^-23 of the largest input of its group, which is what an fp32 accumulator keeps of it.
   X is three signed bytes, its limbs, and codes are bytes as well. One instruction multiplies 64
   pairs of bytes; three of them do what takes four with floats. Sums of a group are exact, and the
   result of a row does not depend on the rows beside it.

   With two limbs X is at most 2^14 and holds x to 2^-15, where bfloat16 has 2^-9 of x itself. */

#ifndef PENSTOCK_GEMM_VNNI_H
#define PENSTOCK_GEMM_VNNI_H

#include <immintrin.h>
#include <stdlib.h>

#include "packed.h"
#include "pool.h"

enum {
  MAX_LIMBS = 3,
  MAX_GROUP = 32,
  ROWS = 8,                  /* multiplied at once: their sums and the codes fill the registers */
  CACHE_BYTES = 1 << 18,     /* of inputs that stay in the second-level cache beside the weights */
  MIN_ROW_BLOCK = 64,        /* reading the weights again costs more than inputs farther away */
  WORTHWHILE_SPLIT = 1 << 11 /* inputs that are worth handing to another thread, about 1 us */
};

/* Of one row and group. */
typedef struct {
  float unit, sum;              /* the sum of all x */
  int32_t coarse_sum, fine_sum; /* of all X, which is 256 * coarse + fine */
  int8_t limbs[MAX_LIMBS][MAX_GROUP];
} Inputs;

typedef struct {
  Gemm gemm;
  Form form;
  int limbs;
  Inputs *inputs; /* [num_rows / ROWS, num_groups, ROWS] */
} Job;

INLINE Inputs *inputs_of(const Job *job, int64_t row, int64_t group) {
  return job->inputs + (row / ROWS * job->gemm.num_groups + group) * ROWS + row % ROWS;
}

INLINE float float_of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

INLINE void split(const float *x, Form form, int limbs, Inputs *to) {
  typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
  const floats to_whole = all(12582912.0f); /* 1.5 * 2^23: rounds to an integer */
  floats most = {}, sums = {};
  for (int k = 0; k < form.group; k += LANES) {
    floats size = (floats)((ints)load(x + k) & 0x7fffffff);
    most = choose(size > most, size, most), sums += load(x + k);
  }
  const float largest = _mm512_reduce_max_ps((__m512)most);
  uint32_t exponent; /* largest < 2^(exponent - 126) */
  memcpy(&exponent, &largest, 4);
  exponent = exponent >> 23 > 22 ? exponent >> 23 : 22;
  const uint32_t bits = 8 * limbs - 3;
  const float per_unit = float_of_bits((254 + bits - exponent) << 23);
  to->unit = float_of_bits((exponent - bits) << 23), to->sum = sum(sums);
  ints coarse_sum = {}, fine_sum = {};
  for (int k = 0; k < form.group; k += LANES) {
    ints rest = (ints)(load(x + k) * per_unit + to_whole) - (ints)to_whole;
    ints coarse = (rest + 128) >> 8;
    coarse_sum += coarse, fine_sum += rest - (coarse << 8);
    for (int limb = limbs - 1; limb >= 0; limb--, rest = (rest + 128) >> 8)
      *(bytes *)(to->limbs[limb] + k) = __builtin_convertvector(rest, bytes);
  }
  if (form.bits == 8) {
    to->coarse_sum = _mm512_reduce_add_epi32((__m512i)coarse_sum);
    to->fine_sum = _mm512_reduce_add_epi32((__m512i)fine_sum);
  }
}

static void split_rows(const void *of, int64_t first, int64_t last) {
  const Job *job = of;
  const Gemm *p = &job->gemm;
  for (int64_t row = first; row < last; row++)
    for (int64_t g = 0; g < p->num_groups; g++)
      split(p->x + row * p->x_stride + g * job->form.group, job->form, job->limbs,
            inputs_of(job, row, g));
}

/* The codes of inputs k..k + 3, as unsigned bytes: 8-bit ones have 128 added. */
INLINE __m512i load_bytes(const uint8_t *codes, int k, Form form) {
  if (form.bits == 8) return (__m512i)(load_words(codes, k / 4, 0) ^ 0x80808080);
  return (__m512i)(load_words(codes, k / 8, 0) >> first_bit(k, form) & 0x0f0f0f0f);
}

/* Accumulates the dot product of four codes and inputs, for each output. */
INLINE ints dot_accumulate(ints sums, __m512i codes, const int8_t *x) {
  int32_t four;
  memcpy(&four, x, 4);
  return (ints)_mm512_dpbusd_epi32((__m512i)sums, codes, _mm512_set1_epi32(four));
}

/* Rows row..row + rows - 1 of one tile. */
INLINE void multiply_tile(const Job *job, int64_t tile, int64_t row, Form form, int limbs,
                          int rows) {
  const Gemm *p = &job->gemm;
  const Inputs *x = inputs_of(job, row, 0);
  const uint8_t *at = p->weight + tile * p->num_groups * record_bytes(form);
  floats total[ROWS] = {};
  for (int64_t g = 0; g < p->num_groups; g++, x += ROWS, at += record_bytes(form)) {
    const uint8_t *codes = at + 2 * TILE * form.meta_bytes;
    ints coarse[ROWS] = {}, fine[ROWS] = {};
    if (limbs == 2) { /* there are registers for the sums of both */
      UNROLL for (int k = 0; k < form.group; k += 4) {
        const __m512i code = load_bytes(codes, k, form);
        UNROLL for (int r = 0; r < rows; r++) {
          coarse[r] = dot_accumulate(coarse[r], code, x[r].limbs[0] + k);
          fine[r] = dot_accumulate(fine[r], code, x[r].limbs[1] + k);
        }
      }
    }
    UNROLL for (int limb = 0; limb < (limbs == 2 ? 0 : limbs); limb++) {
      UNROLL for (int r = 0; r < rows; r++) {
        if (limb == 1) coarse[r] = fine[r] << 8;
        if (limb == 2) coarse[r] += fine[r];
        fine[r] = (ints){};
      }
      UNROLL for (int k = 0; k < form.group; k += 4) {
        const __m512i code = load_bytes(codes, k, form);
        UNROLL for (int r = 0; r < rows; r++)
          fine[r] = dot_accumulate(fine[r], code, x[r].limbs[limb] + k);
      }
    }
    const floats scale = load_meta(at, 0, form);
    const floats minimum = load_meta(at + TILE * form.meta_bytes, 0, form);
    UNROLL for (int r = 0; r < rows; r++) {
      floats whole; /* the sum of code * X: only 8 bits and three limbs do not fit in 32 bits */
      if (limbs == 2) {
        ints sums = (coarse[r] << 8) + fine[r];
        if (form.bits == 8) sums -= 128 * (256 * x[r].coarse_sum + x[r].fine_sum);
        whole = __builtin_convertvector(sums, floats);
      } else if (form.bits == 4) {
        whole = __builtin_convertvector((coarse[r] << 8) + fine[r], floats);
      } else {
        coarse[r] -= 128 * x[r].coarse_sum, fine[r] -= 128 * x[r].fine_sum;
        whole = __builtin_convertvector(coarse[r], floats) * 256.0f +
                __builtin_convertvector(fine[r], floats);
      }
      total[r] += scale * (whole * x[r].unit) + minimum * x[r].sum;
    }
  }
  for (int r = 0; r < rows; r++)
    write_tile(p, (const float *)&total[r], row + r, tile * TILE, TILE, 1);
}

/* Some of the tiles, all rows. */
INLINE void multiply(const void *of, int64_t first, int64_t last, Form form, int limbs) {
  const Job *job = of;
  const int64_t num_rows = job->gemm.num_rows;
  for (int64_t tile = first; tile < last; tile++) {
    int64_t row = 0;
    for (; row + 8 <= num_rows; row += 8) multiply_tile(job, tile, row, form, limbs, 8);
    if (num_rows & 4) multiply_tile(job, tile, row, form, limbs, 4), row += 4;
    if (num_rows & 2) multiply_tile(job, tile, row, form, limbs, 2), row += 2;
    if (num_rows & 1) multiply_tile(job, tile, row, form, limbs, 1);
  }
}

/* The whole GEMM, by as many threads as are worthwhile. */
static void run_gemm(const Gemm *gemm, Form form, int limbs, Chunk multiply_tiles) {
  const int64_t in_features = gemm->num_groups * form.group;
  const int64_t row_bytes = gemm->num_groups * sizeof(Inputs);
  int64_t block = CACHE_BYTES / row_bytes / ROWS * ROWS;
  block = block > MIN_ROW_BLOCK ? block : MIN_ROW_BLOCK;
  block = block < gemm->num_rows ? block : (gemm->num_rows + ROWS - 1) / ROWS * ROWS;
  Job job = {*gemm, form, limbs, malloc(block * row_bytes)};
  if (!job.inputs) abort();
  for (int64_t row = 0; row < gemm->num_rows; row += block) {
    Gemm *part = &job.gemm;
    part->x = gemm->x + row * gemm->x_stride, part->y = gemm->y + row * gemm->y_stride;
    part->num_rows = gemm->num_rows - row < block ? gemm->num_rows - row : block;
    in_chunks(split_rows, &job, part->num_rows,
              1 + WORTHWHILE_SPLIT / in_features);
    in_chunks(multiply_tiles, &job, num_tiles(part),
              worthwhile_tiles(in_features * part->num_rows));
  }
  free(job.inputs);
}

#endif
