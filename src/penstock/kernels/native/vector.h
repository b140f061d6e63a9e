/* Vectors of floats as wide as the machine's registers, in the compiler's own vector types. */

#ifndef PENSTOCK_VECTOR_H
#define PENSTOCK_VECTOR_H

#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

/* The same in memory: at any address. */
typedef float floats_at __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t words_at __attribute__((vector_size(4 * LANES), aligned(1), may_alias));

INLINE floats load(const float *at) { return *(const floats_at *)at; }
INLINE void store(float *at, floats x) { *(floats_at *)at = x; }
INLINE floats all(float x) { return x - (floats){}; }

/* Neighbours added: first those of a, then those of b. */
INLINE floats add_pairs(floats a, floats b) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif defined(__AVX__)
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) +
         __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
  return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}

/* Lane i is the sum of all lanes of x[i]; x is used up. */
INLINE floats sum_each(floats x[LANES]) {
  UNROLL for (int width = LANES / 2; width; width /= 2)
    UNROLL for (int i = 0; i < width; i++) x[i] = add_pairs(x[2 * i], x[2 * i + 1]);
  return x[0];
}

INLINE float sum(floats x) {
  UNROLL for (int width = LANES; width > 1; width /= 2) x = add_pairs(x, x);
  return x[0];
}

INLINE float max_lane(floats x) {
  float lanes[LANES], most;
  store(lanes, x);
  most = lanes[0];
  for (int i = 1; i < LANES; i++) most = lanes[i] > most ? lanes[i] : most;
  return most;
}

INLINE floats choose(ints mask, floats yes, floats no) {
  return (floats)((mask & (ints)yes) | (~mask & (ints)no));
}

/* e^x to about one unit in the last place: x = n ln 2 + r, |r| <= ln(2) / 2, e^r by its series.
   Below -87 the result is 0, above 88 it stays at e^88. */
INLINE floats exp_of(floats x) {
  const floats low = all(-87.0f), high = all(88.0f);
  ints is_low = x < low;
  x = choose(is_low, low, choose(x > high, high, x));
  floats shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: rounds to an integer */
  floats n = shifted - 12582912.0f;
  floats r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f; /* ln 2 in two parts */
  floats p = all(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  ints power = (__builtin_convertvector(n, ints) + 127) << 23;
  return choose(is_low, all(0.0f), p * (floats)power);
}

#endif
