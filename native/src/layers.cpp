// The forward pass: Transformer layers, recurrent layers, attention with its scores, and the output layer.
#include <cmath>
#include <cstring>
#include <initializer_list>

#include "model.h"
#include "scalar.h"

namespace rn {

namespace {

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

void copy_padded(const real* x, int width, int stride, real* out) {
  memcpy(out, x, sizeof(real) * size_t(width));
  for (int e = width; e < stride; e++) out[e] = 0;
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
    copy_padded(values + g * a.value_width, a.value_width, value_stride, value);
  }
}

// Write the keys and values of one token of an output into its node.
void write_node(const Model& model, const Attention& a, const real* keys, real* node, Activations* space) {
  const int key_stride = padded(a.width), value_stride = padded(a.value_width);
  const real* values = keys + a.kv_heads * a.width;
  for (int g = 0; g < a.kv_heads; g++) {
    real* head = node + a.offset + g * a.head_in_node();
    const real* key = stored_key(model, a, g, keys + g * a.width, space);
    copy_padded(key, a.width, key_stride, head);
    copy_padded(values + g * a.value_width, a.value_width, value_stride, head + key_stride);
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

// Add the weights of the current query to the alignment if its head is watched.
void add_alignment(const Attention& a, int h, int first, int end, const Activations& space, real* alignment) {
  for (int i = 0; i < space.watched_count; i++)
    if (space.watched[i].attention == &a && space.watched[i].head == h)
      for (int s = first; s < end; s++) alignment[s] += space.weights[s] / real(space.watched_count);
}

// How many heads attend at once: several, unless their queries are made in the same memory.
int heads_at_once(const Attention& a) { return a.score == DOT && !a.predicts_center && !a.relative ? MAX_HEADS : 1; }

void attend_source(const Model& model, const Attention& a, const real* queries, const Row& row, int first, int end,
                   const real* bias, size_t bias_stride, Activations* space, real* out) {
  const int at_once = row.alignment ? 1 : heads_at_once(a);
  Query query[MAX_HEADS];
  Source head[MAX_HEADS];
  for (int h = 0; h < a.heads; h += at_once) {
    const int count = at_once < a.heads - h ? at_once : a.heads - h;
    for (int i = 0; i < count; i++) {
      head[i] = {row.blocks, a.offset + a.kv_of_head[h + i] * a.head_in_block(), a.width, a.value_width};
      const real* own = bias ? bias + a.head_number[h + i] * bias_stride : nullptr;
      query[i] = make_query(model, a, h + i, queries + (h + i) * a.query_width, first, end, own, space);
    }
    model.kernels->attend_source(query, head, count, space->weights, space->keys, out + h * a.value_width);
    if (row.alignment) add_alignment(a, h, first, end, *space, row.alignment);
  }
}

void attend_path(const Model& model, const Stack& stack, int layer, const Positions& positions, const real* queries,
                 const Row& row, const real* nodes, int first, const real* bias, Activations* space, real* out) {
  const Attention& a = stack.layer[layer].attention;
  const int at_once = heads_at_once(a);
  Query query[MAX_HEADS];
  Path head[MAX_HEADS];
  for (int h = 0; h < a.heads; h += at_once) {
    const int count = at_once < a.heads - h ? at_once : a.heads - h;
    for (int i = 0; i < count; i++) {
      const int n = h + i;
      head[i] = {nodes + a.offset + a.kv_of_head[n] * a.head_in_node(), stack.node_size, row.path, a.width,
                 a.value_width};
      const real* own = bias ? bias + a.head_number[n] * size_t(2 * positions.length) : nullptr;
      query[i] = {queries + n * a.query_width, nullptr, nullptr, own, nullptr, a.scale, first, row.position + 1};
      if (a.relative)
        compare_places(model, a, n, positions.places[size_t(layer) * stack.heads + n], row.position, query, space);
      if (a.score != DOT) transform_query(model, a, n, query, space);
    }
    model.kernels->attend_path(query, head, count, space->weights, space->keys, out + h * a.value_width);
  }
}

// x + f(norm(x)), or norm(x + f(x)): `begin` returns the input of f, `end` adds its output.
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
      const int half = stack.rate_count;
      const real* cosine = positions.cosine + size_t(position) * half;
      const real* sine = positions.sine + size_t(position) * half;
      model.kernels->rotate(cosine, sine, half, a.heads, a.query_width, query);
      model.kernels->rotate(cosine, sine, half, a.kv_heads, a.width, keys);
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
    const int layer = i < finals ? i : finals - 1;
    const real* last = model.encoder.recurrent() ? space->finals + size_t(layer) * stride : states;
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
  this->keys = table + LANE_COUNT;
  weights = arena->take<real>(size_t(this->keys) * MAX_HEADS);
  for (real** each : {&places, &bias, &factor}) *each = arena->take<real>(size_t(table) + LANE_COUNT);
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
  step_recurrent(model, stack, rows, count, nodes, space->x, space);
}

void predict(const Model& model, int rows, Activations* space, real* logits) {
  const int width = padded(model.decoder.width);
  Input(model, space->x, width, rows, model.decoder.width, space)
      .multiply(model.output, logits, padded(model.target_vocab));
}

}  // namespace rn
