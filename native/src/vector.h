// Vectors of 16 lanes on every instruction set, and the functions that decide the bits of a result.
//
// A reduction always has 16 partial results, which are combined in a fixed order, however wide the registers are. The
// build forbids fused multiply-add, and `exp`, `log`, `sin` and `cos` are our own. So a result has the same bits on
// every machine.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifdef RN_DOUBLE
typedef double real;
typedef int64_t whole;
#else
typedef float real;
typedef int32_t whole;
#endif

constexpr int LANES = 16;

#if defined(__AVX512F__)
constexpr int REGISTER_BYTES = 64;
#elif defined(__AVX2__)
constexpr int REGISTER_BYTES = 32;
#else
constexpr int REGISTER_BYTES = 16;
#endif
constexpr int WIDTH = REGISTER_BYTES / int(sizeof(real));  // lanes of a register
constexpr int REGISTERS = LANES / WIDTH;                   // that hold 16 lanes

typedef real Register __attribute__((vector_size(REGISTER_BYTES)));
typedef whole WholeRegister __attribute__((vector_size(REGISTER_BYTES)));

namespace {

inline Register load_register(const real* from) {
  Register out;
  memcpy(&out, from, sizeof out);
  return out;
}

inline void store_register(real* to, Register value) { memcpy(to, &value, sizeof value); }

inline Register broadcast(real value) { return value - Register{}; }  // x - 0 is x, also for -0

struct Vector {
  Register part[REGISTERS];
};

#define RN_EACH for (int i = 0; i < REGISTERS; i++)

inline Vector load(const real* from) {
  Vector out;
  RN_EACH out.part[i] = load_register(from + i * WIDTH);
  return out;
}

inline void store(real* to, const Vector& value) { RN_EACH store_register(to + i * WIDTH, value.part[i]); }

inline Vector splat(real value) {
  Vector out;
  RN_EACH out.part[i] = broadcast(value);
  return out;
}

inline Vector operator+(const Vector& a, const Vector& b) {
  Vector out;
  RN_EACH out.part[i] = a.part[i] + b.part[i];
  return out;
}

inline Vector operator-(const Vector& a, const Vector& b) {
  Vector out;
  RN_EACH out.part[i] = a.part[i] - b.part[i];
  return out;
}

inline Vector operator*(const Vector& a, const Vector& b) {
  Vector out;
  RN_EACH out.part[i] = a.part[i] * b.part[i];
  return out;
}

inline Vector operator/(const Vector& a, const Vector& b) {
  Vector out;
  RN_EACH out.part[i] = a.part[i] / b.part[i];
  return out;
}

// gcc makes a comparison and a selection of the general form.
#if defined(__AVX512F__) && !defined(RN_DOUBLE)
#define RN_LARGER(a, b) Register(_mm512_maskz_max_ps(0xFFFF, __m512(a), __m512(b)))
#define RN_SMALLER(a, b) Register(_mm512_maskz_min_ps(0xFFFF, __m512(a), __m512(b)))
#elif defined(__AVX2__) && !defined(RN_DOUBLE)
#define RN_LARGER(a, b) Register(_mm256_max_ps(__m256(a), __m256(b)))
#define RN_SMALLER(a, b) Register(_mm256_min_ps(__m256(a), __m256(b)))
#else
#define RN_LARGER(a, b) ((a) > (b) ? (a) : (b))
#define RN_SMALLER(a, b) ((a) < (b) ? (a) : (b))
#endif

inline Vector larger(const Vector& a, const Vector& b) {
  Vector out;
  RN_EACH out.part[i] = RN_LARGER(a.part[i], b.part[i]);
  return out;
}

inline Vector smaller(const Vector& a, const Vector& b) {
  Vector out;
  RN_EACH out.part[i] = RN_SMALLER(a.part[i], b.part[i]);
  return out;
}

inline Vector magnitude(const Vector& a) {
  Vector out;
  constexpr whole MASK = sizeof(real) == 4 ? whole(0x7FFFFFFF) : whole(0x7FFFFFFFFFFFFFFF);
  RN_EACH {
    WholeRegister bits;
    memcpy(&bits, &a.part[i], sizeof bits);
    bits &= MASK;
    memcpy(&out.part[i], &bits, sizeof bits);
  }
  return out;
}

// The lanes from `first` to `end` of `value`, and those of `other` in the rest.
inline Vector keep_lanes(const Vector& value, int first, int end, const Vector& other) {
  WholeRegister lane;
  for (int i = 0; i < WIDTH; i++) lane[i] = i;
  Vector out;
  RN_EACH {
    out.part[i] = lane >= first && lane < end ? value.part[i] : other.part[i];
    lane += WIDTH;
  }
  return out;
}

// `value` where `a` < `b`, else `other`.
inline Vector where_less(const Vector& a, const Vector& b, const Vector& value, const Vector& other) {
  Vector out;
  RN_EACH out.part[i] = a.part[i] < b.part[i] ? value.part[i] : other.part[i];
  return out;
}

// Reduce lanes i and i + 8, then i and i + 4, i + 2 and i + 1.
#if defined(__AVX2__) && !defined(RN_DOUBLE)
#define RN_REDUCE(name, combine)                                                                    \
  inline real name(const Vector& value) {                                                           \
    __m256 eight = _mm256_##combine##_ps(lower_half(value), upper_half(value));                     \
    __m128 four = _mm_##combine##_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)); \
    four = _mm_##combine##_ps(four, _mm_movehl_ps(four, four));                                     \
    return _mm_cvtss_f32(_mm_##combine##_ss(four, _mm_movehdup_ps(four)));                          \
  }
#if defined(__AVX512F__)
#define RN_LANES(a, b, which) _mm512_maskz_shuffle_f32x4(0xFFFF, a, b, which)
inline __m256 lower_half(const Vector& value) { return _mm512_maskz_extractf32x8_ps(0xFF, __m512(value.part[0]), 0); }
inline __m256 upper_half(const Vector& value) { return _mm512_maskz_extractf32x8_ps(0xFF, __m512(value.part[0]), 1); }
#else
inline __m256 lower_half(const Vector& value) { return __m256(value.part[0]); }
inline __m256 upper_half(const Vector& value) { return __m256(value.part[1]); }
#endif
RN_REDUCE(sum, add)
RN_REDUCE(maximum, max)
#else
inline real sum(const Vector& value) {
  real lane[LANES];
  store(lane, value);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lane[i] = lane[i] + lane[i + half];
  return lane[0];
}

inline real maximum(const Vector& value) {
  real lane[LANES];
  store(lane, value);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
  return lane[0];
}
#endif

// Replace each vector by the sum of its lanes, in all lanes.
template <int COUNT>
inline void sum_each(Vector* vectors) {
#if defined(__AVX512F__) && !defined(RN_DOUBLE)
  if (COUNT == 4) {
    const __m512 a = __m512(vectors[0].part[0]), b = __m512(vectors[1].part[0]);
    const __m512 c = __m512(vectors[2].part[0]), d = __m512(vectors[3].part[0]);
    const __m512 ab = _mm512_add_ps(RN_LANES(a, b, 0x44), RN_LANES(a, b, 0xEE));
    const __m512 cd = _mm512_add_ps(RN_LANES(c, d, 0x44), RN_LANES(c, d, 0xEE));
    __m512 all = _mm512_add_ps(RN_LANES(ab, cd, 0x88), RN_LANES(ab, cd, 0xDD));  // four lanes of each vector
    all = _mm512_add_ps(all, _mm512_maskz_permute_ps(0xFFFF, all, 0x4E));
    all = _mm512_add_ps(all, _mm512_maskz_permute_ps(0xFFFF, all, 0xB1));
    vectors[0].part[0] = Register(RN_LANES(all, all, 0x00));
    vectors[1].part[0] = Register(RN_LANES(all, all, 0x55));
    vectors[2].part[0] = Register(RN_LANES(all, all, 0xAA));
    vectors[3].part[0] = Register(RN_LANES(all, all, 0xFF));
    return;
  }
#endif
  for (int i = 0; i < COUNT; i++) vectors[i] = splat(sum(vectors[i]));
}

// e^x by 2^n e^r with |r| <= ln(2) / 2. Below the smallest normal number: 0.
inline Vector exp(const Vector& x) {
#ifdef RN_DOUBLE
  constexpr real SHIFTER = 6755399441055744.0, LOWEST = -708.0, HIGHEST = 709.0;
  constexpr real LN2_HIGH = 6.93147180369123816490e-01, LN2_LOW = 1.90821492927058770002e-10;
  constexpr int MANTISSA = 52;
#else
  constexpr real SHIFTER = 12582912.0f, LOWEST = -87.0f, HIGHEST = 88.0f;
  constexpr real LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
  constexpr int MANTISSA = 23;
#endif
  constexpr real LOG2_E = real(1.4426950408889634);
  const Vector inside = smaller(splat(HIGHEST), larger(splat(LOWEST), x));  // NaN stays NaN
  Vector out;
  RN_EACH {
    const Register n = inside.part[i] * LOG2_E + SHIFTER - SHIFTER;
    const Register r = inside.part[i] - n * LN2_HIGH - n * LN2_LOW;
#ifdef RN_DOUBLE
    Register power = broadcast(0);
    constexpr real FACTORIAL[14] = {1,    1,     2,      6,       24,       120,       720,
                                    5040, 40320, 362880, 3628800, 39916800, 479001600, 6227020800};
    for (int k = 13; k >= 0; k--) power = power * r + 1 / FACTORIAL[k];
#else
    const Register square = r * r;  // pairs of terms, so that fewer operations wait for each other
    const Register low = (r + 1) + (r * (1.0f / 6) + 0.5f) * square;
    const Register high = (r * (1.0f / 120) + 1.0f / 24) + (r * (1.0f / 5040) + 1.0f / 720) * square;
    Register power = low + high * (square * square);
#endif
    WholeRegister bits;
    memcpy(&bits, &power, sizeof bits);
    bits += __builtin_convertvector(n, WholeRegister) << MANTISSA;
    memcpy(&power, &bits, sizeof power);
    out.part[i] = x.part[i] < LOWEST ? broadcast(0) : power;
  }
  return out;
}

inline Vector tanh(const Vector& x) {
  Vector one = splat(1);
  return one - splat(2) / (exp(x + x) + one);
}

inline Vector sigmoid(const Vector& x) {
  Vector one = splat(1);
  return one / (one + exp(splat(0) - x));
}

}  // namespace
