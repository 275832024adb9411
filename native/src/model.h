// A model in memory: packed weights, and the forward pass of its encoder and decoder.
#pragma once

#include <cstdlib>

#include "../include/regard_native.h"
#include "kernels.h"

namespace rn {

constexpr size_t MAX_IDLE = size_t(1) << 25;  // bytes; above, memory is returned if less than a quarter is needed

// Memory that is freed together. A request that fails, or that would exceed the limit, returns null and is remembered.
class Arena {
 public:
  explicit Arena(uint64_t limit = uint64_t(1) << 50) : limit_(limit) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { release(); }

  template <typename T>
  T* take(size_t count) {
    return static_cast<T*>(take_bytes(count, sizeof(T)));
  }
  bool failed() const { return failed_; }
  size_t size() const { return total_; }
  // Return the memory to the system.
  void release();
  // Free the memory for reuse, in one piece.
  void reset();

 private:
  struct Block;
  void* take_bytes(size_t count, size_t size);
  Block* last_ = nullptr;
  uint64_t limit_;  // bytes
  size_t left_ = 0, total_ = 0, wanted_ = 0;
  bool failed_ = false;
};

struct Norm {
  const real* weight = nullptr;
  const real* bias = nullptr;
  bool present = false;
};

enum Score { DOT, GENERAL, COSINE, ADDITIVE, LOCATION };

// Attention of one kind in one layer. Matrices of scores are those of each head.
struct Attention {
  int heads = 0, kv_heads = 0;
  int query_width = 0, width = 0, value_width = 0;  // `width` is that of keys
  bool projects = true;                             // or the states themselves are queries, keys and values
  real scale = 1;
  int* kv_of_head = nullptr;
  int* head_number = nullptr;  // before pruning
  Matrix query, key_value, out;
  size_t offset = 0;  // in a block or node
  Norm norm;

  Score score = DOT;
  Matrix* query_score = nullptr;
  Matrix* key_score = nullptr;
  const real** v = nullptr;
  real* temperature = nullptr;

  int window = 0;  // largest distance from the centre; 0: none
  bool predicts_center = false;
  Matrix* center = nullptr;
  const real** center_v = nullptr;

  bool relative = false;
  int reach = 0;  // 0: no limit
  const real** content = nullptr;
  const real** place = nullptr;
  const real* place_weight = nullptr;  // [heads][width][stack width]

  size_t head_in_block() const { return size_t(LANE_COUNT) * size_t(width + padded(value_width)); }
  size_t head_in_node() const { return size_t(padded(width) + padded(value_width)); }
};

struct Layer {
  Attention attention, cross;
  Matrix up, gate, down;
  Norm feed_forward_norm;
  Matrix input[2], hidden[2];  // of a recurrent layer: gates, in both directions for an encoder
};

enum Mixer { ATTENTION, GRU, LSTM };
enum Position { NO_POSITION, SINUSOID, SINUSOID_HALVES, LEARNED, ROTARY, ALIBI, BUCKET, RELATIVE };

struct Stack {
  bool present = false;
  Mixer mixer = ATTENTION;
  int width = 0, layers = 0, feed_forward = 0, window = 0;  // window 0: none
  bool pre_norm = false, rms = false, gated = false, causal = false;
  real eps = 0;
  Activation activation = RELU;
  Position position = NO_POSITION;
  double* rates = nullptr;  // of sinusoids and rotation
  int rate_count = 0;
  const real* table = nullptr;  // learned positions, or numbers of buckets
  int table_rows = 0;
  double* slopes = nullptr;
  int* bucket = nullptr;  // by offset, from -far to far
  int far = 0, heads = 0;  // heads before pruning
  Norm embed_norm, final_norm;
  Layer* layer = nullptr;
  size_t block_size = 0;  // of an encoder: for one layer at a time; of a decoder: for the cross-attention of all layers
  size_t node_size = 0;   // of a decoder, for all layers
  bool feeds_input = false, attends_first = false;
  Matrix* bridge = nullptr;
  Matrix combine;

  bool recurrent() const { return mixer != ATTENTION; }
  int gates() const { return mixer == GRU ? 3 : 4; }
  int states() const { return mixer == GRU ? 1 : 2; }  // of a layer
};

struct Model {
  Arena memory;
  Stack encoder, decoder;
  const real* source_embedding = nullptr;
  const real* target_embedding = nullptr;
  int source_vocab = 0, target_vocab = 0, eos = 0, start = 0;
  real source_scale = 1, target_scale = 1;
  Matrix output;
  bool int8 = false;
  const Kernels* kernels = nullptr;
};

using Description = RnDescription;

// Read and pack a model -> null, or the problem with the description.
const char* read_model(const Description& description, bool int8, const Kernels* kernels, Model* model);

// The memory of this machine in bytes, which requests for batches may not exceed.
uint64_t memory_limit();

constexpr int MIN_POSITIONS = 128;  // in a table

// Tables of the positions of a stack, which grow when they are too short.
struct Positions {
  int length = 0;
  real* added = nullptr;   // [length][padded width]
  real* cosine = nullptr;  // [length][rates]
  real* sine = nullptr;
  real* bias = nullptr;    // [heads][2 length], by key position minus query position plus length
  Matrix* places = nullptr;  // [layers][heads], from a query to its score with each distance

  bool require(const Stack& stack, int count);

 private:
  bool fill(const Stack& stack);
  bool fill_places(const Stack& stack);
  Arena memory_{memory_limit()};
};

// The memory of one thread that searches with one model.
struct Workspace {
  Arena memory{memory_limit()};  // of the current batch
  Positions source_positions, target_positions;
};

// One token that passes through the layers of a stack.
struct Row {
  int token, position;
  real* const* blocks;  // of the source that an encoder reads, or that a decoder attends to
  int source_length;
  const int* path;      // of a decoder: the node of each token, this one included
  const real* initial;  // of a recurrent decoder: the state before the first token
  real* alignment = nullptr;  // or null: where the mean weights of the watched heads are added
};

// A head of cross-attention.
struct Watched {
  const Attention* attention;
  int head;
};

// Space for the activations of a number of rows.
struct Activations {
  real *x = nullptr, *normed = nullptr, *projected = nullptr, *mixed = nullptr, *up = nullptr, *gate = nullptr;
  int keys = 0;             // for which there is space
  real* weights = nullptr;  // of MAX_HEADS queries
  real *query = nullptr, *places = nullptr, *bias = nullptr, *factor = nullptr;  // of one query
  real *input = nullptr, *state = nullptr, *cell = nullptr;  // of recurrent layers
  real* finals = nullptr;  // of a recurrent encoder: [layers][padded width], of the current source
  int8_t* quantized = nullptr;
  float* scales = nullptr;
  const Watched* watched = nullptr;
  int watched_count = 0;

  bool reserve(const Model& model, int rows, int keys, Arena* arena);
};

// The encoded source for a decoder: keys and values in blocks, and the initial state of a recurrent decoder.
struct Encoded {
  real** blocks = nullptr;
  real* initial = nullptr;
  int length = 0;
};

// Read a source, and fill `encoded` from it.
void read_source(const Model& model, const Positions& positions, Row* rows, int count, Encoded* const* encoded,
                 int sources, Activations* space);

// Pass rows through the decoder -> the hidden states in `space->x`, padded(width) apart. Writes keys and values, or
// states, to `nodes`.
void run_decoder(const Model& model, const Positions& positions, const Row* rows, int count, real* nodes,
                 Activations* space);

// Logits of rows of `space->x`, padded(target_vocab) apart.
void predict(const Model& model, int rows, Activations* space, real* logits);

}  // namespace rn
