// Tables of positions: sinusoids, rotations, biases, and products with relative positions.
#include <new>

#include "model.h"
#include "scalar.h"

namespace rn {

bool Positions::require(const Stack& stack, int count) {
  const bool idle = memory_.size() > MAX_IDLE && count < length / 4;
  if (count <= length && !idle) return true;
  memory_.release();
  length = count < MIN_POSITIONS ? MIN_POSITIONS : count;
  if (fill(stack)) return true;
  length = 0;
  return false;
}

bool Positions::fill(const Stack& stack) {
  const int count = length;
  if (stack.position == SINUSOID || stack.position == SINUSOID_HALVES) {
    const int width = stack.width, stride = padded(width), half = (width + 1) / 2;
    added = memory_.take<real>(size_t(count) * stride);
    if (!added) return false;
    for (int p = 0; p < count; p++)
      for (int i = 0; i < half; i++) {
        double s, c;
        sine_cosine(double(real(p) * real(stack.rates[i])), &s, &c);
        const bool halves = stack.position == SINUSOID_HALVES;
        real* row = added + size_t(p) * stride;
        const int first = halves ? i : 2 * i, second = halves ? half + i : 2 * i + 1;
        row[first] = real(s);
        if (second < width) row[second] = real(c);
      }
  } else if (stack.position == ROTARY) {
    cosine = memory_.take<real>(size_t(count) * stack.rate_count);
    sine = memory_.take<real>(size_t(count) * stack.rate_count);
    if (!cosine || !sine) return false;
    for (int p = 0; p < count; p++)
      for (int i = 0; i < stack.rate_count; i++) {
        double s, c;
        sine_cosine(double(real(p) * real(stack.rates[i])), &s, &c);
        sine[size_t(p) * stack.rate_count + i] = real(s);
        cosine[size_t(p) * stack.rate_count + i] = real(c);
      }
  } else if (stack.position == ALIBI || stack.position == BUCKET) {
    bias = memory_.take<real>(size_t(stack.heads) * size_t(2 * count));
    if (!bias) return false;
    for (int h = 0; h < stack.heads; h++)
      for (int offset = 1 - count; offset < count; offset++) {
        const int distance = offset < 0 ? -offset : offset;
        const int near = offset < -stack.far ? -stack.far : offset > stack.far ? stack.far : offset;
        bias[size_t(h) * size_t(2 * count) + offset + count] =
            stack.position == ALIBI ? real(-(real(stack.slopes[h]) * real(distance)))
                                    : stack.table[size_t(stack.bucket[near + stack.far]) * stack.heads + h];
      }
  }
  return stack.position != RELATIVE || fill_places(stack);
}

// The vectors of all distances, as matrices that give the score of a query with each distance.
bool Positions::fill_places(const Stack& stack) {
  const int width = stack.width, half = (width + 1) / 2;
  real* sinusoids = memory_.take<real>(size_t(length) * size_t(width));
  if (!sinusoids) return false;
  for (int d = 0; d < length; d++)
    for (int i = 0; i < half; i++) {
      double s, c;
      sine_cosine(double(real(d) * real(stack.rates[i])), &s, &c);
      sinusoids[size_t(d) * width + i] = real(s);
      if (half + i < width) sinusoids[size_t(d) * width + half + i] = real(c);
    }
  places = memory_.take<Matrix>(size_t(stack.layers) * size_t(stack.heads));
  if (!places) return false;
  for (int i = 0; i < stack.layers; i++) {
    const Attention& a = stack.layer[i].attention;
    for (int h = 0; h < a.heads; h++) {
      Matrix* m = new (places + size_t(i) * stack.heads + h) Matrix();
      m->in = a.query_width;
      m->out = length;
      real* panels = memory_.take<real>(size_t(padded(length)) * size_t(m->in));
      if (!panels) return false;
      m->weight = panels;
      for (int d = 0; d < padded(length); d++)
        for (int e = 0; e < m->in; e++) {
          const real* weight = a.place_weight + size_t(h * m->in + e) * width;
          real sum = 0;
          for (int k = 0; d < length && k < width; k++) sum = sum + weight[k] * sinusoids[size_t(d) * width + k];
          panels[(size_t(d / LANE_COUNT) * m->in + e) * LANE_COUNT + d % LANE_COUNT] = sum;
        }
    }
  }
  return true;
}

}  // namespace rn
