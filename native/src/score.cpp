// Forced decoding: the log-probabilities of given outputs, the most probable tokens at each position, and alignments.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

#include "search.h"

namespace rn {

namespace {

constexpr int BATCH_ROWS = 256;  // tokens that pass through the layers together; a longer pair is a batch of its own
constexpr int BATCH_PAIRS = 64;
constexpr int CHUNK = 64;  // tokens whose logits are in memory

// A source and an output in a batch.
struct Pair {
  Encoded* source;
  int* path;         // nodes of the tokens that the decoder reads
  int start;         // of its states
  real* alignment;  // or null
};

// One model of an ensemble, which reads consecutive pairs together. Neighbours with the same source share its encoding
// or, without an encoder, the nodes of the prompt.
class Reader {
 public:
  Reader(const Ensemble& ensemble, int member, const Inputs& inputs)
      : model_(*ensemble.models[member]), member_(member), inputs_(inputs), arena_(&ensemble.spaces[0]->memory),
        source_positions_(ensemble.spaces[member]->source_positions),
        target_positions_(ensemble.spaces[member]->target_positions) {}

  // How many tokens pair `i` adds to a batch that begins at `first`.
  int source_rows(int first, int i) const { return encodes() && !repeats(first, i) ? source_length(i) : 0; }
  int target_rows(int first, int i) const { return length(i) - (repeats(first, i) ? prompt(i) : 0); }

  // Note the memory that a batch needs.
  void measure(int first, int end) {
    int source = 0, target = 0, blocks = 0, states = 0, path = 0;
    for (int i = first; i < end; i++) {
      const int own = source_rows(first, i);
      source += own;
      blocks += padded(own) / LANE_COUNT;
      target += target_rows(first, i);
      states += inputs_.prefix_length(i);
      path += length(i);
      longest_source_ = std::max(longest_source_, source_length(i));
      longest_path_ = std::max(longest_path_, length(i));
    }
    most_rows_ = std::max(most_rows_, std::max(source, target));
    most_nodes_ = std::max(most_nodes_, target);
    most_blocks_ = std::max(most_blocks_, blocks);
    most_states_ = std::max(most_states_, states);
    most_path_ = std::max(most_path_, path);
    most_pairs_ = std::max(most_pairs_, end - first);
  }

  bool reserve() {
    const size_t pairs = size_t(most_pairs_), blocks = size_t(most_blocks_);
    const size_t initial = model_.decoder.recurrent() ? model_.decoder.node_size : 0;
    rows_ = arena_->take<Row>(size_t(most_rows_));
    pairs_ = arena_->take<Pair>(pairs);
    paths_ = arena_->take<int>(size_t(most_path_));
    nodes_ = arena_->take<real>(size_t(most_nodes_) * model_.decoder.node_size);
    states_ = arena_->take<real>(size_t(most_states_) * padded(model_.decoder.width));
    real* encoder_memory = arena_->take<real>(blocks * model_.encoder.block_size);
    real* memory = arena_->take<real>(blocks * model_.decoder.block_size);
    encoder_blocks_ = arena_->take<real*>(blocks);
    blocks_ = arena_->take<real*>(blocks);
    sources_ = arena_->take<Encoded>(pairs);
    fresh_ = arena_->take<Encoded*>(pairs);
    real* initials = arena_->take<real>(pairs * initial);
    if (arena_->failed()) return false;
    for (size_t b = 0; b < blocks; b++) {
      blocks_[b] = memory + b * model_.decoder.block_size;
      encoder_blocks_[b] = encoder_memory + b * model_.encoder.block_size;
    }
    for (size_t p = 0; p < pairs; p++) {
      fresh_[p] = new (sources_ + p) Encoded();
      sources_[p].initial = initials + p * initial;
    }
    return (!encodes() || source_positions_.require(model_.encoder, longest_source_)) &&
           target_positions_.require(model_.decoder, longest_path_) &&
           space.reserve(model_, most_rows_, std::max(longest_source_, longest_path_), arena_);
  }

  // Read pairs -> the states that predict the tokens of all outputs. Alignments are added to `alignment`, if not null.
  const real* read(int first, int end, real* alignment) {
    int* path = paths_;
    int node = 0, start = 0, source = -1;
    for (int i = first; i < end; i++) {
      Pair& pair = pairs_[i - first];
      source += source_rows(first, i) > 0;
      pair = {sources_ + source, path, start, alignment};
      const int shared = length(i) - target_rows(first, i);
      for (int t = 0; t < length(i); t++) path[t] = t < shared ? pairs_[i - first - 1].path[t] : node++;
      path += length(i);
      start += inputs_.prefix_length(i);
      if (alignment) alignment += size_t(inputs_.prefix_length(i)) * source_length(i);
    }
    if (encodes()) encode(first, end);
    if (model_.decoder.recurrent())
      run_steps(first, end);
    else
      run_together(first, end);
    return states_;
  }

  Activations space;

 private:
  bool encodes() const { return model_.encoder.present; }
  const int32_t* source(int i) const { return inputs_.source(i, member_); }
  int source_length(int i) const { return inputs_.source_length(i, member_); }

  // Tokens that the decoder reads before the one that predicts the first token of the output.
  int prompt(int i) const { return encodes() ? 0 : source_length(i) - 1; }
  int length(int i) const { return prompt(i) + inputs_.prefix_length(i); }

  bool repeats(int first, int i) const {
    const int length = source_length(i);
    return i > first && length == source_length(i - 1) &&
           !memcmp(source(i), source(i - 1), sizeof(int32_t) * size_t(length));
  }

  void encode(int first, int end) {
    int rows = 0, blocks = 0, count = 0;
    for (int i = first; i < end; i++) {
      const int own = source_rows(first, i);
      if (!own) continue;
      for (int s = 0; s < own; s++)
        rows_[rows++] = {source(i)[s], s, encoder_blocks_ + blocks, own, nullptr, nullptr};
      sources_[count].blocks = blocks_ + blocks;
      sources_[count++].length = own;
      blocks += padded(own) / LANE_COUNT;
    }
    read_source(model_, source_positions_, rows_, rows, fresh_, count, &space);
  }

  // The input of the decoder at a position.
  Row row(int i, const Pair& pair, int position) const {
    const int32_t* target = inputs_.prefix(i);
    const int size = source_length(i);
    if (!encodes()) {
      const int token = position < size ? source(i)[position] : target[position - size];
      return {token, position, nullptr, 0, pair.path, nullptr};
    }
    const int token = position ? target[position - 1] : model_.start;
    real* attention = pair.alignment ? pair.alignment + size_t(position) * size : nullptr;
    return {token, position, pair.source->blocks, size, pair.path, pair.source->initial, attention};
  }

  // All tokens pass through the layers of a Transformer together.
  void run_together(int first, int end) {
    int rows = 0;
    for (int i = first; i < end; i++)
      for (int t = length(i) - target_rows(first, i); t < length(i); t++)
        rows_[rows++] = row(i, pairs_[i - first], t);
    run_decoder(model_, target_positions_, rows_, rows, nodes_, &space);
    const size_t width = size_t(padded(model_.decoder.width));
    rows = 0;
    for (int i = first; i < end; i++) {
      const size_t count = size_t(inputs_.prefix_length(i));
      rows += target_rows(first, i);
      memcpy(states_ + pairs_[i - first].start * width, space.x + (size_t(rows) - count) * width,
             sizeof(real) * count * width);
    }
  }

  // A recurrent decoder reads the next token of every output at each step.
  void run_steps(int first, int end) {
    const size_t width = size_t(padded(model_.decoder.width));
    for (int t = 0;; t++) {
      int rows = 0;
      for (int i = first; i < end; i++)
        if (t < length(i)) rows_[rows++] = row(i, pairs_[i - first], t);
      if (!rows) return;
      run_decoder(model_, target_positions_, rows_, rows, nodes_, &space);
      rows = 0;
      for (int i = first; i < end; i++)
        if (t < length(i))
          memcpy(states_ + size_t(pairs_[i - first].start + t) * width, space.x + width * size_t(rows++),
                 sizeof(real) * width);
    }
  }

  const Model& model_;
  const int member_;
  const Inputs& inputs_;
  Arena* arena_;
  Positions &source_positions_, &target_positions_;
  int longest_source_ = 1, longest_path_ = 1;
  int most_rows_ = 1, most_nodes_ = 0, most_blocks_ = 0, most_states_ = 0, most_path_ = 0, most_pairs_ = 0;
  Row* rows_ = nullptr;
  Pair* pairs_ = nullptr;
  int* paths_ = nullptr;
  real *nodes_ = nullptr, *states_ = nullptr;
  real **encoder_blocks_ = nullptr, **blocks_ = nullptr;
  Encoded* sources_ = nullptr;
  Encoded** fresh_ = nullptr;
};

class Scoring {
 public:
  Scoring(const Ensemble& ensemble, const Inputs& inputs, const Forced& forced)
      : ensemble_(ensemble), model_(*ensemble.models[0]), inputs_(inputs), arena_(&ensemble.spaces[0]->memory),
        forced_(forced) {}

  Status run() {
    if (!reserve()) return RN_OUT_OF_MEMORY;
    for (int h = 0; h < forced_.head_count; h++)
      watched_[h] = {&model_.decoder.layer[forced_.heads[2 * h]].cross, forced_.heads[2 * h + 1]};
    readers_[0].space.watched = watched_;
    readers_[0].space.watched_count = forced_.head_count;
    real* alignment = forced_.head_count ? forced_.alignment : nullptr;
    size_t done = 0;
    for (int first = 0, end; first < inputs_.count; first = end) {
      end = batch_end(first);
      const int tokens = int(inputs_.prefix_end[end - 1] - int64_t(done));
      for (int m = 0; m < ensemble_.count; m++) states_[m] = readers_[m].read(first, end, m ? nullptr : alignment);
      if (!predict_tokens(done, tokens)) return RN_NOT_NUMBERS;
      done += size_t(tokens);
      for (int i = first; alignment && i < end; i++)
        alignment += size_t(inputs_.prefix_length(i)) * inputs_.source_length(i);
    }
    return RN_DONE;
  }

 private:
  bool reserve() {
    const size_t count = size_t(ensemble_.count), logits = size_t(CHUNK) * padded(model_.target_vocab);
    readers_ = arena_->take<Reader>(count);
    states_ = arena_->take<const real*>(count);
    logits_ = arena_->take<real>(logits);
    other_logits_ = arena_->take<real>(count > 1 ? logits : 0);
    top_ = arena_->take<Candidate>(size_t(forced_.top_tokens) + 1);
    watched_ = arena_->take<Watched>(size_t(forced_.head_count) + 1);
    if (arena_->failed()) return false;
    for (int m = 0; m < ensemble_.count; m++) new (readers_ + m) Reader(ensemble_, m, inputs_);
    for (int first = 0, end; first < inputs_.count; first = end) {
      end = batch_end(first);
      for (int m = 0; m < ensemble_.count; m++) readers_[m].measure(first, end);
    }
    for (int m = 0; m < ensemble_.count; m++)
      if (!readers_[m].reserve()) return false;
    return true;
  }

  // The pair after the last one of a batch.
  int batch_end(int first) const {
    int end = inputs_.count;
    for (int m = 0; m < ensemble_.count; m++) {
      int source = 0, target = 0, i = first;
      for (; i < end && i < first + BATCH_PAIRS; i++) {
        source += readers_[m].source_rows(first, i);
        target += readers_[m].target_rows(first, i);
        if (i > first && std::max(source, target) > BATCH_ROWS) break;
      }
      end = i;
    }
    return end;
  }

  // Compare the predictions of the states with `count` tokens of the outputs, from token `done` on.
  bool predict_tokens(size_t done, int count) {
    const size_t vocab = size_t(padded(model_.target_vocab));
    for (int start = 0; start < count; start += CHUNK) {
      const int rows = std::min(CHUNK, count - start);
      for (int m = 0; m < ensemble_.count; m++) {
        const Model& model = *ensemble_.models[m];
        const size_t width = size_t(padded(model.decoder.width));
        memcpy(readers_[m].space.x, states_[m] + size_t(start) * width, sizeof(real) * size_t(rows) * width);
        predict(model, rows, &readers_[m].space, m ? other_logits_ : logits_);
        combine(ensemble_, m, other_logits_, size_t(rows) * vocab, logits_);
      }
      for (int r = 0; r < rows; r++) {
        real* logp = logits_ + size_t(r) * vocab;
        const size_t token = done + size_t(start + r);
        if (!model_.kernels->log_softmax(logp, model_.target_vocab)) return false;
        forced_.scores[token] = logp[inputs_.prefixes[token]];
        if (forced_.top_tokens) write_top(logp, token);
      }
    }
    return true;
  }

  void write_top(real* logp, size_t token) {
    const int most = forced_.top_tokens;
    for (int i = 0; i < forced_.blocked_count; i++) logp[forced_.blocked[i]] = LOWEST;
    const int count = model_.kernels->top(logp, model_.target_vocab, most, top_);
    for (int n = 0; n < most; n++) {
      const bool present = n < count && top_[n].value > LOWEST;
      forced_.top_ids[token * most + n] = present ? top_[n].token : -1;
      forced_.top_scores[token * most + n] = present ? top_[n].value : 0;
    }
  }

  const Ensemble& ensemble_;
  const Model& model_;  // the first one
  const Inputs& inputs_;
  Arena* arena_;
  const Forced& forced_;
  Reader* readers_ = nullptr;
  const real** states_ = nullptr;  // of each model
  real *logits_ = nullptr, *other_logits_ = nullptr;
  Candidate* top_ = nullptr;
  Watched* watched_ = nullptr;
};

const char* problem_of_request(const Model& model, const Forced& forced) {
  if (forced.top_tokens < 0 || forced.top_tokens > model.target_vocab || forced.head_count < 0)
    return "the number of tokens or heads is negative or above that of the model";
  for (int i = 0; i < forced.blocked_count; i++)
    if (forced.blocked[i] < 0 || forced.blocked[i] >= model.target_vocab)
      return "a blocked token id is outside the vocabulary";
  for (int h = 0; h < forced.head_count; h++) {
    const int layer = forced.heads[2 * h], head = forced.heads[2 * h + 1];
    const bool present = model.encoder.present && layer >= 0 && layer < model.decoder.layers && head >= 0 &&
                         head < model.decoder.layer[layer].cross.heads;
    if (!present) return "the model has no such cross-attention head";
  }
  return nullptr;
}

}  // namespace

Status score(const Ensemble& ensemble, const Inputs& inputs, const Forced& forced, const char** problem) {
  *problem = problem_of(ensemble, rn_default_options(), inputs, 0);
  if (!*problem) *problem = problem_of_request(*ensemble.models[0], forced);
  if (*problem) return RN_INVALID;
  ensemble.spaces[0]->memory.reset();
  return Scoring(ensemble, inputs, forced).run();
}

}  // namespace rn
