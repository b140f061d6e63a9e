/* GEMM with packed low-bit weights, and embedding lookup. See packed.h for the layout. */

#include "packed.h"

/* run_gemm(gemm, form, limbs, chunk) computes a GEMM, multiply(job, first, last, form, limbs) a
   part of it; `limbs` is the precision of inputs where they become integers (VNNI). */
#if defined(__AVX512VNNI__)
#include "gemm_vnni.h"
#else
#include "gemm_fp32.h"
#endif

/* The forms there are, one compiled version each. */
enum { U4_HALF, U4_FLOAT, I8_HALF, I8_FLOAT };
static const Form forms[] = {{4, 32, 2}, {4, 32, 4}, {8, 32, 2}, {8, 16, 4}};

#define VERSION(name, ...)                                                 \
  static void name##_fine(const void *job, int64_t first, int64_t last) {   \
    multiply(job, first, last, (Form){__VA_ARGS__}, 3);                     \
  }                                                                         \
  static void name##_coarse(const void *job, int64_t first, int64_t last) { \
    multiply(job, first, last, (Form){__VA_ARGS__}, 2);                     \
  }
VERSION(u4_half, 4, 32, 2)
VERSION(u4_float, 4, 32, 4)
VERSION(i8_half, 8, 32, 2)
VERSION(i8_float, 8, 16, 4)

static int is_coarse;

/* Whether 16 bits of an input are enough, for all GEMMs that follow. */
void set_coarse(int64_t coarse) { is_coarse = coarse != 0; }

static int form_of(int64_t bits, int64_t meta_bytes) {
  return bits == 4 ? (meta_bytes == 2 ? U4_HALF : U4_FLOAT)
                   : (meta_bytes == 2 ? I8_HALF : I8_FLOAT);
}

/* y[T, O] = x[T, I] times the packed weight, plus the bias. */
void packed_linear(const float *x, int64_t x_stride, int64_t num_rows, const uint8_t *weight,
                   const float *bias, float *y, int64_t y_stride, int64_t out_features,
                   int64_t in_features, int64_t bits, int64_t meta_bytes) {
  static const Chunk versions[][2] = {{u4_half_fine, u4_half_coarse},
                                      {u4_float_fine, u4_float_coarse},
                                      {i8_half_fine, i8_half_coarse},
                                      {i8_float_fine, i8_float_coarse}};
  const int which = form_of(bits, meta_bytes);
  const Gemm gemm = {x, bias, weight, y, x_stride, y_stride, num_rows, out_features,
                           in_features / forms[which].group};
  run_gemm(&gemm, forms[which], is_coarse ? 2 : 3, versions[which][is_coarse]);
}

/* out[T, I] = rows `ids` of the packed matrix; an id that has no row gives zeros. */
void packed_rows(const int64_t *ids, int64_t num_ids, const uint8_t *weight, float *out,
                 int64_t out_stride, int64_t out_features, int64_t in_features, int64_t bits,
                 int64_t meta_bytes) {
  const Form form = forms[form_of(bits, meta_bytes)];
  const int64_t num_groups = in_features / form.group;
  for (int64_t i = 0; i < num_ids; i++) {
    float *to = out + i * out_stride;
    if (ids[i] < 0 || ids[i] >= out_features) {
      memset(to, 0, in_features * sizeof(float));
      continue;
    }
    const int64_t tile = ids[i] / TILE, lane = ids[i] % TILE;
    for (int64_t g = 0; g < num_groups; g++) {
      const uint8_t *at = weight + (tile * num_groups + g) * record_bytes(form);
      floats scales[VECTORS], minima[VECTORS];
      for (int v = 0; v < VECTORS; v++) {
        scales[v] = load_meta(at, v, form);
        minima[v] = load_meta(at + TILE * form.meta_bytes, v, form);
      }
      const float scale = ((float *)scales)[lane], minimum = ((float *)minima)[lane];
      const uint8_t *codes = at + 2 * TILE * form.meta_bytes;
      for (int k = 0; k < form.group; k++) {
        uint32_t word;
        memcpy(&word, codes + (k * form.bits / 32 * TILE + lane) * 4, 4);
        word >>= first_bit(k, form);
        const int code = form.bits == 4 ? (int)(word & 15) : (int8_t)word;
        to[g * form.group + k] = scale * (float)code + minimum;
      }
    }
  }
}
