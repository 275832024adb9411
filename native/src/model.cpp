#include "model.h"

#include <climits>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <new>

#include "scalar.h"

namespace rn {

// Memory -------------------------------------------------------------------------------------------------------------

constexpr size_t ALIGNMENT = 64;
constexpr size_t MIN_BLOCK = size_t(1) << 16;
constexpr size_t MAX_BYTES = size_t(1) << 40;

struct Arena::Block {
  Block* before;
  char* first;
  char* next;
};

void* Arena::take_bytes(size_t count, size_t size) {
  if (failed_ || count > MAX_BYTES / size) {
    failed_ = true;
    return nullptr;
  }
  size_t bytes = (count * size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + ALIGNMENT;  // vectors may read beyond the end
  if (bytes > left_) {
    size_t body = bytes > MIN_BLOCK ? bytes : MIN_BLOCK;
    if (body < wanted_) body = wanted_;
    wanted_ = 0;
    void* memory = std::malloc(sizeof(Block) + body + ALIGNMENT);
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

void Arena::free_blocks() {
  while (last_) {
    Block* before = last_->before;
    std::free(last_);
    last_ = before;
  }
  left_ = total_ = 0;
}

void Arena::reset() {
  failed_ = false;
  if (last_ && !last_->before) {
    left_ = total_;
    last_->next = last_->first;
  } else if (last_) {
    const size_t size = total_;
    free_blocks();
    wanted_ = size;
  }
}

// Reading ------------------------------------------------------------------------------------------------------------

namespace {

constexpr int MAX_WIDTH = 1 << 20;
constexpr int MIN_POSITIONS = 128;  // in a table

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
    return description_.numbers[next_++];
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

  // The tensor with the next number, which must have `size` elements; null if there is none.
  const real* tensor(size_t size) {
    int index = integer(-1, INT_MAX);
    if (index < 0 || problem) return nullptr;
    if (size_t(index) >= description_.tensor_count || description_.sizes[index] < 0 ||
        size_t(description_.sizes[index]) != size) {
      fail("a tensor does not have the size that the model needs");
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

  const real* required(size_t size) {
    const real* out = tensor(size);
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

  Matrix matrix(int in, int out, bool quantize = true) {
    const real* weight = required(size_t(in) * size_t(out));
    const real* bias = tensor(size_t(out));
    return pack(weight, bias, in, out, quantize);
  }

  // Several layers with the same input as one matrix; their outputs follow each other.
  Matrix joined(int in, const int* outs, int count) {
    int total = 0;
    for (int i = 0; i < count; i++) total += outs[i];
    real* weight = take<real>(size_t(in) * size_t(total));
    real* bias = take<real>(size_t(total));
    bool biased = false;
    int done = 0;
    for (int i = 0; i < count && !problem; i++) {
      const real* w = required(size_t(in) * size_t(outs[i]));
      const real* b = tensor(size_t(outs[i]));
      if (problem) break;
      memcpy(weight + size_t(done) * in, w, sizeof(real) * in * outs[i]);
      for (int o = 0; o < outs[i]; o++) bias[done + o] = b ? b[o] : 0;
      biased = biased || b;
      done += outs[i];
    }
    return problem ? Matrix() : pack(weight, biased ? bias : nullptr, in, total, true);
  }

  // The gates of a recurrent layer, each padded to whole vectors.
  Matrix gates(int in, int width, int count) {
    const int stride = padded(width);
    const real* weight = required(size_t(in) * size_t(width * count));
    const real* bias = required(size_t(width * count));
    real* spread = take<real>(size_t(in) * size_t(stride * count));
    real* spread_bias = take<real>(size_t(stride * count));
    if (problem) return Matrix();
    for (int g = 0; g < count; g++)
      for (int o = 0; o < stride; o++) {
        real* row = spread + size_t(g * stride + o) * in;
        for (int k = 0; k < in; k++) row[k] = o < width ? weight[size_t(g * width + o) * in + k] : 0;
        spread_bias[g * stride + o] = o < width ? bias[g * width + o] : 0;
      }
    return pack(spread, spread_bias, in, stride * count, true);
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
    T* out = memory_->take<T>(count);
    if (!out) fail("not enough memory for the model");
    return out;
  }

  void fail(const char* what) {
    if (!problem) problem = what;
  }

  bool finished() const { return next_ == description_.count; }

 private:
  Matrix pack(const real* weight, const real* bias, int in, int out, bool quantize) {
    Matrix m;
    m.in = in;
    m.out = out;
    if (problem) return m;
    const int width = padded(out);
    m.bias = whole_vectors(bias, out);
    if (problem) return m;
    if (int8_ && quantize) {
      pack_int8(weight, &m);
      return m;
    }
    real* panels = take<real>(size_t(width) * size_t(in));
    if (!panels) return m;
    for (int o = 0; o < width; o++) {
      real* panel = panels + size_t(o / LANE_COUNT) * in * LANE_COUNT + o % LANE_COUNT;
      for (int k = 0; k < in; k++) panel[size_t(k) * LANE_COUNT] = o < out ? weight[size_t(o) * in + k] : 0;
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

  void pack_int8(const real* weight, Matrix* m) {
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
      const real* row = weight + size_t(o) * in;
      for (int k = 0; o < m->out && k < in; k++) {
        const float size = float(row[k] < 0 ? -row[k] : row[k]);
        if (size > highest) highest = size;
      }
      const double factor = highest > 0 ? 127.0 / double(highest) : 0.0;
      scale[o] = float(double(highest) / 127.0);
      int32_t total = 0;
      for (int k = 0; o < m->out && k < in; k++) {
        const double rounded = double(row[k]) * factor + 6755399441055744.0 - 6755399441055744.0;
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
    a->place_weight = reader->required(size_t(a->heads) * size_t(a->query_width) * size_t(stack_width));
  }
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
      for (int i = 0; !reader->problem && i < stack->rate_count; i++) stack->rates[i] = reader->number();
      if (stack->position != ROTARY && stack->rate_count < (stack->width + 1) / 2)
        reader->fail("too few rates of positions");
      break;
    case LEARNED:
      stack->table_rows = reader->integer(1, INT_MAX);
      stack->table = reader->required(size_t(stack->table_rows) * size_t(stack->width));
      break;
    case ALIBI:
      stack->slopes = reader->take<double>(size_t(stack->heads));
      for (int h = 0; !reader->problem && h < stack->heads; h++) stack->slopes[h] = reader->number();
      break;
    case BUCKET:
      stack->table_rows = reader->integer(1, 1 << 16);
      stack->table = reader->required(size_t(stack->table_rows) * size_t(stack->heads));
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
  if (stack.position == ROTARY && 2 * stack.rate_count != a.query_width)
    reader->fail("wrong number of rotation rates");
  const int outs[] = {a.heads * a.query_width, a.kv_heads * (a.width + a.value_width)};
  a.query = reader->joined(stack.width, outs, 2);
  a.out = reader->matrix(a.heads * a.value_width, stack.width);
  a.norm = reader->norm(stack.width);
  if (source_width) {
    Attention& c = layer->cross;
    read_attention(reader, stack.heads, stack.width, &c);
    if (reader->problem) return;
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
  if (model->encoder.present)
    model->source_embedding = reader.required(size_t(model->source_vocab) * size_t(model->encoder.width));
  model->target_embedding = reader.required(size_t(model->target_vocab) * size_t(model->decoder.width));
  model->output = reader.matrix(model->decoder.width, model->target_vocab);
  if (!reader.problem && !reader.finished()) reader.fail("the description of the model is too long");
  return reader.problem;
}

// Positions ----------------------------------------------------------------------------------------------------------

bool Positions::require(const Stack& stack, int count) {
  if (count <= length) return true;
  memory_.reset();
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
        double sine, cosine;
        sine_cosine(double(real(p) * real(stack.rates[i])), &sine, &cosine);
        const bool halves = stack.position == SINUSOID_HALVES;
        real* row = added + size_t(p) * stride;
        const int first = halves ? i : 2 * i, second = halves ? half + i : 2 * i + 1;
        row[first] = real(sine);
        if (second < width) row[second] = real(cosine);
      }
  } else if (stack.position == ROTARY) {
    this->cosine = memory_.take<real>(size_t(count) * stack.rate_count);
    this->sine = memory_.take<real>(size_t(count) * stack.rate_count);
    if (!this->cosine || !this->sine) return false;
    for (int p = 0; p < count; p++)
      for (int i = 0; i < stack.rate_count; i++) {
        double s, c;
        sine_cosine(double(real(p) * real(stack.rates[i])), &s, &c);
        this->sine[size_t(p) * stack.rate_count + i] = real(s);
        this->cosine[size_t(p) * stack.rate_count + i] = real(c);
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

// Layers -------------------------------------------------------------------------------------------------------------

namespace {

constexpr real LOWEST = real(-INFINITY);

int larger_of(int a, int b) { return a > b ? a : b; }

// Products of several matrices with the same rows, which are quantised once.
class Input {
 public:
  Input(const Model& model, const real* x, int stride, int rows, int width, Activations* space)
      : model_(model), x_(x), stride_(stride), rows_(rows), space_(space) {
    if (model.int8) model.kernels->quantize(x, stride, rows, width, space->quantized, space->scales);
  }
  void multiply(const Matrix& m, real* y, int y_stride) const {
    if (m.quantized)
      model_.kernels->multiply_int8(m, space_->quantized, space_->scales, rows_, y, y_stride);
    else
      model_.kernels->multiply(m, x_, stride_, rows_, y, y_stride);
  }

 private:
  const Model& model_;
  const real* x_;
  int stride_, rows_;
  Activations* space_;
};

void normalize(const Model& model, const Stack& stack, const Norm& norm, const real* x, int rows, real* out) {
  model.kernels->normalize(x, padded(stack.width), rows, stack.width, stack.rms, stack.eps, norm.weight, norm.bias,
                           out);
}

void rotate(const Positions& positions, int position, int width, real* x) {
  const int half = width / 2;
  const real* cosine = positions.cosine + size_t(position) * half;
  const real* sine = positions.sine + size_t(position) * half;
  for (int i = 0; i < half; i++) {
    const real a = x[i], b = x[i + half];
    x[i] = a * cosine[i] - b * sine[i];
    x[i + half] = b * cosine[i] + a * sine[i];
  }
}

// A vector of length 1 times `factor`.
void scale_to(const real* x, int width, real factor, real* out) {
  real squares = 0;
  for (int i = 0; i < width; i++) squares = squares + x[i] * x[i];
  const real length = std::sqrt(squares);
  const real scale = factor / (length > real(1e-12) ? length : real(1e-12));
  for (int i = 0; i < width; i++) out[i] = x[i] * scale;
}

// The key that is stored, in whole vectors.
const real* stored_key(const Model& model, const Attention& a, int head, const real* key, Activations* space) {
  if (a.score == ADDITIVE) {
    model.kernels->multiply(a.key_score[head], key, a.width, 1, space->query, padded(a.width));
    return space->query;
  }
  if (a.score == COSINE) {
    scale_to(key, a.width, 1, space->query);
    return space->query;
  }
  return key;
}

// Write the keys and values of one token of a source into its block.
void write_block(const Model& model, const Attention& a, const real* keys, int slot, real* block, Activations* space) {
  const int lane = slot % LANE_COUNT, value_stride = padded(a.value_width);
  const real* values = a.projects ? keys + a.kv_heads * a.width : keys;
  for (int g = 0; g < a.kv_heads; g++) {
    real* head = block + a.offset + g * a.head_in_block();
    const real* key = stored_key(model, a, g, keys + g * a.width, space);
    for (int e = 0; e < a.width; e++) head[e * LANE_COUNT + lane] = key[e];
    real* value = head + a.width * LANE_COUNT + lane * value_stride;
    for (int e = 0; e < value_stride; e++) value[e] = e < a.value_width ? values[g * a.value_width + e] : 0;
  }
}

// Write the keys and values of one token of an output into its node.
void write_node(const Model& model, const Attention& a, const real* keys, real* node, Activations* space) {
  const int key_stride = padded(a.width), value_stride = padded(a.value_width);
  const real* values = keys + a.kv_heads * a.width;
  for (int g = 0; g < a.kv_heads; g++) {
    real* head = node + a.offset + g * a.head_in_node();
    const real* key = stored_key(model, a, g, keys + g * a.width, space);
    for (int e = 0; e < key_stride; e++) head[e] = e < a.width ? key[e] : 0;
    for (int e = 0; e < value_stride; e++) head[key_stride + e] = e < a.value_width ? values[g * a.value_width + e] : 0;
  }
}

// Relative positions: q + u is compared with keys, and q + v with distances, whose scores are a bias.
void compare_places(const Model& model, const Attention& a, int h, const Matrix& places, int position, Query* query,
                    Activations* space) {
  const real* q = query->query;
  for (int e = 0; e < a.query_width; e++) space->state[e] = q[e] + a.place[h][e];
  Matrix near = places;  // the distances that occur
  near.out = position + 1;
  model.kernels->multiply(near, space->state, a.query_width, 1, space->places, padded(near.out));
  for (int s = query->first; s < query->end; s++) {
    const int distance = position - s;
    space->bias[s] = space->places[a.reach && distance > a.reach ? a.reach : distance] * a.scale;
  }
  query->bias = space->bias;
  for (int e = 0; e < padded(a.query_width); e++) space->state[e] = e < a.query_width ? q[e] + a.content[h][e] : 0;
  query->query = space->state;
}

// Local attention around a predicted position: keys outside of the window are hidden, the others are weighted.
void predict_center(const Model& model, const Attention& a, int h, Query* query, Activations* space) {
  model.kernels->multiply(a.center[h], query->query, a.query_width, 1, space->query, padded(a.query_width));
  model.kernels->activate(TANH, nullptr, space->query, size_t(padded(a.query_width)));
  real sum = 0;
  for (int e = 0; e < a.query_width; e++) sum = sum + space->query[e] * a.center_v[h][e];
  const real length = real(query->end - query->first);
  const real center = length * real(1.0 / (1.0 + exponential(-double(sum))));
  for (int s = query->first; s < query->end; s++) {
    const real offset = real(s) - center;
    const bool near = (offset < 0 ? -offset : offset) <= real(a.window);
    space->bias[s] = near ? 0 : LOWEST;
    space->factor[s] = real(exponential(-double(offset * offset / (real(a.window) * real(a.window) / 2))));
  }
  query->bias = space->bias;
  query->factor = space->factor;
}

// Apply the score function to a query of one head.
void transform_query(const Model& model, const Attention& a, int h, Query* query, Activations* space) {
  switch (a.score) {
    case GENERAL:
    case ADDITIVE:
      model.kernels->multiply(a.query_score[h], query->query, a.query_width, 1, space->query, padded(a.width));
      query->query = space->query;
      query->v = a.score == ADDITIVE ? a.v[h] : nullptr;
      break;
    case COSINE:
      scale_to(query->query, a.width, a.temperature[h], space->query);
      for (int e = a.width; e < padded(a.width); e++) space->query[e] = 0;
      query->query = space->query;
      break;
    case LOCATION: {
      const Matrix& m = a.query_score[h];
      model.kernels->multiply(m, query->query, a.query_width, 1, space->places, padded(m.out));
      for (int s = m.out; s < padded(query->end); s++) space->places[s] = LOWEST;
      query->scores = space->places;
      break;
    }
    default: break;
  }
}

Query make_query(const Model& model, const Attention& a, int h, const real* q, int first, int end, const real* bias,
                 Activations* space) {
  Query query = {q, nullptr, nullptr, bias, nullptr, a.scale, first, end};
  if (a.predicts_center) predict_center(model, a, h, &query, space);
  if (a.score != DOT) transform_query(model, a, h, &query, space);
  return query;
}

void attend_source(const Model& model, const Attention& a, const real* queries, const Row& row, int first, int end,
                   const real* bias, size_t bias_stride, Activations* space, real* out) {
  for (int h = 0; h < a.heads; h++) {
    const Source head = {row.blocks, a.offset + a.kv_of_head[h] * a.head_in_block(), a.width, a.value_width};
    const real* own = bias ? bias + a.head_number[h] * bias_stride : nullptr;
    const Query query = make_query(model, a, h, queries + h * a.query_width, first, end, own, space);
    model.kernels->attend_source(query, head, space->weights, out + h * a.value_width);
  }
}

void attend_path(const Model& model, const Stack& stack, int layer, const Positions& positions, const real* queries,
                 const Row& row, const real* nodes, int first, const real* bias, Activations* space, real* out) {
  const Attention& a = stack.layer[layer].attention;
  for (int h = 0; h < a.heads; h++) {
    const real* own_nodes = nodes + a.offset + a.kv_of_head[h] * a.head_in_node();
    const Path head = {own_nodes, stack.node_size, row.path, a.width, a.value_width};
    const real* own = bias ? bias + a.head_number[h] * size_t(2 * positions.length) : nullptr;
    Query query = {queries + h * a.query_width, nullptr, nullptr, own, nullptr, a.scale, first, row.position + 1};
    if (a.relative)
      compare_places(model, a, h, positions.places[size_t(layer) * stack.heads + h], row.position, &query, space);
    if (a.score != DOT) transform_query(model, a, h, &query, space);
    model.kernels->attend_path(query, head, space->weights, out + h * a.value_width);
  }
}

// x + f(norm(x)), or norm(x + f(x)): `begin` gives what f reads, `end` adds what it returns.
const real* begin_residual(const Model& model, const Stack& stack, const Norm& norm, int rows, Activations* space) {
  if (!stack.pre_norm) return space->x;
  normalize(model, stack, norm, space->x, rows, space->normed);
  return space->normed;
}

void end_residual(const Model& model, const Stack& stack, const Norm& norm, int rows, Activations* space) {
  model.kernels->add(space->x, space->normed, size_t(rows) * padded(stack.width));
  if (!stack.pre_norm) normalize(model, stack, norm, space->x, rows, space->x);
}

void self_attention(const Model& model, const Stack& stack, int layer, const Positions& positions, const Row* rows,
                    int count, real* nodes, Activations* space) {
  const Attention& a = stack.layer[layer].attention;
  const int width = padded(stack.width), projected = padded(a.query.out), mixed = a.heads * a.value_width;
  const real* x = begin_residual(model, stack, a.norm, count, space);
  Input(model, x, width, count, stack.width, space).multiply(a.query, space->projected, projected);
  for (int r = 0; r < count; r++) {
    const int position = rows[r].position;
    real* query = space->projected + size_t(r) * projected;
    real* keys = query + a.heads * a.query_width;
    if (stack.position == ROTARY) {
      for (int h = 0; h < a.heads; h++) rotate(positions, position, a.query_width, query + h * a.query_width);
      for (int g = 0; g < a.kv_heads; g++) rotate(positions, position, a.width, keys + g * a.width);
    }
    if (stack.causal)
      write_node(model, a, keys, nodes + size_t(rows[r].path[position]) * stack.node_size, space);
    else
      write_block(model, a, keys, position, rows[r].blocks[position / LANE_COUNT], space);
  }
  for (int r = 0; r < count; r++) {
    const int position = rows[r].position;
    const real* query = space->projected + size_t(r) * projected;
    real* out = space->mixed + size_t(r) * mixed;
    const real* bias = positions.bias ? positions.bias + positions.length - position : nullptr;
    const int first = stack.window && position > stack.window ? position - stack.window : 0;
    if (stack.causal) {
      attend_path(model, stack, layer, positions, query, rows[r], nodes, first, bias, space, out);
      continue;
    }
    int end = rows[r].source_length;
    if (stack.window && position < end - stack.window) end = position + stack.window + 1;
    attend_source(model, a, query, rows[r], first, end, bias, size_t(2 * positions.length), space, out);
  }
  Input(model, space->mixed, mixed, count, mixed, space).multiply(a.out, space->normed, width);
  end_residual(model, stack, a.norm, count, space);
}

// Attend to the source of each row, inside the window around its position if there is one.
void attend_sources(const Model& model, const Attention& a, const real* queries, int stride, const Row* rows,
                    int count, Activations* space, real* out, int out_stride) {
  for (int r = 0; r < count; r++) {
    int first = 0, end = rows[r].source_length;
    if (a.window && !a.predicts_center) {
      const int position = rows[r].position;
      if (position > a.window) first = position - a.window;
      if (position < end - a.window) end = position + a.window + 1;
      if (first > end) first = end;
    }
    attend_source(model, a, queries + size_t(r) * stride, rows[r], first, end, nullptr, 0, space,
                  out + size_t(r) * out_stride);
  }
}

void cross_attention(const Model& model, const Stack& stack, const Attention& a, const Row* rows, int count,
                     Activations* space) {
  const int width = padded(stack.width), projected = padded(a.query.out), mixed = a.heads * a.value_width;
  const real* x = begin_residual(model, stack, a.norm, count, space);
  Input(model, x, width, count, stack.width, space).multiply(a.query, space->projected, projected);
  attend_sources(model, a, space->projected, projected, rows, count, space, space->mixed, mixed);
  Input(model, space->mixed, mixed, count, mixed, space).multiply(a.out, space->normed, width);
  end_residual(model, stack, a.norm, count, space);
}

void feed_forward(const Model& model, const Stack& stack, const Layer& layer, int count, Activations* space) {
  const int width = padded(stack.width), hidden = padded(stack.feed_forward);
  const real* x = begin_residual(model, stack, layer.feed_forward_norm, count, space);
  const Input input(model, x, width, count, stack.width, space);
  input.multiply(layer.up, space->up, hidden);
  if (stack.gated) input.multiply(layer.gate, space->gate, hidden);
  model.kernels->activate(stack.activation, stack.gated ? space->gate : nullptr, space->up, size_t(count) * hidden);
  Input(model, space->up, hidden, count, stack.feed_forward, space).multiply(layer.down, space->normed, width);
  end_residual(model, stack, layer.feed_forward_norm, count, space);
}

void embed(const Model& model, const Stack& stack, const Positions& positions, const Row* rows, int count, real* x) {
  const real* table = stack.causal ? model.target_embedding : model.source_embedding;
  const real scale = stack.causal ? model.target_scale : model.source_scale;
  const int width = padded(stack.width);
  for (int r = 0; r < count; r++) {
    real* out = x + size_t(r) * width;
    const real* row = table + size_t(rows[r].token) * stack.width;
    for (int i = 0; i < stack.width; i++) out[i] = row[i] * scale;
    for (int i = stack.width; i < width; i++) out[i] = 0;
    const real* added = nullptr;
    if (stack.position == LEARNED)
      added = stack.table + size_t(rows[r].position) * stack.width;
    else if (positions.added)
      added = positions.added + size_t(rows[r].position) * width;
    for (int i = 0; added && i < stack.width; i++) out[i] = out[i] + added[i];
  }
}

void run_transformer(const Model& model, const Stack& stack, const Positions& positions, const Row* rows, int count,
                     real* nodes, Activations* space) {
  embed(model, stack, positions, rows, count, space->x);
  if (stack.embed_norm.present) normalize(model, stack, stack.embed_norm, space->x, count, space->x);
  for (int i = 0; i < stack.layers; i++) {
    const Layer& layer = stack.layer[i];
    self_attention(model, stack, i, positions, rows, count, nodes, space);
    if (layer.cross.heads) cross_attention(model, stack, layer.cross, rows, count, space);
    feed_forward(model, stack, layer, count, space);
  }
  if (stack.final_norm.present) normalize(model, stack, stack.final_norm, space->x, count, space->x);
}

// Recurrent stacks ---------------------------------------------------------------------------------------------------

void step_cell(const Model& model, const Stack& stack, const real* input, const real* hidden, int width, real* state,
               real* cell) {
  if (stack.mixer == GRU)
    model.kernels->gru(input, hidden, width, padded(width), state);
  else
    model.kernels->lstm(input, hidden, width, padded(width), state, cell);
}

// One direction of one layer over a source; `out` gets the state after each token.
void run_direction(const Model& model, const Stack& stack, const Layer& layer, int direction, int count,
                   Activations* space) {
  const int width = stack.width / 2, stride = padded(stack.width), gates = layer.input[direction].out;
  Input(model, space->x, stride, count, stack.width, space).multiply(layer.input[direction], space->projected, gates);
  for (int i = 0; i < padded(width); i++) space->state[i] = space->cell[i] = 0;
  for (int n = 0; n < count; n++) {
    const int t = direction ? count - 1 - n : n;
    Input(model, space->state, padded(width), 1, width, space).multiply(layer.hidden[direction], space->gate, gates);
    step_cell(model, stack, space->projected + size_t(t) * gates, space->gate, width, space->state, space->cell);
    memcpy(space->normed + size_t(t) * stride + direction * width, space->state, sizeof(real) * size_t(width));
  }
}

void run_recurrent_encoder(const Model& model, const Stack& stack, const Positions& positions, const Row* rows,
                           int count, Activations* space) {
  embed(model, stack, positions, rows, count, space->x);
  const int stride = padded(stack.width), half = stack.width / 2;
  for (int i = 0; i < stack.layers; i++) {
    for (int direction = 0; direction < 2; direction++)
      run_direction(model, stack, stack.layer[i], direction, count, space);
    for (int t = 0; t < count; t++) {
      real* x = space->x + size_t(t) * stride;
      memcpy(x, space->normed + size_t(t) * stride, sizeof(real) * size_t(stack.width));
    }
    real* last = space->finals + size_t(i) * stride;
    for (int e = 0; e < stride; e++) last[e] = 0;
    memcpy(last, space->x + size_t(count - 1) * stride, sizeof(real) * size_t(half));
    memcpy(last + half, space->x + half, sizeof(real) * size_t(half));
  }
}

// A step of a recurrent decoder for rows of different outputs.
void step_recurrent(const Model& model, const Stack& stack, const Row* rows, int count, real* nodes, real* x,
                    Activations* space) {
  const int stride = padded(stack.width), width = stack.width, gates = stack.gates() * stride;
  const int parts = 1 + int(stack.attends_first) + int(stack.feeds_input), states = stack.states();
  const Attention& a = stack.layer[stack.layers - 1].cross;
  auto before = [&](int r) {
    const int position = rows[r].position;
    return position ? nodes + size_t(rows[r].path[position - 1]) * stack.node_size : rows[r].initial;
  };
  const size_t top = size_t(stack.layers - 1) * states * stride, feeding = size_t(stack.layers) * states * stride;
  real* context = space->mixed;
  if (stack.attends_first) {
    for (int r = 0; r < count; r++) memcpy(space->up + size_t(r) * stride, before(r) + top, sizeof(real) * stride);
    attend_sources(model, a, space->up, stride, rows, count, space, context, stride);
  }
  const int in_stride = padded(parts * width);
  for (int r = 0; r < count; r++) {
    real* in = space->input + size_t(r) * in_stride;
    memcpy(in, x + size_t(r) * stride, sizeof(real) * size_t(width));
    if (stack.attends_first) memcpy(in + width, context + size_t(r) * stride, sizeof(real) * size_t(width));
    if (stack.feeds_input) memcpy(in + (parts - 1) * width, before(r) + feeding, sizeof(real) * size_t(width));
  }
  for (int i = 0; i < stack.layers; i++) {
    const real* input = i ? x : space->input;
    const Layer& layer = stack.layer[i];
    Input(model, input, i ? stride : in_stride, count, i ? width : parts * width, space)
        .multiply(layer.input[0], space->projected, gates);
    const size_t offset = size_t(i) * states * stride;
    for (int r = 0; r < count; r++)
      memcpy(space->normed + size_t(r) * stride, before(r) + offset, sizeof(real) * stride);
    Input(model, space->normed, stride, count, width, space).multiply(layer.hidden[0], space->gate, gates);
    for (int r = 0; r < count; r++) {
      real* node = nodes + size_t(rows[r].path[rows[r].position]) * stack.node_size + offset;
      memcpy(node, before(r) + offset, sizeof(real) * size_t(stride * states));
      step_cell(model, stack, space->projected + size_t(r) * gates, space->gate + size_t(r) * gates, width, node,
                node + stride);
      memcpy(x + size_t(r) * stride, node, sizeof(real) * stride);
    }
  }
  if (!stack.attends_first) attend_sources(model, a, x, stride, rows, count, space, context, stride);
  const int both = padded(2 * width);
  for (int r = 0; r < count; r++) {
    real* in = space->input + size_t(r) * both;
    memcpy(in, context + size_t(r) * stride, sizeof(real) * size_t(width));
    memcpy(in + width, x + size_t(r) * stride, sizeof(real) * size_t(width));
  }
  Input(model, space->input, both, count, 2 * width, space).multiply(stack.combine, x, stride);
  model.kernels->activate(TANH, nullptr, x, size_t(count) * stride);
  for (int r = 0; stack.feeds_input && r < count; r++) {
    real* node = nodes + size_t(rows[r].path[rows[r].position]) * stack.node_size;
    memcpy(node + feeding, x + size_t(r) * stride, sizeof(real) * stride);
  }
}

// Keys and values of an encoded source, and the initial state of a recurrent decoder.
void project_source(const Model& model, const real* states, Encoded* encoded, Activations* space) {
  const Stack& stack = model.decoder;
  const int stride = padded(model.encoder.width), length = encoded->length;
  const Input input(model, states, stride, length, model.encoder.width, space);
  for (int i = 0; i < stack.layers; i++) {
    const Attention& a = stack.layer[i].cross;
    if (!a.heads) continue;
    const int projected = a.projects ? padded(a.key_value.out) : stride;
    if (a.projects) input.multiply(a.key_value, space->projected, projected);
    const real* keys = a.projects ? space->projected : states;
    for (int s = 0; s < length; s++)
      write_block(model, a, keys + size_t(s) * projected, s, encoded->blocks[s / LANE_COUNT], space);
  }
  if (!stack.recurrent()) return;
  for (size_t i = 0; i < stack.node_size; i++) encoded->initial[i] = 0;
  const int finals = model.encoder.recurrent() ? model.encoder.layers : 1;
  for (int i = 0; i < stack.layers; i++) {
    const real* last = model.encoder.recurrent() ? space->finals + size_t(i < finals ? i : finals - 1) * stride : states;
    real* state = encoded->initial + size_t(i) * stack.states() * stride;
    Input(model, last, stride, 1, stack.width, space).multiply(stack.bridge[i], state, stride);
    model.kernels->activate(TANH, nullptr, state, size_t(stride));
  }
}

}  // namespace

bool Activations::reserve(const Model& model, int count, int keys, Arena* arena) {
  int width = 0, project = 0, mix = 0, hidden = 0, head = 0, table = padded(keys), layers = 1;
  for (const Stack* stack : {&model.encoder, &model.decoder}) {
    if (!stack->present) continue;
    const int stride = padded(stack->width);
    width = larger_of(width, stride);
    layers = larger_of(layers, stack->layers);
    hidden = larger_of(hidden, padded(stack->feed_forward));
    if (stack->recurrent()) {
      project = larger_of(project, stack->gates() * stride);
      hidden = larger_of(hidden, stack->gates() * stride);
      mix = larger_of(mix, stride);
      head = larger_of(head, stride);
    }
    for (int i = 0; i < stack->layers; i++)
      for (const Attention* a : {&stack->layer[i].attention, &stack->layer[i].cross}) {
        if (!a->heads) continue;
        project = larger_of(project, larger_of(padded(a->query.out), padded(a->key_value.out)));
        mix = larger_of(mix, padded(a->heads * a->value_width + padded(a->value_width)));
        head = larger_of(head, padded(larger_of(a->query_width, a->width)));
        if (a->score == LOCATION) table = larger_of(table, padded(a->query_score[0].out));
      }
  }
  const size_t n = size_t(count);
  table = larger_of(table, padded(MIN_POSITIONS));
  x = arena->take<real>(n * width);
  normed = arena->take<real>(n * width);
  projected = arena->take<real>(n * project);
  mixed = arena->take<real>(n * mix + LANE_COUNT);
  up = arena->take<real>(n * hidden);
  gate = arena->take<real>(n * hidden);
  for (real** each : {&weights, &places, &bias, &factor}) *each = arena->take<real>(size_t(table) + LANE_COUNT);
  for (real** each : {&query, &state, &cell}) *each = arena->take<real>(size_t(head) + LANE_COUNT);
  const bool recurrent = model.encoder.recurrent() || model.decoder.recurrent();
  input = arena->take<real>(recurrent ? n * 3 * width : 0);
  finals = arena->take<real>(recurrent ? size_t(layers) * width : 0);
  quantized = arena->take<int8_t>(n * (larger_of(larger_of(3 * width, mix), hidden) + 4));
  scales = arena->take<float>(n);
  if (arena->failed()) return false;
  for (size_t i = 0; i < size_t(table); i++) bias[i] = factor[i] = 0;
  return true;
}

void read_source(const Model& model, const Positions& positions, Row* rows, int count, Encoded* const* encoded,
                 int sources, Activations* space) {
  const Stack& stack = model.encoder;
  if (!stack.recurrent()) {
    run_transformer(model, stack, positions, rows, count, nullptr, space);
    const real* states = space->x;
    for (int i = 0; i < sources; i++) {
      project_source(model, states, encoded[i], space);
      states += size_t(encoded[i]->length) * padded(stack.width);
    }
    return;
  }
  for (int i = 0; i < sources; i++) {
    run_recurrent_encoder(model, stack, positions, rows, encoded[i]->length, space);
    project_source(model, space->x, encoded[i], space);
    rows += encoded[i]->length;
  }
}

void run_decoder(const Model& model, const Positions& positions, const Row* rows, int count, real* nodes,
                 Activations* space) {
  const Stack& stack = model.decoder;
  if (!stack.recurrent()) return run_transformer(model, stack, positions, rows, count, nodes, space);
  embed(model, stack, positions, rows, count, space->x);
  // The rows of one output follow each other.
  const int at_once = count > 1 && rows[0].path == rows[1].path ? 1 : count;
  for (int r = 0; r < count; r += at_once)
    step_recurrent(model, stack, rows + r, at_once, nodes, space->x + size_t(r) * padded(stack.width), space);
}

void predict(const Model& model, int rows, Activations* space, real* logits) {
  const int width = padded(model.decoder.width);
  Input(model, space->x, width, rows, model.decoder.width, space)
      .multiply(model.output, logits, padded(model.target_vocab));
}

}  // namespace rn
