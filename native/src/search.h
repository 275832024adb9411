// Greedy search, beam search and sampling with one model or an ensemble. Defined as in regard's decode/search.py; equal
// to it except for rounding.
#pragma once

#include "model.h"

namespace rn {

// Models with one target vocabulary. Their logits are averaged with `weights`, which sum to 1. The workspaces are those
// of one thread; the first has the memory of the search, all have tables of positions.
struct Ensemble {
  int32_t count = 1;
  const Model* const* models = nullptr;
  Workspace* const* spaces = nullptr;
  const double* weights = nullptr;
};

// Add the logits of a model of an ensemble, with its weight, to the sum; the first model has written its own there.
static inline void combine(const Ensemble& ensemble, int member, const real* logits, size_t size, real* sum) {
  if (ensemble.count == 1) return;
  const real weight = real(ensemble.weights[member]);
  if (member == 0)
    for (size_t i = 0; i < size; i++) sum[i] = sum[i] * weight;
  else
    for (size_t i = 0; i < size; i++) sum[i] = sum[i] + logits[i] * weight;
}

struct Options {
  int32_t beam = 1;
  int32_t keep = 1;  // outputs per input
  int32_t exact = 0;
  int32_t sentences = 32;  // decoded at the same time, fewer if they need much memory
  int32_t blocked_count = 0;
  int32_t no_repeat = 0;     // no sequence of this many tokens occurs twice; 0: no limit
  int32_t samples = 0;       // per input, all kept; 0: no sampling
  int32_t top_k = 0;         // of samples; 0: all
  int32_t alternatives = 0;  // outputs are the prefix and each of this many best tokens after it; 0: complete outputs
  int32_t top_tokens = 0;    // most probable tokens to report after each step
  double length_penalty = 1;
  double repetition_penalty = 1;
  double temperature = 1, top_p = 1, min_p = 0;
  const int32_t* blocked = nullptr;  // tokens that are never produced
  int32_t (*cancelled)() = nullptr;  // asked before each step: other than 0 ends the search
};

// The automaton of required and forbidden phrases and of stop strings, over `states` and the target vocabulary. Tables
// are those of regard's decode/constraints.py.
struct Phrases {
  const int32_t* next = nullptr;  // [states][vocabulary]; null: no phrases
  const int16_t* met = nullptr;   // bits of the requirements that the token meets
  const uint8_t* ban = nullptr;
  const int16_t* stop = nullptr;  // or null: no stop strings
  const int16_t* need = nullptr;  // [subsets of requirements][states]: fewest tokens until the output may end
  int32_t states = 0, subsets = 0;
  int32_t stages = 0;  // of progress that a beam keeps apart, and by which it is wider
};

// Sources in token ids, one after the other, all of one model before those of the next; `source_end` is where each
// ends. Other lists of ids likewise, with one row per input. An array may be null if no input needs it.
struct Inputs {
  int32_t count = 0;
  const int32_t* sources = nullptr;
  const int64_t* source_end = nullptr;
  const int32_t* prefixes = nullptr;
  const int64_t* prefix_end = nullptr;
  const int32_t* limits = nullptr;        // most output tokens, the end token not counted
  const int32_t* minimums = nullptr;      // fewest
  const uint8_t* open_ends = nullptr;     // whether an output stops at its limit without an end token
  const int32_t* after_prefix = nullptr;  // tokens that do not follow the prefix directly
  const int64_t* after_prefix_end = nullptr;
  const float* noise = nullptr;  // a number from 0 to 1 for each token of each sample
  int32_t noise_stride = 0;
  const Phrases* phrases = nullptr;

  static int64_t begin(const int64_t* ends, int i) { return i ? ends[i - 1] : 0; }
  static int length(const int64_t* ends, int i) { return ends ? int(ends[i] - begin(ends, i)) : 0; }
  const int32_t* source(int i, int member = 0) const { return sources + begin(source_end, member * count + i); }
  int source_length(int i, int member = 0) const { return length(source_end, member * count + i); }
  const int32_t* prefix(int i) const { return prefixes + begin(prefix_end, i); }
  int prefix_length(int i) const { return length(prefix_end, i); }
  int minimum(int i) const { return minimums ? minimums[i] : 0; }
  bool open_end(int i) const { return open_ends && open_ends[i]; }
  const Phrases* phrases_of(int i) const { return phrases && phrases[i].next ? phrases + i : nullptr; }
};

// An output of an input, best first; samples in their order. Its ids and their scores begin at `first` in the arrays of
// `Results`.
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
  const char* problem = nullptr;  // of invalid inputs
};

// What one step has added to the first output of the first input, without a beam.
struct Step {
  int32_t token = -1;  // -1: the output has ended without a token
  int32_t top_count = 0;
  double score = 0;
  const int32_t* top_tokens = nullptr;  // the most probable ones of this step
  const double* top_scores = nullptr;
};

enum Status { DONE, OUT_OF_MEMORY, NOT_NUMBERS, INVALID, RUNNING, CANCELLED };

// What is wrong with the options or inputs of a search, or null. `positions` is the number that an output needs in
// addition to those of its tokens.
const char* problem_of(const Ensemble& ensemble, const Options& options, const Inputs& inputs, int positions);

class Search;

// Prepare a search in the memory of the first workspace, which holds it and its results until its next use. `ensemble`,
// `options`, `inputs` and `results` must remain.
Status begin(const Ensemble& ensemble, const Options& options, const Inputs& inputs, Results* results, Search** search);

// Add one token to every hypothesis -> RUNNING until all inputs are done.
Status advance(Search* search, Step* step);

Status search(const Ensemble& ensemble, const Options& options, const Inputs& inputs, Results* results);

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

// Score the prefixes of `inputs`, which are whole outputs with the end token here. Alignments are those of the first model.
Status score(const Ensemble& ensemble, const Inputs& inputs, const Forced& forced, const char** problem);

}  // namespace rn
