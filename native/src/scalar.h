// Elementary functions of single numbers in double precision, with the same bits on every machine.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace rn {

// log(x) of a positive normal number.
static inline double natural_log(double x) {
  int64_t bits;
  memcpy(&bits, &x, sizeof bits);
  int64_t exponent = (bits >> 52) - 1023;
  bits = (bits & 0xFFFFFFFFFFFFFLL) | (1023LL << 52);
  double mantissa;
  memcpy(&mantissa, &bits, sizeof mantissa);
  if (mantissa > 1.4142135623730951) {
    mantissa = mantissa * 0.5;
    exponent = exponent + 1;
  }
  // 2 artanh(s) with s = (m - 1) / (m + 1)
  double s = (mantissa - 1.0) / (mantissa + 1.0);
  double square = s * s;
  double series = 0.0;
  for (int k = 23; k >= 1; k -= 2) series = series * square + 1.0 / k;
  double high = double(exponent) * 6.93147180369123816490e-01;
  double low = double(exponent) * 1.90821492927058770002e-10;
  return high + (2.0 * s * series + low);
}

// Replace each x by e^x, and by 0 below the smallest normal number. Several divide at the same time.
template <int COUNT>
static inline void exponentiate(double* x) {
  double n[COUNT], r[COUNT], power[COUNT];
  for (int i = 0; i < COUNT; i++) {
    const double inside = x[i] > -708.0 ? (x[i] > 709.0 ? 709.0 : x[i]) : -708.0;
    n[i] = std::floor(inside * 1.4426950408889634 + 0.5);
    r[i] = inside - n[i] * 6.93147180369123816490e-01;
    r[i] = r[i] - n[i] * 1.90821492927058770002e-10;
    power[i] = 1.0;
  }
  for (int k = 15; k >= 1; k--)
    for (int i = 0; i < COUNT; i++) power[i] = 1.0 + power[i] * r[i] / k;
  for (int i = 0; i < COUNT; i++) {
    const int64_t bits = (int64_t(n[i]) + 1023) << 52;
    double scale;
    memcpy(&scale, &bits, sizeof scale);
    x[i] = x[i] > -708.0 ? power[i] * scale : 0.0;
  }
}

static inline double exponential(double x) {
  exponentiate<1>(&x);
  return x;
}

// The sine and cosine of an angle of at most about 10^8.
static inline void sine_cosine(double x, double* sine, double* cosine) {
  double quarter = std::floor(x * 0.63661977236758134308 + 0.5);  // 2 / pi
  double r = x - quarter * 1.57079632673412561417e+00;            // pi / 2 in three parts
  r = r - quarter * 6.07710050630396597660e-11;
  r = r - quarter * 2.02226624879595063154e-21;
  double square = r * r;
  double s = 0.0, c = 0.0, factor = 1.0;
  double sine_terms[9], cosine_terms[9];
  for (int k = 0; k < 9; k++) {  // factor = (2k)!
    cosine_terms[k] = 1.0 / factor;
    factor = factor * (2 * k + 1);
    sine_terms[k] = 1.0 / factor;
    factor = factor * (2 * k + 2);
  }
  for (int k = 8; k >= 0; k--) {
    s = sine_terms[k] - square * s;
    c = cosine_terms[k] - square * c;
  }
  s = s * r;
  switch (int64_t(quarter) & 3) {
    case 0: *sine = s, *cosine = c; break;
    case 1: *sine = c, *cosine = -s; break;
    case 2: *sine = -s, *cosine = -c; break;
    default: *sine = -c, *cosine = s; break;
  }
}

}  // namespace rn
