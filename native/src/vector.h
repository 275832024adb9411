// Vectors of 16 lanes on every instruction set, and the functions that decide the bits of a result.
//
// A reduction always has 16 partial results, which are combined in a fixed order, however wide the registers are. The
// build forbids fused multiply-add, and `exp`, `log`, `sin` and `cos` are our own. So a result has the same bits on
// every machine.
#pragma once

#include <cstdint>
#include <cstring>

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

inline Register broadcast(real value) { return Register{} + value; }

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

inline Vector larger(const Vector& a, const Vector& b) {
  Vector out;
  RN_EACH out.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
  return out;
}

// `value` where `a` < `b`, else `other`.
inline Vector where_less(const Vector& a, const Vector& b, const Vector& value, const Vector& other) {
  Vector out;
  RN_EACH out.part[i] = a.part[i] < b.part[i] ? value.part[i] : other.part[i];
  return out;
}

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

// e^x by 2^n e^r with |r| <= ln(2) / 2. Below the smallest normal number: 0.
inline Vector exp(const Vector& x) {
#ifdef RN_DOUBLE
  constexpr real SHIFTER = 6755399441055744.0, LOWEST = -708.0, HIGHEST = 709.0;
  constexpr real LN2_HIGH = 6.93147180369123816490e-01, LN2_LOW = 1.90821492927058770002e-10;
  constexpr int MANTISSA = 52, DEGREE = 13;
#else
  constexpr real SHIFTER = 12582912.0f, LOWEST = -87.0f, HIGHEST = 88.0f;
  constexpr real LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
  constexpr int MANTISSA = 23, DEGREE = 7;
#endif
  constexpr real LOG2_E = real(1.4426950408889634);
  constexpr real FACTOR[14] = {1,
                               1,
                               real(1.0 / 2),
                               real(1.0 / 6),
                               real(1.0 / 24),
                               real(1.0 / 120),
                               real(1.0 / 720),
                               real(1.0 / 5040),
                               real(1.0 / 40320),
                               real(1.0 / 362880),
                               real(1.0 / 3628800),
                               real(1.0 / 39916800),
                               real(1.0 / 479001600),
                               real(1.0 / 6227020800)};
  Vector out;
  RN_EACH {
    Register value = x.part[i];
    Register inside = value < LOWEST ? broadcast(LOWEST) : value > HIGHEST ? broadcast(HIGHEST) : value;
    Register n = inside * LOG2_E + SHIFTER - SHIFTER;
    Register r = inside - n * LN2_HIGH;
    r = r - n * LN2_LOW;
    Register power = broadcast(FACTOR[DEGREE]);
    for (int k = DEGREE - 1; k >= 0; k--) power = power * r + FACTOR[k];
    WholeRegister exponent = __builtin_convertvector(n, WholeRegister) << MANTISSA;
    WholeRegister bits;
    memcpy(&bits, &power, sizeof bits);
    bits += exponent;
    memcpy(&power, &bits, sizeof power);
    out.part[i] = value < LOWEST ? broadcast(0) : power;
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
