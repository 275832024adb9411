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

constexpr real LOWEST = real(-INFINITY);

// Products -----------------------------------------------------------------------------------------------------------

template <int ROWS, int PANELS>
inline void multiply_tile(const Matrix& m, int panel, const real* x, int x_stride, real* y, int y_stride) {
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
      for (int r = 0; r < ROWS; r++) total[r][j] = total[r][j] + w * x[size_t(r) * x_stride + k];
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < PANELS * REGISTERS; j++) {
      int column = panel * LANES + j * WIDTH;
      Register value = total[r][j];
      if (m.bias) value = value + load_register(m.bias + column);
      store_register(y + size_t(r) * y_stride + column, value);
    }
}

template <int ROWS, int PANELS>
inline int multiply_panels(const Matrix& m, int panel, int end, const real* x, int x_stride, real* y, int y_stride) {
  for (; panel + PANELS <= end; panel += PANELS) multiply_tile<ROWS, PANELS>(m, panel, x, x_stride, y, y_stride);
  return panel;
}

// The sizes of a tile keep its sums in registers.
constexpr bool WIDE = REGISTERS == 1;

void multiply(const Matrix& m, const real* x, int x_stride, int rows, real* y, int y_stride) {
  const int panels = padded(m.out) / LANES;
  constexpr int STEP = WIDE ? 2 : 1;
  constexpr int MOST = WIDE ? 8 : 4;
  if (rows >= MOST) {
    for (int panel = 0; panel < panels; panel += STEP) {  // a panel stays in the cache while the rows pass
      int end = panel + STEP < panels ? panel + STEP : panels;
      int row = 0;
      for (; row + MOST <= rows; row += MOST) {
        const real* from = x + size_t(row) * x_stride;
        real* to = y + size_t(row) * y_stride;
        int next = multiply_panels<MOST, STEP>(m, panel, end, from, x_stride, to, y_stride);
        multiply_panels<MOST, 1>(m, next, end, from, x_stride, to, y_stride);
      }
      for (; row < rows; row++) {
        const real* from = x + size_t(row) * x_stride;
        real* to = y + size_t(row) * y_stride;
        int next = multiply_panels<1, STEP>(m, panel, end, from, x_stride, to, y_stride);
        multiply_panels<1, 1>(m, next, end, from, x_stride, to, y_stride);
      }
    }
    return;
  }
  int row = 0;
  for (; row + 2 <= rows; row += 2) {
    const real* from = x + size_t(row) * x_stride;
    real* to = y + size_t(row) * y_stride;
    int next = multiply_panels<2, WIDE ? 4 : 2>(m, 0, panels, from, x_stride, to, y_stride);
    multiply_panels<2, 1>(m, next, panels, from, x_stride, to, y_stride);
  }
  for (; row < rows; row++) {
    const real* from = x + size_t(row) * x_stride;
    real* to = y + size_t(row) * y_stride;
    int next = multiply_panels<1, WIDE ? 8 : 4>(m, 0, panels, from, x_stride, to, y_stride);
    multiply_panels<1, 1>(m, next, panels, from, x_stride, to, y_stride);
  }
}

// Exact sums of products of int8: a register of sums, and the step that adds four products to each of them.
#if defined(__AVX512VNNI__)
typedef __m512i Sums;
constexpr int SHIFT = 128;  // x + 128 is stored: the instruction multiplies unsigned by signed numbers
inline Sums add_products(Sums sums, const int8_t* weight, int32_t four) {
  return _mm512_dpbusd_epi32(sums, _mm512_set1_epi32(four), _mm512_loadu_si512(weight));
}
#elif defined(__AVX2__)
typedef __m256i Sums;
constexpr int SHIFT = 0;
inline Sums add_products(Sums sums, const int8_t* weight, int32_t four) {
  // |x| times w with the sign of x: sums of two such products fit into 16 bits.
  const __m256i x = _mm256_set1_epi32(four);
  const __m256i w = _mm256_sign_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(weight)), x);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(x), w);
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#elif defined(__ARM_FEATURE_DOTPROD)
typedef int32x4_t Sums;
constexpr int SHIFT = 0;
inline Sums add_products(Sums sums, const int8_t* weight, int32_t four) {
  return vdotq_s32(sums, vld1q_s8(weight), vreinterpretq_s8_s32(vdupq_n_s32(four)));
}
#else
typedef int32_t Sums __attribute__((vector_size(16)));
constexpr int SHIFT = 0;
inline Sums add_products(Sums sums, const int8_t* weight, int32_t four) {
  int8_t x[4];
  memcpy(x, &four, 4);
  Sums products;
  for (int o = 0; o < 4; o++)
    products[o] = weight[4 * o] * x[0] + weight[4 * o + 1] * x[1] + weight[4 * o + 2] * x[2] + weight[4 * o + 3] * x[3];
  return sums + products;
}
#endif
constexpr int SUMS = LANES * 4 / int(sizeof(Sums));  // registers for 16 outputs

// Outputs from exact sums: each times the scale of its row and of its output, plus the bias.
inline void scale_sums(const Matrix& m, int column, const Sums* sums, real x_scale, real* y) {
  int32_t exact[LANES];
  memcpy(exact, sums, sizeof exact);
  real values[LANES], scales[LANES];
  for (int o = 0; o < LANES; o++) {
    values[o] = real(SHIFT ? exact[o] - m.offset[column + o] : exact[o]);
    scales[o] = x_scale * real(m.scale[column + o]);
  }
  Vector out = load(values) * load(scales);
  if (m.bias) out = out + load(m.bias + column);
  store(y, out);
}

template <int ROWS, int PANELS>
inline void multiply_int8_tile(const Matrix& m, int panel, const int8_t* x, const float* x_scale, real* y,
                               int y_stride) {
  Sums total[ROWS][PANELS][SUMS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int j = 0; j < PANELS * SUMS; j++) total[r][j / SUMS][j % SUMS] = Sums{};
  const size_t panel_size = size_t(m.groups) * LANES * 4, x_stride = size_t(m.groups) * 4;
  const int8_t* weight = m.quantized + panel * panel_size;
  for (int g = 0; g < m.groups; g++) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      int32_t four;
      memcpy(&four, x + r * x_stride + size_t(g) * 4, 4);
#pragma GCC unroll 16
      for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 16
        for (int i = 0; i < SUMS; i++)
          total[r][p][i] = add_products(total[r][p][i],
                                        weight + p * panel_size + size_t(g) * LANES * 4 + i * int(sizeof(Sums)), four);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int p = 0; p < PANELS; p++) {
      const int column = (panel + p) * LANES;
      scale_sums(m, column, total[r][p], real(x_scale[r]), y + size_t(r) * y_stride + column);
    }
}

template <int ROWS, int PANELS>
inline int multiply_int8_panels(const Matrix& m, int panel, int end, const int8_t* x, const float* scale, real* y,
                                int y_stride) {
  for (; panel + PANELS <= end; panel += PANELS) multiply_int8_tile<ROWS, PANELS>(m, panel, x, scale, y, y_stride);
  return panel;
}

void multiply_int8(const Matrix& m, const int8_t* x, const float* scale, int rows, real* y, int y_stride) {
  const int panels = padded(m.out) / LANES;
  const size_t x_stride = size_t(m.groups) * 4;
  constexpr int STEP = WIDE ? 2 : 1;
  constexpr int MOST = WIDE ? 8 : 4;
  if (rows < MOST) {
    for (int row = 0; row < rows; row++) {
      real* to = y + size_t(row) * y_stride;
      int next = multiply_int8_panels<1, WIDE ? 8 : 4>(m, 0, panels, x + row * x_stride, scale + row, to, y_stride);
      multiply_int8_panels<1, 1>(m, next, panels, x + row * x_stride, scale + row, to, y_stride);
    }
    return;
  }
  for (int panel = 0; panel < panels; panel += STEP) {
    int end = panel + STEP < panels ? panel + STEP : panels;
    int row = 0;
    for (; row + MOST <= rows; row += MOST) {
      real* to = y + size_t(row) * y_stride;
      int next = multiply_int8_panels<MOST, STEP>(m, panel, end, x + row * x_stride, scale + row, to, y_stride);
      multiply_int8_panels<MOST, 1>(m, next, end, x + row * x_stride, scale + row, to, y_stride);
    }
    for (; row < rows; row++) {
      real* to = y + size_t(row) * y_stride;
      int next = multiply_int8_panels<1, STEP>(m, panel, end, x + row * x_stride, scale + row, to, y_stride);
      multiply_int8_panels<1, 1>(m, next, end, x + row * x_stride, scale + row, to, y_stride);
    }
  }
}

// The sums of the last, incomplete 16 lanes: lanes beyond `count` are `rest`.
inline Vector load_some(const real* x, int count, real rest) {
  real lane[LANES];
  for (int i = 0; i < LANES; i++) lane[i] = i < count ? x[i] : rest;
  return load(lane);
}

void quantize(const real* x, int x_stride, int rows, int width, int8_t* out, float* scale) {
  const int size = (width + 3) / 4 * 4;
  for (int r = 0; r < rows; r++, x += x_stride, out += size) {
    Vector top = splat(0);
    for (int i = 0; i < width; i += LANES) {
      Vector v = width - i >= LANES ? load(x + i) : load_some(x + i, width - i, 0);
      top = larger(top, larger(v, splat(0) - v));
    }
    const real highest = maximum(top);
    scale[r] = float(highest / 127);
    const real factor = highest > 0 ? 127 / highest : 0;
    constexpr real SHIFTER = sizeof(real) == 4 ? real(12582912.0) : real(6755399441055744.0);  // rounds to nearest even
    for (int i = 0; i < width; i += LANES) {
      const Vector v = width - i >= LANES ? load(x + i) : load_some(x + i, width - i, 0);
      real rounded[LANES];
      store(rounded, v * splat(factor) + splat(SHIFTER) - splat(SHIFTER));
      int8_t lane[LANES];
      for (int j = 0; j < LANES; j++) lane[j] = int8_t(int(rounded[j]) - SHIFT);
      memcpy(out + i, lane, size_t(size - i < LANES ? size - i : LANES));
    }
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
    case RELU: return larger(x, splat(0));
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

void add(real* x, const real* y, size_t count) {
  for (size_t i = 0; i < count; i++) x[i] = x[i] + y[i];
}

// Attention ----------------------------------------------------------------------------------------------------------

// Scores of whole blocks -> weights, whose sum is 1. Other keys than those of the query have the weight 0; without a
// visible key all weights are 0.
inline void softmax_keys(const Query& query, real* weights) {
  const int first_block = query.first / LANES, end_block = (query.end + LANES - 1) / LANES;
  Vector top = splat(LOWEST);
  for (int b = first_block; b < end_block; b++) {
    real* block = weights + b * LANES;
    for (int i = 0; i < LANES; i++) {
      const int key = b * LANES + i;
      if (key < query.first || key >= query.end)
        block[i] = LOWEST;
      else if (query.bias)
        block[i] = block[i] + query.bias[key];
    }
    top = larger(top, load(block));
  }
  const real most = maximum(top);
  const Vector highest = splat(most > LOWEST ? most : 0);
  Vector total = splat(0);
  for (int b = first_block; b < end_block; b++) {
    Vector weight = exp(load(weights + b * LANES) - highest);
    store(weights + b * LANES, weight);
    total = total + weight;
  }
  const Vector inverse = splat(most > LOWEST ? real(1) / sum(total) : 0);
  for (int b = first_block; b < end_block; b++) {
    Vector weight = load(weights + b * LANES) * inverse;
    store(weights + b * LANES, query.factor ? weight * load(query.factor + b * LANES) : weight);
  }
}

void attend_source(const Query& query, const Source& head, real* weights, real* out) {
  const int value_stride = padded(head.value_width);
  for (int i = 0; i < value_stride; i += LANES) store(out + i, splat(0));
  if (query.first >= query.end) return;
  const int first_block = query.first / LANES, end_block = (query.end + LANES - 1) / LANES;
  const real* q = query.query;
  for (int b = first_block; b < end_block; b++) {
    const real* keys = head.blocks[b] + head.offset;
    if (query.scores) {
      store(weights + b * LANES, load(query.scores + b * LANES));
      continue;
    }
    Vector part[4] = {splat(0), splat(0), splat(0), splat(0)};
    if (query.v) {
      for (int e = 0; e < head.width; e++)
        part[0] = part[0] + tanh(load(keys + e * LANES) + splat(q[e])) * splat(query.v[e]);
      store(weights + b * LANES, part[0]);
      continue;
    }
    int e = 0;
    for (; e + 4 <= head.width; e += 4)
      for (int i = 0; i < 4; i++) part[i] = part[i] + load(keys + (e + i) * LANES) * splat(q[e + i]);
    for (; e < head.width; e++) part[0] = part[0] + load(keys + e * LANES) * splat(q[e]);
    store(weights + b * LANES, ((part[0] + part[1]) + (part[2] + part[3])) * splat(query.scale));
  }
  softmax_keys(query, weights);
  for (int b = first_block; b < end_block; b++) {
    const real* values = head.blocks[b] + head.offset + head.width * LANES;
    const int from = b * LANES < query.first ? query.first - b * LANES : 0;
    const int to = query.end - b * LANES < LANES ? query.end - b * LANES : LANES;
    for (int i = 0; i < value_stride; i += LANES) {
      Vector mixed = load(out + i);
      for (int s = from; s < to; s++)
        mixed = mixed + load(values + s * value_stride + i) * splat(weights[b * LANES + s]);
      store(out + i, mixed);
    }
  }
}

void attend_path(const Query& query, const Path& head, real* weights, real* out) {
  const int key_stride = padded(head.width), value_stride = padded(head.value_width);
  for (int s = query.first; s < query.end; s++) {
    const real* key = head.nodes + size_t(head.tokens[s]) * head.stride;
    if (query.scores) {
      weights[s] = query.scores[s];
      continue;
    }
    Vector total = splat(0);
    for (int e = 0; e < key_stride; e += LANES) {
      Vector k = load(key + e), q = load(query.query + e);
      total = total + (query.v ? tanh(k + q) * load(query.v + e) : k * q);
    }
    weights[s] = query.v ? sum(total) : sum(total) * query.scale;
  }
  softmax_keys(query, weights);
  for (int i = 0; i < value_stride; i += LANES) {
    Vector mixed = splat(0);
    for (int s = query.first; s < query.end; s++)
      mixed = mixed + load(head.nodes + size_t(head.tokens[s]) * head.stride + key_stride + i) * splat(weights[s]);
    store(out + i, mixed);
  }
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
    Vector kept = forget * load(cell + i) + in * fresh;
    store(cell + i, kept);
    store(state + i, out * tanh(kept));
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

const Kernels rn::RN_KERNELS = {RN_NAME, multiply,      multiply_int8, quantize, normalize, activate,
                                add,     attend_source, attend_path,   gru,      lstm,      log_softmax,
                                top};
