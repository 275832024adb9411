#include "model.h"

#include <climits>
#include <cmath>
#include <cstring>
#include <new>

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

namespace rn {

// Memory -------------------------------------------------------------------------------------------------------------

constexpr size_t ALIGNMENT = 64;
constexpr size_t MIN_BLOCK = size_t(1) << 16;

static_assert(sizeof(size_t) == 8, "sizes of requests need 64 bits");

struct Arena::Block {
  Block* before;
  char* first;
  char* next;
};

void* Arena::take_bytes(size_t count, size_t size) {
  if (failed_ || count > limit_ / size) {
    failed_ = true;
    return nullptr;
  }
  size_t bytes = (count * size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + ALIGNMENT;  // vectors may read beyond the end
  if (bytes > left_) {
    size_t body = bytes > MIN_BLOCK ? bytes : MIN_BLOCK;
    if (body < wanted_) body = wanted_;
    wanted_ = 0;
    void* memory = total_ + body > limit_ ? nullptr : std::malloc(sizeof(Block) + body + ALIGNMENT);
    if (!memory) {
      failed_ = true;
      return nullptr;
    }
    Block* block = static_cast<Block*>(memory);
    block->before = last_;
    uintptr_t first = reinterpret_cast<uintptr_t>(memory) + sizeof(Block) + ALIGNMENT - 1;
    block->first = block->next = reinterpret_cast<char*>(first / ALIGNMENT * ALIGNMENT);
    last_ = block;
    left_ = body;
    total_ += body;
  }
  void* out = last_->next;
  last_->next += bytes;
  left_ -= bytes;
  return out;
}

void Arena::release() {
  while (last_) {
    Block* before = last_->before;
    std::free(last_);
    last_ = before;
  }
  left_ = total_ = wanted_ = 0;
  failed_ = false;
}

void Arena::reset() {
  const size_t size = total_, used = total_ - left_;
  if (size > MAX_IDLE && used < size / 4) {
    release();
  } else if (last_ && !last_->before) {
    left_ = total_;
    last_->next = last_->first;
    failed_ = false;
  } else if (last_) {
    release();
    wanted_ = size;
  }
}

uint64_t memory_limit() {
#if defined(_SC_PHYS_PAGES)
  const long pages = sysconf(_SC_PHYS_PAGES), page_size = sysconf(_SC_PAGESIZE);
  if (pages > 0 && page_size > 0) return uint64_t(pages) * uint64_t(page_size);
#endif
  return uint64_t(1) << 34;
}

// Reading ------------------------------------------------------------------------------------------------------------

namespace {

constexpr int MAX_WIDTH = 1 << 20;
constexpr int MAX_QUANTIZED = 1 << 17;  // inputs whose sum of int8 products fits into 32 bits
constexpr double MAX_NUMBER = 1e30;
constexpr int MAX_JOINED = 2;

bool finite(const float* x, size_t count) {
  uint32_t most = 0;
  for (size_t i = 0; i < count; i++) {
    uint32_t bits;
    memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7FFFFFFF;
    most = bits > most ? bits : most;
  }
  return most < 0x7F800000;
}

class Reader {
 public:
  Reader(const Description& description, bool int8, Model* model)
      : description_(description), int8_(int8), memory_(&model->memory) {}

  const char* problem = nullptr;

  double number() {
    if (next_ >= description_.count) {
      fail("the description of the model ends too early");
      return 0;
    }
    const double value = description_.numbers[next_++];
    if (value >= -MAX_NUMBER && value <= MAX_NUMBER) return value;
    fail("a number in the description of the model is not finite or too large");
    return 0;
  }

  // The angle per position of a sinusoid or rotation.
  double rate() {
    const double value = number();
    if (!(value >= 0 && value <= 1)) fail("a rate of positions is not between 0 and 1");
    return value;
  }

  int integer(int least, int most) {
    double value = number();
    if (!(value >= least && value <= most)) {
      fail("a number in the description of the model is out of range");
      return least;
    }
    return int(value);
  }

  bool flag() { return integer(0, 1) == 1; }

  // The tensor with the next number, which must have these sizes; null if there is none.
  const real* tensor(size_t rows, size_t columns = 1) {
    const size_t size = rows * columns;
    int index = integer(-1, INT_MAX);
    if (index < 0 || problem) return nullptr;
    if (size_t(index) >= description_.tensor_count || description_.sizes[index] < 0 ||
        size_t(description_.sizes[index]) != size || size_t(description_.rows[index]) != rows) {
      fail("a tensor does not have the size that the model needs");
      return nullptr;
    }
    if (!finite(description_.tensors[index], size)) {
      fail("some weights are not finite numbers; was training stable?");
      return nullptr;
    }
#ifdef RN_DOUBLE
    real* copy = take<real>(size);
    for (size_t i = 0; copy && i < size; i++) copy[i] = description_.tensors[index][i];
    return copy;
#else
    return description_.tensors[index];
#endif
  }

  // A copy of a tensor that is used as it is.
  const real* copy(const real* from, size_t size) {
    real* out = take<real>(size);
    if (out && from) memcpy(out, from, sizeof(real) * size);
    return out;
  }

  const real* required(size_t rows, size_t columns = 1) {
    const real* out = tensor(rows, columns);
    if (!out) fail("a tensor of the model is missing");
    return out;
  }

  Norm norm(int width) {
    Norm out;
    out.present = true;
    out.weight = whole_vectors(tensor(size_t(width)), width);
    out.bias = whole_vectors(tensor(size_t(width)), width);
    return out;
  }

  Matrix matrix(int in, int out, bool quantize = true) { return joined(in, &out, 1, quantize); }

  // Several layers with the same input as one matrix; their outputs follow each other.
  Matrix joined(int in, const int* outs, int count, bool quantize = true) {
    int total = 0;
    bool biased = false;
    const real *weights[MAX_JOINED], *biases[MAX_JOINED];
    for (int i = 0; i < count; i++) {
      weights[i] = required(size_t(outs[i]), size_t(in));
      biases[i] = tensor(size_t(outs[i]));
      biased = biased || biases[i];
      total += outs[i];
    }
    Outputs outputs = take_outputs(total);
    for (int i = 0, first = 0; i < count && !problem; first += outs[i++])
      fill_outputs(weights[i], biases[i], in, outs[i], first, &outputs);
    return pack(outputs, biased, in, quantize);
  }

  // The gates of a recurrent layer, each padded to whole vectors.
  Matrix gates(int in, int width, int count) {
    const real* weight = required(size_t(width * count), size_t(in));
    const real* bias = required(size_t(width * count));
    Outputs outputs = take_outputs(padded(width) * count);
    for (int g = 0; g < count && !problem; g++)
      fill_outputs(weight + size_t(g * width) * in, bias + g * width, in, width, g * padded(width), &outputs);
    return pack(outputs, true, in, true);
  }

  // A matrix of its own for each head, never in int8.
  Matrix* of_heads(int heads, int in, int out) {
    Matrix* matrices = take<Matrix>(size_t(heads));
    for (int h = 0; matrices && h < heads; h++) new (matrices + h) Matrix(matrix(in, out, false));
    return matrices;
  }

  const real** vectors_of_heads(int heads, int width) {
    const real** vectors = take<const real*>(size_t(heads));
    for (int h = 0; vectors && h < heads; h++) vectors[h] = whole_vectors(required(size_t(width)), width);
    return vectors;
  }

  template <typename T>
  T* take(size_t count) {
    T* out = problem ? nullptr : memory_->take<T>(count);
    if (!out) fail("not enough memory for the model");
    return out;
  }

  void fail(const char* what) {
    if (!problem) problem = what;
  }

  bool finished() const { return next_ == description_.count; }

 private:
  // The outputs of a matrix, in whole vectors: the weights of each, or null for zeros, and its bias.
  struct Outputs {
    int count;
    const real** weights;
    real* bias;
  };

  Outputs take_outputs(int count) {
    const size_t size = problem ? 0 : size_t(padded(count));
    Outputs outputs = {count, take<const real*>(size), take<real>(size)};
    for (size_t o = 0; !problem && o < size; o++) {
      outputs.weights[o] = nullptr;
      outputs.bias[o] = 0;
    }
    return outputs;
  }

  static void fill_outputs(const real* weight, const real* bias, int in, int count, int first, Outputs* outputs) {
    for (int o = 0; o < count; o++) {
      outputs->weights[first + o] = weight + size_t(o) * in;
      outputs->bias[first + o] = bias ? bias[o] : 0;
    }
  }

  Matrix pack(const Outputs& outputs, bool biased, int in, bool quantize) {
    Matrix m;
    m.in = in;
    m.out = outputs.count;
    if (int8_ && quantize && in > MAX_QUANTIZED) fail("a layer has too many inputs for int8");
    if (problem) return m;
    if (biased) m.bias = outputs.bias;
    if (int8_ && quantize) {
      pack_int8(outputs, &m);
      return m;
    }
    const int width = padded(m.out);
    real* panels = take<real>(size_t(width) * size_t(in));
    if (!panels) return m;
    for (int o = 0; o < width; o++) {
      const real* weights = outputs.weights[o];
      real* panel = panels + size_t(o / LANE_COUNT) * in * LANE_COUNT + o % LANE_COUNT;
      for (int k = 0; k < in; k++) panel[size_t(k) * LANE_COUNT] = weights ? weights[k] : 0;
    }
    m.weight = panels;
    return m;
  }

  // A copy that ends with a whole vector; null for null.
  const real* whole_vectors(const real* from, int count) {
    real* copy = from && !problem ? take<real>(size_t(padded(count))) : nullptr;
    for (int i = 0; copy && i < padded(count); i++) copy[i] = i < count ? from[i] : 0;
    return copy;
  }

  void pack_int8(const Outputs& outputs, Matrix* m) {
    const int width = padded(m->out), in = m->in;
    m->groups = (in + 3) / 4;
    const size_t panel = size_t(m->groups) * LANE_COUNT * 4;
    int8_t* quantized = take<int8_t>(panel * size_t(width / LANE_COUNT));
    float* scale = take<float>(size_t(width));
    int32_t* offset = take<int32_t>(size_t(width));
    if (problem) return;
    memset(quantized, 0, panel * size_t(width / LANE_COUNT));
    for (int o = 0; o < width; o++) {
      float highest = 0;
      const real* weights = outputs.weights[o];
      for (int k = 0; weights && k < in; k++) {
        const float size = float(weights[k] < 0 ? -weights[k] : weights[k]);
        if (size > highest) highest = size;
      }
      const double factor = highest > 0 ? 127.0 / double(highest) : 0.0;
      scale[o] = float(double(highest) / 127.0);
      int32_t total = 0;
      for (int k = 0; weights && k < in; k++) {
        const double rounded = double(weights[k]) * factor + 6755399441055744.0 - 6755399441055744.0;
        const int8_t value = int8_t(int(rounded));
        int8_t* group = quantized + size_t(o / LANE_COUNT) * panel + size_t(k / 4) * LANE_COUNT * 4;
        group[o % LANE_COUNT * 4 + k % 4] = value;
        total += value;
      }
      offset[o] = 128 * total;
    }
    m->quantized = quantized;
    m->scale = scale;
    m->offset = offset;
  }

  const Description& description_;
  size_t next_ = 0;
  bool int8_;
  Arena* memory_;
};

void read_attention(Reader* reader, int stack_heads, int stack_width, Attention* a) {
  a->heads = reader->integer(1, 1000);
  a->kv_heads = reader->integer(1, a->heads);
  a->query_width = reader->integer(1, MAX_WIDTH);
  a->width = reader->integer(1, MAX_WIDTH);
  a->value_width = reader->integer(1, MAX_WIDTH);
  a->projects = reader->flag();
  a->scale = real(reader->number());
  a->kv_of_head = reader->take<int>(size_t(a->heads));
  a->head_number = reader->take<int>(size_t(a->heads));
  if (reader->problem) return;
  for (int h = 0; h < a->heads; h++) a->kv_of_head[h] = reader->integer(0, a->kv_heads - 1);
  for (int h = 0; h < a->heads; h++) a->head_number[h] = reader->integer(0, stack_heads - 1);
  if (int64_t(a->heads) * (a->query_width + a->width + a->value_width) > MAX_WIDTH)
    return reader->fail("the heads are too wide");
  a->score = Score(reader->integer(DOT, LOCATION));
  if (a->score == GENERAL || a->score == ADDITIVE)
    a->query_score = reader->of_heads(a->heads, a->query_width, a->width);
  if (a->score == ADDITIVE) {
    a->key_score = reader->of_heads(a->kv_heads, a->width, a->width);
    a->v = reader->vectors_of_heads(a->heads, a->width);
  }
  if (a->score == LOCATION) a->query_score = reader->of_heads(a->heads, a->query_width, reader->integer(1, 1 << 20));
  if (a->score == COSINE) {
    a->temperature = reader->take<real>(size_t(a->heads));
    for (int h = 0; !reader->problem && h < a->heads; h++) a->temperature[h] = real(reader->number());
  }
  if (a->score != GENERAL && a->score != ADDITIVE && a->score != LOCATION && a->query_width != a->width)
    reader->fail("queries and keys have different widths");
  a->window = reader->integer(0, INT_MAX);
  a->predicts_center = reader->flag();
  if (a->predicts_center) {
    a->center = reader->of_heads(a->heads, a->query_width, a->query_width);
    a->center_v = reader->vectors_of_heads(a->heads, a->query_width);
  }
  a->relative = reader->flag();
  if (a->relative) {
    a->reach = reader->integer(0, INT_MAX);
    a->content = reader->vectors_of_heads(a->heads, a->query_width);
    a->place = reader->vectors_of_heads(a->heads, a->query_width);
    const size_t rows = size_t(a->heads) * size_t(a->query_width);
    a->place_weight = reader->copy(reader->required(rows, size_t(stack_width)), rows * size_t(stack_width));
  }
}

const real* read_table(Reader* reader, const Stack& stack, int columns) {
  const size_t rows = size_t(stack.table_rows), size = rows * size_t(columns);
  return reader->copy(reader->required(rows, size_t(columns)), size);
}

void read_position(Reader* reader, Stack* stack) {
  stack->position = Position(reader->integer(NO_POSITION, RELATIVE));
  switch (stack->position) {
    case SINUSOID:
    case SINUSOID_HALVES:
    case ROTARY:
    case RELATIVE:
      stack->rate_count = reader->integer(1, MAX_WIDTH);
      stack->rates = reader->take<double>(size_t(stack->rate_count));
      for (int i = 0; !reader->problem && i < stack->rate_count; i++) stack->rates[i] = reader->rate();
      if (stack->position != ROTARY && stack->rate_count < (stack->width + 1) / 2)
        reader->fail("too few rates of positions");
      break;
    case LEARNED:
      stack->table_rows = reader->integer(1, INT_MAX);
      stack->table = read_table(reader, *stack, stack->width);
      break;
    case ALIBI:
      stack->slopes = reader->take<double>(size_t(stack->heads));
      for (int h = 0; !reader->problem && h < stack->heads; h++) stack->slopes[h] = reader->number();
      break;
    case BUCKET:
      stack->table_rows = reader->integer(1, 1 << 16);
      stack->table = read_table(reader, *stack, stack->heads);
      stack->far = reader->integer(1, 1 << 16);
      stack->bucket = reader->take<int>(size_t(2 * stack->far + 1));
      for (int i = 0; !reader->problem && i <= 2 * stack->far; i++)
        stack->bucket[i] = reader->integer(0, stack->table_rows - 1);
      break;
    default: break;
  }
}

void read_layer(Reader* reader, const Stack& stack, int source_width, Layer* layer) {
  Attention& a = layer->attention;
  read_attention(reader, stack.heads, stack.width, &a);
  if (reader->problem) return;
  if (stack.position == ROTARY && (2 * stack.rate_count != a.query_width || a.width != a.query_width))
    reader->fail("wrong number of rotation rates");
  if (a.relative != (stack.position == RELATIVE) || (a.relative && !stack.causal))
    return reader->fail("relative positions are those of every layer of a decoder");
  if (!a.projects) return reader->fail("attention without projections is that of recurrent decoders");
  const int outs[] = {a.heads * a.query_width, a.kv_heads * (a.width + a.value_width)};
  a.query = reader->joined(stack.width, outs, 2);
  a.out = reader->matrix(a.heads * a.value_width, stack.width);
  a.norm = reader->norm(stack.width);
  if (source_width) {
    Attention& c = layer->cross;
    read_attention(reader, stack.heads, stack.width, &c);
    if (reader->problem) return;
    if (!c.projects || c.relative) return reader->fail("the cross-attention does not fit");
    c.query = reader->matrix(stack.width, c.heads * c.query_width);
    c.key_value = reader->matrix(source_width, c.kv_heads * (c.width + c.value_width));
    c.out = reader->matrix(c.heads * c.value_width, stack.width);
    c.norm = reader->norm(stack.width);
  }
  layer->up = reader->matrix(stack.width, stack.feed_forward);
  if (stack.gated) layer->gate = reader->matrix(stack.width, stack.feed_forward);
  layer->down = reader->matrix(stack.feed_forward, stack.width);
  layer->feed_forward_norm = reader->norm(stack.width);
}

// The sizes of keys and values: of one layer at a time in an encoder, of all layers in a decoder.
void place_layer(Stack* stack, Layer* layer) {
  Attention& a = layer->attention;
  if (stack->causal) {
    a.offset = stack->node_size;
    stack->node_size += a.head_in_node() * size_t(a.kv_heads);
    layer->cross.offset = stack->block_size;
    stack->block_size += layer->cross.head_in_block() * size_t(layer->cross.kv_heads);
  } else if (a.head_in_block() * size_t(a.kv_heads) > stack->block_size) {
    stack->block_size = a.head_in_block() * size_t(a.kv_heads);
  }
}

void read_recurrent(Reader* reader, int source_width, Stack* stack) {
  const int width = stack->width, directions = stack->causal ? 1 : 2;
  if (width % 2 || (stack->causal && source_width != width)) return reader->fail("the widths do not fit");
  stack->feeds_input = reader->flag();
  stack->attends_first = reader->flag();
  for (int i = 0; !reader->problem && i < stack->layers; i++) {
    Layer* layer = stack->layer + i;
    const int extra = i || !stack->causal ? 0 : (int(stack->feeds_input) + int(stack->attends_first)) * width;
    for (int d = 0; d < directions; d++) {
      layer->input[d] = reader->gates(width + extra, width / directions, stack->gates());
      layer->hidden[d] = reader->gates(width / directions, width / directions, stack->gates());
    }
  }
  if (!stack->causal || reader->problem) return;
  stack->node_size = size_t(padded(width)) * size_t(stack->layers * stack->states() + int(stack->feeds_input));
  Layer& top = stack->layer[stack->layers - 1];
  read_attention(reader, stack->heads, width, &top.cross);
  if (top.cross.heads != 1 || top.cross.projects || top.cross.query_width != width || top.cross.value_width != width)
    return reader->fail("the attention does not fit");
  stack->block_size = top.cross.head_in_block();
  stack->bridge = reader->take<Matrix>(size_t(stack->layers));
  for (int i = 0; !reader->problem && i < stack->layers; i++)
    new (stack->bridge + i) Matrix(reader->matrix(width, width));
  stack->combine = reader->matrix(2 * width, width);
}

void read_stack(Reader* reader, int source_width, Stack* stack) {
  stack->present = reader->flag();
  if (!stack->present) return;
  stack->mixer = Mixer(reader->integer(ATTENTION, LSTM));
  stack->width = reader->integer(1, MAX_WIDTH);
  stack->layers = reader->integer(1, 1000);
  stack->heads = reader->integer(1, 1000);
  stack->layer = reader->take<Layer>(size_t(stack->layers));
  for (int i = 0; !reader->problem && i < stack->layers; i++) new (stack->layer + i) Layer();
  if (reader->problem) return;
  if (stack->recurrent()) return read_recurrent(reader, source_width, stack);
  stack->feed_forward = reader->integer(1, MAX_WIDTH);
  stack->window = reader->integer(0, INT_MAX);
  stack->pre_norm = reader->flag();
  stack->rms = reader->flag();
  stack->eps = real(reader->number());
  stack->activation = Activation(reader->integer(RELU, TANH));
  stack->gated = reader->flag();
  read_position(reader, stack);
  if (reader->flag()) stack->embed_norm = reader->norm(stack->width);
  if (stack->pre_norm) stack->final_norm = reader->norm(stack->width);
  for (int i = 0; !reader->problem && i < stack->layers; i++) {
    read_layer(reader, *stack, source_width, stack->layer + i);
    place_layer(stack, stack->layer + i);
  }
}

}  // namespace

const char* read_model(const Description& description, bool int8, const Kernels* kernels, Model* model) {
  Reader reader(description, int8, model);
  model->int8 = int8;
  model->kernels = kernels;
  model->source_vocab = reader.integer(1, INT_MAX / 2);
  model->target_vocab = reader.integer(1, INT_MAX / 2);
  model->start = reader.integer(0, model->target_vocab - 1);
  model->eos = reader.integer(0, model->target_vocab - 1);
  model->source_scale = real(reader.number());
  model->target_scale = real(reader.number());
  read_stack(&reader, 0, &model->encoder);
  model->decoder.causal = true;
  read_stack(&reader, model->encoder.present ? model->encoder.width : 0, &model->decoder);
  if (!reader.problem && !model->decoder.present) reader.fail("a model without a decoder generates no text");
  if (!reader.problem && model->decoder.recurrent() && !model->encoder.present)
    reader.fail("a recurrent decoder needs an encoder");
  if (reader.problem) return reader.problem;
  const size_t source_vocab = size_t(model->source_vocab), target_vocab = size_t(model->target_vocab);
  const size_t source_width = size_t(model->encoder.width), target_width = size_t(model->decoder.width);
  const real* source = model->encoder.present ? reader.required(source_vocab, source_width) : nullptr;
  const real* target = reader.required(target_vocab, target_width);
  if (reader.problem) return reader.problem;
  model->target_embedding = reader.copy(target, target_vocab * target_width);
  model->source_embedding = model->target_embedding;
  if (source && source != target) model->source_embedding = reader.copy(source, source_vocab * source_width);
  model->output = reader.matrix(model->decoder.width, model->target_vocab);
  if (!reader.problem && !reader.finished()) reader.fail("the description of the model is too long");
  return reader.problem;
}

}  // namespace rn
