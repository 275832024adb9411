// Forced decoding: the log-probabilities of given outputs.
#include <algorithm>

#include "search.h"

namespace rn {

namespace {

// Forced decoding, one input at a time: all tokens of a target pass through the layers together.
class Scoring {
 public:
  Scoring(const Model& model, const Inputs& inputs, Workspace* space)
      : model_(model), inputs_(inputs), arena_(&space->memory), source_positions_(space->source_positions),
        target_positions_(space->target_positions) {}

  Status run(real* scores) {
    if (!reserve()) return OUT_OF_MEMORY;
    for (int i = 0; i < inputs_.count; i++) {
      if (!inputs_.prefix_length(i)) continue;
      if (!score_one(i, scores)) return NOT_NUMBERS;
      scores += inputs_.prefix_length(i);
    }
    return DONE;
  }

 private:
  bool reserve() {
    int source = 1, target = 1;
    for (int i = 0; i < inputs_.count; i++) {
      source = std::max(source, inputs_.source_length(i));
      target = std::max(target, inputs_.prefix_length(i));
    }
    const bool encodes = model_.encoder.present;
    const int length = target + (encodes ? 0 : source);
    const int blocks = encodes ? padded(source) / LANE_COUNT : 0, rows = std::max(source, length);
    rows_ = arena_->take<Row>(size_t(rows));
    path_ = arena_->take<int>(size_t(length));
    nodes_ = arena_->take<real>(size_t(length) * model_.decoder.node_size);
    logits_ = arena_->take<real>(size_t(CHUNK) * padded(model_.target_vocab));
    real* memory = arena_->take<real>(size_t(blocks) * (model_.encoder.block_size + model_.decoder.block_size));
    blocks_ = arena_->take<real*>(size_t(2 * blocks));
    encoded_.initial = arena_->take<real>(model_.decoder.recurrent() ? model_.decoder.node_size : 0);
    if (arena_->failed()) return false;
    for (int b = 0; b < blocks; b++) {
      blocks_[b] = memory + size_t(b) * model_.decoder.block_size;
      blocks_[blocks + b] = memory + size_t(blocks) * model_.decoder.block_size + size_t(b) * model_.encoder.block_size;
    }
    encoder_blocks_ = blocks_ + blocks;
    encoded_.blocks = blocks_;
    for (int i = 0; i < length; i++) path_[i] = i;
    return (!encodes || source_positions_.require(model_.encoder, source)) &&
           target_positions_.require(model_.decoder, length) && space_.reserve(model_, rows, rows, arena_);
  }

  bool score_one(int i, real* scores) {
    const int32_t *source = inputs_.source(i), *target = inputs_.prefix(i);
    const int sources = inputs_.source_length(i), targets = inputs_.prefix_length(i);
    int first = 0;  // the position that predicts the first token
    if (model_.encoder.present) {
      for (int s = 0; s < sources; s++) rows_[s] = {source[s], s, encoder_blocks_, sources, nullptr, nullptr};
      Encoded* encoded = &encoded_;
      encoded_.length = sources;
      read_source(model_, source_positions_, rows_, sources, &encoded, 1, &space_);
      for (int t = 0; t < targets; t++)
        rows_[t] = {t ? target[t - 1] : model_.start, t, encoded_.blocks, sources, path_, encoded_.initial};
    } else {
      first = sources - 1;
      for (int t = 0; t < first + targets; t++)
        rows_[t] = {t < sources ? source[t] : target[t - sources], t, nullptr, 0, path_, nullptr};
    }
    run_decoder(model_, target_positions_, rows_, first + targets, nodes_, &space_);
    real* states = space_.x;
    const int width = padded(model_.decoder.width), vocab = padded(model_.target_vocab);
    for (int start = 0; start < targets; start += CHUNK) {
      const int count = std::min(CHUNK, targets - start);
      space_.x = states + size_t(first + start) * width;
      predict(model_, count, &space_, logits_);
      space_.x = states;
      for (int t = 0; t < count; t++) {
        real* logp = logits_ + size_t(t) * vocab;
        if (!model_.kernels->log_softmax(logp, model_.target_vocab)) return false;
        scores[start + t] = logp[target[start + t]];
      }
    }
    return true;
  }

  static constexpr int CHUNK = 64;
  const Model& model_;
  const Inputs& inputs_;
  Arena* arena_;
  Positions &source_positions_, &target_positions_;
  Row* rows_ = nullptr;
  int* path_ = nullptr;
  real *nodes_ = nullptr, *logits_ = nullptr;
  real **blocks_ = nullptr, **encoder_blocks_ = nullptr;
  Encoded encoded_;
  Activations space_;
};

}  // namespace

Status score(const Model& model, const Inputs& inputs, Workspace* space, real* scores) {
  Options options;
  if (!valid(model, options, inputs)) return INVALID;
  space->memory.reset();
  return Scoring(model, inputs, space).run(scores);
}

}  // namespace rn
