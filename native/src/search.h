// Greedy search, beam search and sampling with one model or an ensemble. Defined as in regard's decode/search.py; equal
// to it except for rounding.
#pragma once

#include "model.h"

namespace rn {

using Ensemble = RnEnsemble;
using Options = RnOptions;
using Phrases = RnPhrases;
using Output = RnOutput;
using Results = RnResults;
using Step = RnStep;
using Forced = RnForced;
using Status = RnStatus;

constexpr int64_t MAX_NODES = 1 << 29;  // tokens of all hypotheses that are decoded at the same time

// Add the logits of a model of an ensemble, with its weight, to the sum; the first model has written its own there.
static inline void combine(const Ensemble& ensemble, int member, const real* logits, size_t size, real* sum) {
  if (ensemble.count == 1) return;
  const real weight = real(ensemble.weights[member]);
  if (member == 0)
    for (size_t i = 0; i < size; i++) sum[i] = sum[i] * weight;
  else
    for (size_t i = 0; i < size; i++) sum[i] = sum[i] + logits[i] * weight;
}

// Inputs with access to their rows.
struct Inputs : RnInputs {
  explicit Inputs(const RnInputs& inputs) : RnInputs(inputs) {}
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

// The hypotheses of an input that are continued at the same time.
static inline int width_of(const Options& options, const Inputs& inputs, int i) {
  const Phrases* phrases = inputs.phrases_of(i);
  if (options.samples) return options.samples;
  if (options.alternatives) return 1;
  return options.beam + (phrases ? phrases->stages : 0);
}

// The problem with the options or inputs of a search, or null. `positions` is the number that an output needs in
// addition to those of its tokens.
const char* problem_of(const Ensemble& ensemble, const Options& options, const Inputs& inputs, int positions);

class Search;

// Prepare a search in the memory of the first workspace, which holds it and its results until its next use. The
// arguments must remain, but not the structure of `inputs`.
Status begin(const Ensemble& ensemble, const Options& options, const Inputs& inputs, Results* results, Search** search);

// Add one token to every hypothesis -> RN_RUNNING until all inputs are done.
Status advance(Search* search, Step* step);

Status search(const Ensemble& ensemble, const Options& options, const Inputs& inputs, Results* results);

// Score the prefixes of `inputs`, which are whole outputs with the end token here. Alignments are those of the first
// model.
Status score(const Ensemble& ensemble, const Inputs& inputs, const Forced& forced, const char** problem);

}  // namespace rn
