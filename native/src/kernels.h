// The hot functions, compiled once for each instruction set. All compute the same bits.
//
// Functions in headers are static: the linker must not choose one that was compiled for another machine.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#ifdef RN_DOUBLE
typedef double real;
#else
typedef float real;
#endif

namespace rn {

constexpr int LANE_COUNT = 16;
constexpr real LOWEST = real(-INFINITY);

static inline int padded(int count) { return (count + LANE_COUNT - 1) / LANE_COUNT * LANE_COUNT; }

// A linear layer. Weights are in panels of 16 outputs: [panel][input][16], as int8 [panel][input / 4][16][4].
struct Matrix {
  int in = 0, out = 0;
  int groups = 0;                     // int8: groups of four inputs
  const real* weight = nullptr;       // or null, then int8
  const int8_t* quantized = nullptr;
  const float* scale = nullptr;       // of each output
  const int32_t* offset = nullptr;    // 128 times the sum of the weights of each output
  const real* bias = nullptr;         // or null
};

enum Activation { RELU, GELU, GELU_TANH, SILU, TANH };

// Keys and values of one head of an encoded source: blocks of 16 tokens, keys as [width][16], then values as
// [16][padded value width].
struct Source {
  const real* const* blocks;
  size_t offset;  // of this head in a block
  int width, value_width;
};

// Keys and values of one head of an output: a node per token, with the padded key and then the padded value. The
// tokens of a hypothesis are a path in a tree of nodes, so hypotheses share their beginning and nothing is copied.
struct Path {
  const real* nodes;  // of this head
  size_t stride;      // from node to node
  const int* tokens;  // the node of each token
  int width, value_width;
};

// A query of one head. Scores are scale * q . k, or v . tanh(q + k) with `v`, or given as `scores`.
struct Query {
  const real* query;
  const real* v;       // or null
  const real* scores;  // or null: one for each key
  const real* bias;    // or null: added to the score of each key
  const real* factor;  // or null: multiplies the weight of each key
  real scale;
  int first, end;  // of the keys
};

constexpr int MAX_HEADS = 4;  // that attend at once

struct Candidate {
  real value;
  int token;
};

struct Kernels {
  const char* name;
  // y = x W' + b. Rows of x and y are `x_stride` and `y_stride` apart; rows of y have space for whole panels.
  void (*multiply)(const Matrix& matrix, const real* x, int x_stride, int rows, real* y, int y_stride);
  void (*multiply_int8)(const Matrix& matrix, const int8_t* x, const float* scale, int rows, real* y, int y_stride);
  // Round each row to int8 with its own scale; the rest of a group of four inputs is zero.
  void (*quantize)(const real* x, int x_stride, int rows, int width, int8_t* out, float* scale);
  void (*normalize)(const real* x, int stride, int rows, int width, bool rms, real eps, const real* weight,
                    const real* bias, real* out);
  void (*activate)(Activation kind, const real* gate, real* x, size_t count);  // x = act(x), or act(gate) * x
  void (*add)(real* x, const real* y, size_t count);
  // Rotate pairs of elements of `count` vectors, `stride` apart.
  void (*rotate)(const real* cosine, const real* sine, int half, int count, int stride, real* x);
  // Attend from several heads to the same keys; with `v` or `scores`, from one. `weights` has space for MAX_HEADS times
  // all keys in whole blocks, `stride` apart. The outputs follow each other; `out` is written in whole vectors.
  void (*attend_source)(const Query* queries, const Source* heads, int count, real* weights, int stride, real* out);
  void (*attend_path)(const Query* queries, const Path* heads, int count, real* weights, int stride, real* out);
  // One step of a recurrent layer: gates of the input and of the state, each [gates][width] -> the new state, in place.
  void (*gru)(const real* input, const real* hidden, int width, int stride, real* state);
  void (*lstm)(const real* input, const real* hidden, int width, int stride, real* state, real* cell);
  // Turn logits into log-probabilities -> whether they are numbers.
  bool (*log_softmax)(real* x, int count);
  // The `count` highest values, in order; of equal values, the lowest token first -> how many there are.
  int (*top)(const real* x, int size, int count, Candidate* out);
};

extern const Kernels PORTABLE_KERNELS;
#if defined(__x86_64__)
extern const Kernels AVX2_KERNELS;
extern const Kernels AVX512_KERNELS;
#elif defined(__aarch64__)
extern const Kernels DOTPROD_KERNELS;
#endif

}  // namespace rn
