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

/* Every second lane, from the first or the second on: those of a, then those of b. */
#if defined(__AVX512F__)
#define EVERY_SECOND(a, b, n)                                                                      \
  __builtin_shufflevector(a, b, n, n + 2, n + 4, n + 6, n + 8, n + 10, n + 12, n + 14, n + 16,     \
                          n + 18, n + 20, n + 22, n + 24, n + 26, n + 28, n + 30)
#elif defined(__AVX__)
#define EVERY_SECOND(a, b, n) \
  __builtin_shufflevector(a, b, n, n + 2, n + 4, n + 6, n + 8, n + 10, n + 12, n + 14)
#else
#define EVERY_SECOND(a, b, n) __builtin_shufflevector(a, b, n, n + 2, n + 4, n + 6)
#endif

/* Neighbors added: first those of a, then those of b. */
INLINE floats add_pairs(floats a, floats b) {
  return EVERY_SECOND(a, b, 0) + EVERY_SECOND(a, b, 1);
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

INLINE floats choose(ints mask, floats yes, floats no) {
  return (floats)((mask & (ints)yes) | (~mask & (ints)no));
}

INLINE float max_lane(floats x) {
  UNROLL for (int width = LANES; width > 1; width /= 2) {
    const floats even = EVERY_SECOND(x, x, 0), odd = EVERY_SECOND(x, x, 1);
    x = choose(even > odd, even, odd);
  }
  return x[0];
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
