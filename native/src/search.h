// Greedy and beam search over a model. Defined as in regard's decode/search.py; equal to it except for rounding.
#pragma once

#include "model.h"

namespace rn {

struct Options {
  int32_t beam = 1;
  int32_t keep = 1;  // outputs per input
  int32_t exact = 0;
  int32_t open_end = 0;  // a continuation stops at its limit without an end token
  int32_t sentences = 32;  // decoded at the same time
  int32_t blocked_count = 0;
  int32_t after_prefix_count = 0;
  int32_t no_repeat = 0;  // no sequence of this many tokens occurs twice; 0: no limit
  int32_t sample = 0;     // `beam` and `keep` are 1 then
  int32_t top_k = 0;      // 0: all
  double length_penalty = 1;
  double repetition_penalty = 1;
  double temperature = 1, top_p = 1, min_p = 0;
  const int32_t* blocked = nullptr;       // tokens that are never produced
  const int32_t* after_prefix = nullptr;  // tokens that do not follow a prefix directly
};

// Sources in token ids, one after the other; `source_end` is where each ends. Prefixes likewise.
struct Inputs {
  int32_t count = 0;
  const int32_t* sources = nullptr;
  const int64_t* source_end = nullptr;
  const int32_t* prefixes = nullptr;
  const int64_t* prefix_end = nullptr;
  const int32_t* limits = nullptr;    // most output tokens, the end token not counted
  const int32_t* minimums = nullptr;  // fewest
  const float* noise = nullptr;       // of samples: a number from 0 to 1 for each token of each input
  int32_t noise_stride = 0;

  const int32_t* source(int i) const { return sources + (i ? source_end[i - 1] : 0); }
  int source_length(int i) const { return int(source_end[i] - (i ? source_end[i - 1] : 0)); }
  const int32_t* prefix(int i) const { return prefixes + (i ? prefix_end[i - 1] : 0); }
  int prefix_length(int i) const { return int(prefix_end[i] - (i ? prefix_end[i - 1] : 0)); }
};

// An output of an input, best first. Its ids and their scores begin at `first` in the arrays of `Results`.
struct Output {
  int64_t first;
  int32_t length;
  int32_t limited;  // whether it ended at the limit
  double value;     // by which it was ranked
};

struct Results {
  int32_t* counts = nullptr;  // outputs of each input
  Output* outputs = nullptr;  // `keep` for each input
  int32_t* ids = nullptr;
  real* scores = nullptr;
};

enum Status { DONE, OUT_OF_MEMORY, NOT_NUMBERS, INVALID };

// Whether ids, lengths and limits are those of a model, and not too large. `positions` is the number that an output needs
// in addition to those of its tokens.
bool valid(const Model& model, const Options& options, const Inputs& inputs, int positions);

// The workspace holds the results until its next use.
Status search(const Model& model, const Options& options, const Inputs& inputs, Workspace* space, Results* results);

// What a forced pass returns; the caller owns the memory.
struct Forced {
  int32_t top_tokens = 0;
  int32_t blocked_count = 0;
  int32_t head_count = 0;
  const int32_t* blocked = nullptr;  // tokens that are never among the most probable ones
  const int32_t* heads = nullptr;    // cross-attention heads for alignments, each as layer and head
  real* scores = nullptr;            // the log-probability of each token of all outputs
  int32_t* top_ids = nullptr;        // the most probable tokens at each position; -1: none
  real* top_scores = nullptr;
  real* alignment = nullptr;  // of each pair: mean weights of the heads, [output tokens][source tokens], zero before
};

// Score the prefixes of `inputs`, which are whole outputs with the end token here.
Status score(const Model& model, const Inputs& inputs, Workspace* space, const Forced& forced);

}  // namespace rn
