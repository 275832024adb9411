#include "kernels.h"

#include <cmath>
#include <initializer_list>

#include "scalar.h"
#include "vector.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#ifndef RN_KERNELS
#define RN_KERNELS PORTABLE_KERNELS
#define RN_NAME "portable"
#endif

using namespace rn;

namespace {

// Products -----------------------------------------------------------------------------------------------------------

// Rows of inputs and outputs; `scale` belongs to rows of int8.
template <typename X>
struct Rows {
  const X* x;
  size_t x_stride;
  const float* scale;
  real* y;
  size_t y_stride;
};

template <int ROWS, int PANELS>
inline void multiply_tile(const Matrix& m, int panel, const Rows<real>& rows) {
  Register total[ROWS][PANELS * REGISTERS];
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < PANELS * REGISTERS; j++) total[r][j] = broadcast(0);
  const size_t panel_size = size_t(m.in) * LANES;
  const real* weight = m.weight + panel * panel_size;
  for (int k = 0; k < m.in; k++) {
#pragma GCC unroll 16
    for (int j = 0; j < PANELS * REGISTERS; j++) {
      const Register w = load_register(weight + j / REGISTERS * panel_size + size_t(k) * LANES + j % REGISTERS * WIDTH);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) total[r][j] = total[r][j] + w * rows.x[r * rows.x_stride + k];
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < PANELS * REGISTERS; j++) {
      const int column = panel * LANES + j * WIDTH;
      Register value = total[r][j];
      if (m.bias) value = value + load_register(m.bias + column);
      store_register(rows.y + r * rows.y_stride + column, value);
    }
}

// Exact sums of products of int8 in registers of four products each: `spread` repeats four inputs in a register, and
// `add_products` multiplies them with four weights of each output.
#if defined(__AVX512VNNI__)
typedef __m512i Sums;
typedef __m512i Inputs;
constexpr int SHIFT = 128;  // x + 128 is stored: the instruction multiplies unsigned by signed numbers
inline Inputs spread(const int8_t* x) {
  int32_t four;
  memcpy(&four, x, 4);
  return _mm512_set1_epi32(four);
}
inline void add_products(Sums& sums, const Inputs& x, const Sums& weight) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(x), "v"(weight));  // gcc copies the sums around the intrinsic
}
#elif defined(__AVX2__)
typedef __m256i Sums;
struct Inputs {
  __m256i value, size;
};
constexpr int SHIFT = 0;
inline Inputs spread(const int8_t* x) {
  int32_t four;
  memcpy(&four, x, 4);
  const __m256i value = _mm256_set1_epi32(four);
  return {value, _mm256_abs_epi8(value)};
}
inline void add_products(Sums& sums, const Inputs& x, const Sums& weight) {
  // |x| times w with the sign of x: sums of two such products fit into 16 bits.
  const __m256i pairs = _mm256_maddubs_epi16(x.size, _mm256_sign_epi8(weight, x.value));
  sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#elif defined(__ARM_FEATURE_DOTPROD)
typedef int32x4_t Sums;
typedef int8x16_t Inputs;
constexpr int SHIFT = 0;
inline Inputs spread(const int8_t* x) {
  int32_t four;
  memcpy(&four, x, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}
inline void add_products(Sums& sums, const Inputs& x, const Sums& weight) {
  sums = vdotq_s32(sums, vreinterpretq_s8_s32(weight), x);
}
#else
typedef int32_t Sums __attribute__((vector_size(16)));
typedef int8_t Bytes __attribute__((vector_size(16)));
typedef const int8_t* Inputs;
constexpr int SHIFT = 0;
inline Inputs spread(const int8_t* x) { return x; }
inline void add_products(Sums& sums, const Inputs& x, const Sums& weight) {
  Bytes w;
  memcpy(&w, &weight, sizeof w);
  Sums products;
  for (int o = 0; o < 4; o++)
    products[o] = w[4 * o] * x[0] + w[4 * o + 1] * x[1] + w[4 * o + 2] * x[2] + w[4 * o + 3] * x[3];
  sums = sums + products;
}
#endif
constexpr int SUMS = LANES * 4 / int(sizeof(Sums));  // registers for 16 outputs

// Outputs from exact sums: each times the scale of its row and of its output, plus the bias.
inline void scale_sums(const Matrix& m, int column, const Sums* sums, real x_scale, real* y) {
  int32_t exact[LANES];
  memcpy(exact, sums, sizeof exact);
  Vector values;
  for (int i = 0; i < REGISTERS; i++) {
    typedef int32_t Part __attribute__((vector_size(4 * WIDTH)));
    Part part;
    memcpy(&part, exact + i * WIDTH, sizeof part);
    if (SHIFT) {
      Part offset;
      memcpy(&offset, m.offset + column + i * WIDTH, sizeof offset);
      part = part - offset;
    }
    values.part[i] = __builtin_convertvector(part, Register);
  }
  Vector scales;
  for (int i = 0; i < REGISTERS; i++) {
    typedef float Part __attribute__((vector_size(4 * WIDTH)));
    Part part;
    memcpy(&part, m.scale + column + i * WIDTH, sizeof part);
    scales.part[i] = __builtin_convertvector(part, Register);
  }
  Vector out = values * (splat(x_scale) * scales);
  if (m.bias) out = out + load(m.bias + column);
  store(y, out);
}

template <int ROWS, int PANELS>
inline void multiply_tile(const Matrix& m, int panel, const Rows<int8_t>& rows) {
  Sums total[ROWS][PANELS * SUMS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int j = 0; j < PANELS * SUMS; j++) total[r][j] = Sums{};
  const size_t panel_size = size_t(m.groups) * LANES * 4;
  const int8_t* weight = m.quantized + panel * panel_size;
  const int8_t* x = rows.x;
  for (int g = 0; g < m.groups; g++, x += 4, weight += LANES * 4) {
    Sums w[PANELS * SUMS];
#pragma GCC unroll 16
    for (int j = 0; j < PANELS * SUMS; j++)
      memcpy(&w[j], weight + j / SUMS * panel_size + j % SUMS * sizeof(Sums), sizeof(Sums));
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const Inputs four = spread(x + r * rows.x_stride);
#pragma GCC unroll 16
      for (int j = 0; j < PANELS * SUMS; j++) add_products(total[r][j], four, w[j]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int p = 0; p < PANELS; p++) {
      const int column = (panel + p) * LANES;
      scale_sums(m, column, total[r] + p * SUMS, real(rows.scale[r]), rows.y + r * rows.y_stride + column);
    }
}

template <int ROWS, int PANELS, typename X>
inline void multiply_panels(const Matrix& m, int panel, int end, const Rows<X>& rows) {
  for (; panel + PANELS <= end; panel += PANELS) multiply_tile<ROWS, PANELS>(m, panel, rows);
  if constexpr (PANELS > 1) multiply_panels<ROWS, PANELS / 2>(m, panel, end, rows);
}

// The panels from `panel` to `end`, for ROWS rows at a time, then for the rest.
template <int ROWS, int PANELS, typename X>
inline void multiply_rows(const Matrix& m, int panel, int end, Rows<X> rows, int count) {
  for (; count >= ROWS; count -= ROWS) {
    multiply_panels<ROWS, PANELS>(m, panel, end, rows);
    rows.x += ROWS * rows.x_stride;
    rows.y += ROWS * rows.y_stride;
    if constexpr (sizeof(X) == 1) rows.scale += ROWS;
  }
  if constexpr (ROWS > 1) {
    if (count) multiply_rows<ROWS - 1, PANELS>(m, panel, end, rows, count);
  }
}

// The sums of a tile stay in registers, and a few panels in the cache while all rows pass.
template <int ROWS, int PANELS, typename X>
inline void multiply_tiles(const Matrix& m, const Rows<X>& rows, int count) {
  const int panels = padded(m.out) / LANES;
  if (count == 1) return multiply_panels<1, REGISTERS == 1 ? 8 : 4>(m, 0, panels, rows);
  for (int panel = 0; panel < panels; panel += PANELS)
    multiply_rows<ROWS, PANELS>(m, panel, panel + PANELS < panels ? panel + PANELS : panels, rows, count);
}

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_PANELS = 4, INT8_PANELS = 4;
#else
constexpr int TILE_ROWS = 4, TILE_PANELS = 1, INT8_PANELS = 2;
#endif

void multiply(const Matrix& m, const real* x, int x_stride, int rows, real* y, int y_stride) {
  multiply_tiles<TILE_ROWS, TILE_PANELS, real>(m, {x, size_t(x_stride), nullptr, y, size_t(y_stride)}, rows);
}

void multiply_int8(const Matrix& m, const int8_t* x, const float* scale, int rows, real* y, int y_stride) {
  multiply_tiles<TILE_ROWS, INT8_PANELS, int8_t>(m, {x, size_t(m.groups) * 4, scale, y, size_t(y_stride)}, rows);
}

// The sums of the last, incomplete 16 lanes: lanes beyond `count` are `rest`.
inline Vector load_some(const real* x, int count, real rest) {
  real lane[LANES];
  for (int i = 0; i < LANES; i++) lane[i] = i < count ? x[i] : rest;
  return load(lane);
}

// Round 16 numbers of at most 127 to the nearest even ones: the last bits of a large sum are its integer part.
inline void round_lanes(const Vector& v, int8_t* out) {
  constexpr real SHIFTER = sizeof(real) == 4 ? real(12582912.0) : real(6755399441055744.0);
  const Vector sums = v + splat(SHIFTER + SHIFT);
#if defined(__AVX512F__) && !defined(RN_DOUBLE)
  const __m512i bits = _mm512_castps_si512(__m512(sums.part[0]));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_maskz_cvtepi32_epi8(0xFFFF, bits));
#else
  whole bits[LANES];
  memcpy(bits, &sums, sizeof bits);
  for (int i = 0; i < LANES; i++) out[i] = int8_t(bits[i]);
#endif
}

void quantize(const real* x, int x_stride, int rows, int width, int8_t* out, float* scale) {
  const int size = (width + 3) / 4 * 4, whole_lanes = width / LANES * LANES;
  for (int r = 0; r < rows; r++, x += x_stride, out += size) {
    Vector top = splat(0), zeros = splat(0);  // NaN where a number is infinite or NaN, and so the scale
    for (int i = 0; i < width; i += LANES) {
      const Vector v = i < whole_lanes ? load(x + i) : load_some(x + i, width - i, 0);
      top = larger(top, magnitude(v));
      zeros = zeros + (v - v);
    }
    const real highest = maximum(top), zero = sum(zeros);
    scale[r] = float(highest / 127 + zero);
    if (!(zero == 0)) {
      memset(out, 0, size_t(size));
      continue;
    }
    const Vector factor = splat(highest > real(1e-30) ? 127 / highest : 0);
    for (int i = 0; i < whole_lanes; i += LANES) round_lanes(load(x + i) * factor, out + i);
    if (whole_lanes == width) continue;
    int8_t rest[LANES];
    round_lanes(load_some(x + whole_lanes, width - whole_lanes, 0) * factor, rest);
    memcpy(out + whole_lanes, rest, size_t(size - whole_lanes));
  }
}

// Elementwise and per row --------------------------------------------------------------------------------------------

void normalize(const real* x, int stride, int rows, int width, bool rms, real eps, const real* weight,
               const real* bias, real* out) {
  const int whole_lanes = width / LANES * LANES;
  for (int r = 0; r < rows; r++, x += stride, out += stride) {
    real mean = 0;
    if (!rms) {
      Vector total = splat(0);
      for (int i = 0; i < whole_lanes; i += LANES) total = total + load(x + i);
      if (whole_lanes < width) total = total + load_some(x + whole_lanes, width - whole_lanes, 0);
      mean = sum(total) / real(width);
    }
    Vector squares = splat(0);
    for (int i = 0; i < width; i += LANES) {
      Vector v = width - i >= LANES ? load(x + i) : load_some(x + i, width - i, mean);
      v = v - splat(mean);
      squares = squares + v * v;
    }
    const real factor = real(1) / std::sqrt(sum(squares) / real(width) + eps);
    for (int i = 0; i < width; i += LANES) {  // rows, weights and biases have space for whole vectors
      Vector v = (load(x + i) - splat(mean)) * splat(factor);
      if (weight) v = v * load(weight + i);
      if (bias) v = v + load(bias + i);
      store(out + i, v);
    }
    for (int i = width; i < padded(width); i++) out[i] = 0;
  }
}

#ifdef RN_DOUBLE
inline Vector error_function(const Vector& x) {
  real lane[LANES];
  store(lane, x);
  for (real& each : lane) each = std::erf(each);
  return load(lane);
}
#else
// The error function, to about 10^-7 (Abramowitz and Stegun 7.1.26).
inline Vector error_function(const Vector& x) {
  Vector zero = splat(0), one = splat(1);
  Vector positive = larger(x, zero - x);
  Vector t = one / (one + splat(real(0.3275911)) * positive);
  Vector series = splat(real(1.061405429));
  for (real factor : {real(-1.453152027), real(1.421413741), real(-0.284496736), real(0.254829592)})
    series = series * t + splat(factor);
  Vector y = one - series * t * exp(zero - positive * positive);
  return where_less(x, zero, zero - y, y);
}
#endif

inline Vector activated(Activation kind, const Vector& x) {
  switch (kind) {
    case RELU: return larger(splat(0), x);  // NaN for NaN
    case SILU: return x * sigmoid(x);
    case TANH: return tanh(x);
    case GELU: return splat(real(0.5)) * x * (splat(1) + error_function(x * splat(real(0.7071067811865476))));
    default: {
      Vector inner = x + splat(real(0.044715)) * x * x * x;
      return splat(real(0.5)) * x * (splat(1) + tanh(splat(real(0.7978845608028654)) * inner));
    }
  }
}

void activate(Activation kind, const real* gate, real* x, size_t count) {
  for (size_t i = 0; i < count; i += LANES) {
    Vector v = load(x + i);
    store(x + i, gate ? activated(kind, load(gate + i)) * v : activated(kind, v));
  }
}

void rotate(const real* cosine, const real* sine, int half, int count, int stride, real* x) {
  for (; count; count--, x += stride)
    for (int i = 0; i < half; i++) {
      const real a = x[i], b = x[i + half];
      x[i] = a * cosine[i] - b * sine[i];
      x[i + half] = b * cosine[i] + a * sine[i];
    }
}

void add(real* x, const real* y, size_t count) {
  for (size_t i = 0; i < count; i++) x[i] = x[i] + y[i];
}

// Attention ----------------------------------------------------------------------------------------------------------

// Several heads are computed in turn, so that their operations do not wait for each other.

// Scores of whole blocks -> weights, whose sum is 1. Other keys than those of the query have the weight 0; without a
// visible key all weights are 0.
template <int HEADS>
inline void softmax_keys(const Query* query, real* weights, int stride) {
  const int first = query->first, end = query->end;
  const int first_block = first / LANES, end_block = (end + LANES - 1) / LANES;
  Vector top[HEADS], total[HEADS], inverse[HEADS];
  for (int h = 0; h < HEADS; h++) top[h] = splat(LOWEST);
  for (int b = first_block; b < end_block; b++)
    for (int h = 0; h < HEADS; h++) {
      real* block = weights + h * stride + b * LANES;
      Vector score = load(block);
      if (query[h].bias) score = score + load(query[h].bias + b * LANES);
      score = keep_lanes(score, first - b * LANES, end - b * LANES, splat(LOWEST));
      store(block, score);
      top[h] = larger(top[h], score);
    }
  for (int h = 0; h < HEADS; h++) {
    const real most = maximum(top[h]);
    top[h] = splat(most > LOWEST ? most : 0);
    total[h] = splat(0);
  }
  for (int b = first_block; b < end_block; b++)
    for (int h = 0; h < HEADS; h++) {
      real* block = weights + h * stride + b * LANES;
      const Vector weight = exp(load(block) - top[h]);
      store(block, weight);
      total[h] = total[h] + weight;
    }
  for (int h = 0; h < HEADS; h++) {
    const real all = sum(total[h]);
    inverse[h] = splat(all > 0 ? real(1) / all : 0);
  }
  for (int b = first_block; b < end_block; b++)
    for (int h = 0; h < HEADS; h++) {
      real* block = weights + h * stride + b * LANES;
      const Vector weight = load(block) * inverse[h];
      store(block, query[h].factor ? weight * load(query[h].factor + b * LANES) : weight);
    }
}

// Scores of 16 keys.
template <int HEADS>
inline void score_block(const Query* query, const real* const* keys, int width, real* scores, int stride) {
  Vector part[HEADS][4];
  for (int h = 0; h < HEADS; h++)
    for (int i = 0; i < 4; i++) part[h][i] = splat(0);
  if (query->v) {
    for (int e = 0; e < width; e++)
      part[0][0] = part[0][0] + tanh(load(keys[0] + e * LANES) + splat(query->query[e])) * splat(query->v[e]);
    return store(scores, part[0][0]);
  }
  int e = 0;
  for (; e + 4 <= width; e += 4)
    for (int h = 0; h < HEADS; h++)
      for (int i = 0; i < 4; i++)
        part[h][i] = part[h][i] + load(keys[h] + (e + i) * LANES) * splat(query[h].query[e + i]);
  for (; e < width; e++)
    for (int h = 0; h < HEADS; h++)
      part[h][0] = part[h][0] + load(keys[h] + e * LANES) * splat(query[h].query[e]);
  for (int h = 0; h < HEADS; h++)
    store(scores + h * stride, ((part[h][0] + part[h][1]) + (part[h][2] + part[h][3])) * splat(query->scale));
}

// Sums of values times weights, in order; `value` gives the first value of a key in a head.
template <int HEADS, int VECTORS, typename Value>
inline void mix_vectors(const real* weights, int stride, int first, int end, const Value& value, int width, real* out) {
  Vector mixed[HEADS][VECTORS];
  for (int h = 0; h < HEADS; h++)
    for (int i = 0; i < VECTORS; i++) mixed[h][i] = splat(0);
  for (int s = first; s < end; s++)
    for (int h = 0; h < HEADS; h++) {
      const real* row = value(h, s);
      const Vector weight = splat(weights[h * stride + s]);
      for (int i = 0; i < VECTORS; i++) mixed[h][i] = mixed[h][i] + load(row + i * LANES) * weight;
    }
  for (int h = 0; h < HEADS; h++)
    for (int i = 0; i < VECTORS; i++) store(out + h * width + i * LANES, mixed[h][i]);
}

template <int HEADS, typename Value>
inline void mix(const Query* query, const real* weights, int stride, const Value& value, int width, real* out) {
  const int first = query->first, end = query->end;
  switch (padded(width) / LANES) {
    case 1: return mix_vectors<HEADS, 1>(weights, stride, first, end, value, width, out);
    case 2: return mix_vectors<HEADS, 2>(weights, stride, first, end, value, width, out);
    case 3: return mix_vectors<HEADS, 3>(weights, stride, first, end, value, width, out);
    case 4: return mix_vectors<HEADS, 4>(weights, stride, first, end, value, width, out);
  }
  for (int h = 0; h < HEADS; h++)
    for (int i = 0; i < width; i += LANES) {
      auto part = [&](int, int s) { return value(h, s) + i; };
      mix_vectors<1, 1>(weights + h * stride, stride, first, end, part, width, out + h * width + i);
    }
}

template <int HEADS>
inline void attend_heads(const Query* query, const Source* head, real* weights, int stride, real* out) {
  const int first_block = query->first / LANES, end_block = (query->end + LANES - 1) / LANES;
  const int width = head->width, value_stride = padded(head->value_width);
  for (int b = first_block; b < end_block; b++) {
    if (query->scores) {
      store(weights + b * LANES, load(query->scores + b * LANES));
      continue;
    }
    const real* keys[HEADS];
    for (int h = 0; h < HEADS; h++) keys[h] = head[h].blocks[b] + head[h].offset;
    score_block<HEADS>(query, keys, width, weights + b * LANES, stride);
  }
  softmax_keys<HEADS>(query, weights, stride);
  auto value = [&](int h, int s) {
    return head[h].blocks[s / LANES] + head[h].offset + width * LANES + s % LANES * value_stride;
  };
  mix<HEADS>(query, weights, stride, value, head->value_width, out);
}

template <int HEADS>
inline void attend_heads(const Query* query, const Path* head, real* weights, int stride, real* out) {
  const int key_stride = padded(head->width), first = query->first, end = query->end;
  for (int start = first / LANES * LANES; start < end; start += LANES) {
    Vector scores[HEADS];
    for (int h = 0; h < HEADS; h++) scores[h] = splat(0);
    for (int s = start < first ? first : start; s < end && s < start + LANES; s++) {
      Vector total[HEADS];
      for (int h = 0; h < HEADS; h++) {
        const real* key = head[h].nodes + size_t(head->tokens[s]) * head->stride;
        total[h] = splat(0);
        for (int e = 0; e < key_stride; e += LANES) {
          const Vector k = load(key + e), q = load(query[h].query + e);
          total[h] = total[h] + (query->v ? tanh(k + q) * load(query->v + e) : k * q);
        }
      }
      sum_each<HEADS>(total);
      for (int h = 0; h < HEADS; h++) scores[h] = keep_lanes(total[h], s - start, s - start + 1, scores[h]);
    }
    for (int h = 0; h < HEADS; h++)
      store(weights + h * stride + start, query->v ? scores[h] : scores[h] * splat(query->scale));
    if (query->scores) store(weights + start, load(query->scores + start));
  }
  softmax_keys<HEADS>(query, weights, stride);
  auto value = [&](int h, int s) { return head[h].nodes + size_t(head->tokens[s]) * head->stride + key_stride; };
  mix<HEADS>(query, weights, stride, value, head->value_width, out);
}

// As many heads at once as there are registers for.
template <typename Head>
void attend(const Query* queries, const Head* heads, int count, real* weights, int stride, real* out) {
  int h = 0;
  if constexpr (REGISTERS == 1)
    for (; h + 4 <= count; h += 4)
      attend_heads<4>(queries + h, heads + h, weights, stride, out + h * heads->value_width);
  for (; h < count; h++) attend_heads<1>(queries + h, heads + h, weights, stride, out + h * heads->value_width);
}

// Recurrent layers ---------------------------------------------------------------------------------------------------

void gru(const real* input, const real* hidden, int width, int stride, real* state) {
  for (int i = 0; i < width; i += LANES) {
    Vector reset = sigmoid(load(input + i) + load(hidden + i));
    Vector update = sigmoid(load(input + stride + i) + load(hidden + stride + i));
    Vector fresh = tanh(load(input + 2 * stride + i) + reset * load(hidden + 2 * stride + i));
    store(state + i, (splat(1) - update) * fresh + update * load(state + i));
  }
}

void lstm(const real* input, const real* hidden, int width, int stride, real* state, real* cell) {
  for (int i = 0; i < width; i += LANES) {
    Vector in = sigmoid(load(input + i) + load(hidden + i));
    Vector forget = sigmoid(load(input + stride + i) + load(hidden + stride + i));
    Vector fresh = tanh(load(input + 2 * stride + i) + load(hidden + 2 * stride + i));
    Vector out = sigmoid(load(input + 3 * stride + i) + load(hidden + 3 * stride + i));
    Vector memory = forget * load(cell + i) + in * fresh;
    store(cell + i, memory);
    store(state + i, out * tanh(memory));
  }
}

// Output -------------------------------------------------------------------------------------------------------------

bool log_softmax(real* x, int count) {
  Vector top = splat(LOWEST);
  const int whole_lanes = count / LANES * LANES;
  for (int i = 0; i < whole_lanes; i += LANES) top = larger(top, load(x + i));
  if (whole_lanes < count) top = larger(top, load_some(x + whole_lanes, count - whole_lanes, LOWEST));
  const real highest = maximum(top);
  Vector total = splat(0);
  for (int i = 0; i < count; i += LANES) {
    Vector v = count - i >= LANES ? load(x + i) : load_some(x + i, count - i, LOWEST);
    total = total + exp(v - splat(highest));
  }
  const real all = sum(total);
  if (!(all > 0) || !(all < real(1e30)) || !(highest > LOWEST) || !(highest < -LOWEST)) return false;
  const real size = real(natural_log(double(all)));
  for (int i = 0; i < count; i++) x[i] = (x[i] - highest) - size;
  return true;
}

int top(const real* x, int size, int count, Candidate* out) {
  int filled = 0;
  for (int start = 0; start < size; start += 64) {
    const int end = start + 64 < size ? start + 64 : size;
    if (filled == count && end - start == 64) {
      Vector best = larger(larger(load(x + start), load(x + start + 16)),
                           larger(load(x + start + 32), load(x + start + 48)));
      if (!(maximum(best) > out[count - 1].value)) continue;
    }
    for (int i = start; i < end; i++) {
      if (filled == count && !(x[i] > out[count - 1].value)) continue;
      int at = filled < count ? filled++ : count - 1;
      for (; at > 0 && out[at - 1].value < x[i]; at--) out[at] = out[at - 1];
      out[at] = {x[i], i};
    }
  }
  return filled;
}

}  // namespace

const Kernels rn::RN_KERNELS = {RN_NAME, multiply, multiply_int8, quantize,    normalize, activate, add,
                                rotate,  attend<Source>, attend<Path>, gru, lstm, log_softmax, top};

#ifdef __wasm_simd128__
// The product of the live page, by tiles that keep its sums in the registers of browsers; `bias` may be null. The rows
// of x are `in` apart, those of y padded(out). Compiled by `native/page_product.py`, which drops all other functions.
extern "C" __attribute__((export_name("multiply"))) void multiply_page(const real* weight, const real* bias, int in,
                                                                       int out, const real* x, int rows, real* y) {
  Matrix m;
  m.in = in;
  m.out = out;
  m.weight = weight;
  m.bias = bias;
  const Rows<real> tile = {x, size_t(in), nullptr, y, size_t(padded(out))};
  for (int panel = 0; panel < padded(out) / LANES; panel++) multiply_rows<2, 1>(m, panel, panel + 1, tile, rows);
}
#endif
