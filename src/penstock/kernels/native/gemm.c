/* Products with packed weights, in fp32. The layout is that of kernels/gemm/codes.py:

   A tile is 16 outputs. Of each tile, group after group of inputs lie 16 scales, 16 minima and the
   codes, in 32-bit words of 16 outputs: a word holds eight 4-bit or four signed 8-bit codes of
   consecutive inputs, the first one lowest. A weight is scale * code + minimum. */

#include <string.h>

#include "pool.h"
#include "vector.h"

enum {
  TILE = 16,
  VECTORS = TILE / LANES,
  CHUNK = 768,         /* inputs unpacked at once */
  ROW_BLOCK = 256,     /* rows that stay in the second-level cache beside them */
  WORTHWHILE = 1 << 15 /* weights that are worth handing to another thread, about 2 us */
};

/* Rows multiplied at once, and tiles unpacked at once: as many sums as there are registers for. */
#if defined(__AVX512F__)
enum { ROWS = 8, PANEL = 2 };
#else
enum { ROWS = 4, PANEL = 1 };
#endif

typedef struct {
  int bits, group, meta_bytes; /* of a code; inputs that share a scale; of a scale or a minimum */
} Form;

typedef struct {
  const float *x, *bias; /* bias may be NULL */
  const uint8_t *weight;
  float *y;
  const float *sums; /* of the inputs of each group, by row */
  int64_t x_stride, y_stride, num_rows, num_outputs, num_groups;
} Product;

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

INLINE floats load_code(const uint8_t *codes, int input, int vector, Form form) {
  int per_word = 32 / form.bits, place = input % per_word;
  words word = *(const words_at *)(codes + (input / per_word * TILE + vector * LANES) * 4);
  if (form.bits == 4) return __builtin_convertvector((ints)(word >> (4 * place) & 15), floats);
  return __builtin_convertvector((ints)(word << (24 - 8 * place)) >> 24, floats);
}

INLINE void write_tile(const Product *p, const float *from, int64_t row, int64_t output, int n,
                       int is_first) {
  float *to = p->y + row * p->y_stride + output;
  if (n > p->num_outputs - output) n = (int)(p->num_outputs - output);
  if (!is_first)
    for (int i = 0; i < n; i++) to[i] += from[i];
  else if (p->bias)
    for (int i = 0; i < n; i++) to[i] = from[i] + p->bias[output + i];
  else
    memcpy(to, from, n * sizeof(float));
}

/* At most `rows` rows: y = scale * sum(code * x) + minimum * sum(x) over the groups, straight from
   the codes. `chains` sums run side by side, since one addition waits for the one before it. */
INLINE void few_rows(const Product *p, int64_t first, int64_t last, Form form, int rows,
                     int chains) {
  const float *x[ROWS], *sums[ROWS];
  for (int r = 0; r < rows; r++) { /* missing rows repeat the last one */
    int64_t row = r < p->num_rows ? r : p->num_rows - 1;
    x[r] = p->x + row * p->x_stride, sums[r] = p->sums + row * p->num_groups;
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
INLINE void unpack(const Product *p, int64_t tile, int num_tiles, int64_t begin, int depth,
                   Form form, floats panel[][PANEL * VECTORS]) {
  for (int t = 0; t < num_tiles; t++)
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
INLINE void many_rows(const Product *p, int64_t first, int64_t last, Form form) {
  static _Thread_local floats panel[CHUNK][PANEL * VECTORS];
  const int64_t num_inputs = p->num_groups * form.group;
  for (int64_t top = 0; top < p->num_rows; top += ROW_BLOCK)
    for (int64_t tile = first; tile < last; tile += PANEL)
      for (int64_t begin = 0; begin < num_inputs; begin += CHUNK) {
        const int64_t bottom = top + ROW_BLOCK < p->num_rows ? top + ROW_BLOCK : p->num_rows;
        const int num_tiles = last - tile < PANEL ? (int)(last - tile) : PANEL;
        const int depth = num_inputs - begin < CHUNK ? (int)(num_inputs - begin) : CHUNK;
        unpack(p, tile, num_tiles, begin, depth, form, panel);
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
            write_tile(p, (const float *)total[r], row + r, tile * TILE, num_tiles * TILE, !begin);
        }
      }
}

/* Some of the tiles. */
INLINE void multiply(const Product *p, int64_t first, int64_t last, Form form) {
  if (p->num_rows == 1)
    few_rows(p, first, last, form, 1, 4);
  else if (p->num_rows == 2)
    few_rows(p, first, last, form, 2, 2);
  else if (p->num_rows <= 4)
    few_rows(p, first, last, form, 4, 1);
  else if (p->num_rows <= ROWS)
    few_rows(p, first, last, form, ROWS, 1);
  else
    many_rows(p, first, last, form);
}

/* The forms there are, one compiled version each. */
enum { U4_HALF, U4_FLOAT, I8_HALF, I8_FLOAT };
static const Form forms[] = {{4, 32, 2}, {4, 32, 4}, {8, 32, 2}, {8, 16, 4}};

#define VERSION(name, ...)                                              \
  static void name(const void *product, int64_t first, int64_t last) { \
    multiply(product, first, last, (Form){__VA_ARGS__});               \
  }
VERSION(multiply_u4_half, 4, 32, 2)
VERSION(multiply_u4_float, 4, 32, 4)
VERSION(multiply_i8_half, 8, 32, 2)
VERSION(multiply_i8_float, 8, 16, 4)

static int form_of(int64_t bits, int64_t meta_bytes) {
  return bits == 4 ? (meta_bytes == 2 ? U4_HALF : U4_FLOAT)
                   : (meta_bytes == 2 ? I8_HALF : I8_FLOAT);
}

/* y[T, O] = x[T, I] times the packed weight, plus the bias. */
void packed_linear(const float *x, int64_t x_stride, int64_t num_rows, const uint8_t *weight,
                   const float *bias, float *y, int64_t y_stride, int64_t num_outputs,
                   int64_t num_inputs, int64_t bits, int64_t meta_bytes) {
  static const Chunk versions[] = {multiply_u4_half, multiply_u4_float, multiply_i8_half,
                                   multiply_i8_float};
  const int which = form_of(bits, meta_bytes);
  const int group = forms[which].group;
  const int64_t num_groups = num_inputs / group, num_tiles = (num_outputs + TILE - 1) / TILE;
  const int num_summed = num_rows <= ROWS ? (int)num_rows : 0;
  float sums[num_summed * num_groups + 1];
  for (int64_t i = 0; i < num_summed * num_groups; i++) {
    const float *from = x + i / num_groups * x_stride + i % num_groups * group;
    floats total = load(from);
    for (int k = LANES; k < group; k += LANES) total += load(from + k);
    sums[i] = sum(total);
  }
  const Product product = {x, bias, weight, y, sums, x_stride, y_stride, num_rows, num_outputs,
                           num_groups};
  const int64_t step = even_step(num_tiles, 1 + WORTHWHILE / (num_inputs * num_rows * TILE));
  in_chunks(versions[which], &product, num_tiles, (step + PANEL - 1) / PANEL * PANEL);
}

/* out[T, I] = rows `ids` of the packed matrix; an id that has no row gives zeros. */
void packed_rows(const int64_t *ids, int64_t num_ids, const uint8_t *weight, float *out,
                 int64_t out_stride, int64_t num_outputs, int64_t num_inputs, int64_t bits,
                 int64_t meta_bytes) {
  const Form form = forms[form_of(bits, meta_bytes)];
  const int64_t num_groups = num_inputs / form.group;
  for (int64_t i = 0; i < num_ids; i++) {
    float *to = out + i * out_stride;
    if (ids[i] < 0 || ids[i] >= num_outputs) {
      memset(to, 0, num_inputs * sizeof(float));
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
        int per_word = 32 / form.bits, place = k % per_word;
        memcpy(&word, codes + (k / per_word * TILE + lane) * 4, 4);
        int code = form.bits == 4 ? (int)(word >> (4 * place) & 15) : (int8_t)(word >> (8 * place));
        to[g * form.group + k] = scale * (float)code + minimum;
      }
    }
  }
}
