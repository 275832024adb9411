// Checks of requests before memory is allocated.
#include "search.h"

namespace rn {

namespace {

constexpr int MAX_TOKENS = 1 << 20;  // of a source or an output
constexpr int MAX_BEAM = 1000;

bool outside(const int32_t* ids, int count, int vocab) {
  for (int i = 0; i < count; i++)
    if (ids[i] < 0 || ids[i] >= vocab) return true;
  return false;
}

const char* problem_of_models(const Ensemble& ensemble) {
  const Model& first = *ensemble.models[0];
  for (int m = 1; m < ensemble.count; m++) {
    const Model& model = *ensemble.models[m];
    if (model.target_vocab != first.target_vocab || model.eos != first.eos)
      return "the models of an ensemble have different target vocabularies";
    if (model.encoder.present != first.encoder.present)
      return "an ensemble cannot have models with and without encoders";
  }
  return nullptr;
}

const char* problem_of_source(const Model& model, const int32_t* source, int length, int positions) {
  const bool encodes = model.encoder.present;
  if (length < 1) return "a source is empty";
  if (length > MAX_TOKENS) return "a source has more than a million tokens";
  if (outside(source, length, encodes ? model.source_vocab : model.target_vocab))
    return "a token id of a source is outside the vocabulary";
  if (!encodes) positions += length - 1;
  if (model.decoder.position == LEARNED && positions > model.decoder.table_rows)
    return "the limit of an output is beyond the learned positions of the model";
  if (encodes && model.encoder.position == LEARNED && length > model.encoder.table_rows)
    return "a source is longer than the learned positions of the model";
  return nullptr;
}

const char* problem_of_options(const Options& o, const Inputs& inputs, int vocab) {
  if (o.beam < 1 || o.beam > MAX_BEAM || o.samples < 0 || o.samples > MAX_BEAM) return "the beam is not from 1 to 1000";
  if (inputs.count < 1 || o.keep < 1 || o.keep > MAX_BEAM || o.sentences < 1)
    return "the number of inputs or outputs is not positive, or above 1000";
  if (o.no_repeat < 0 || o.top_k < 0 || o.alternatives < 0 || o.top_tokens < 0) return "an option is negative";
  if (o.samples && (o.beam > 1 || o.keep != o.samples || !inputs.noise))
    return "sampling needs random numbers, and has no beam";
  if (o.alternatives && (o.beam > 1 || o.samples || o.keep != o.alternatives))
    return "alternatives at a position have no beam and no samples";
  return outside(o.blocked, o.blocked_count, vocab) ? "a blocked token id is outside the vocabulary" : nullptr;
}

}  // namespace

const char* problem_of(const Ensemble& ensemble, const Options& options, const Inputs& inputs, int positions) {
  const int vocab = ensemble.models[0]->target_vocab;
  const char* problem = problem_of_models(ensemble);
  if (!problem) problem = problem_of_options(options, inputs, vocab);
  for (int i = 0; !problem && i < inputs.count; i++) {
    const int prefix = inputs.prefix_length(i), limit = inputs.limits[i];
    const int excluded = Inputs::length(inputs.after_prefix_end, i);
    if (limit < 0 || limit > MAX_TOKENS) return "the limit of an output is negative, or above a million tokens";
    if (prefix < 0 || limit < prefix) return "a prefix is longer than the limit of its output";
    if (prefix && outside(inputs.prefix(i), prefix, vocab)) return "a token id of a prefix is outside the vocabulary";
    if (excluded && outside(inputs.after_prefix + Inputs::begin(inputs.after_prefix_end, i), excluded, vocab))
      return "a token id that may not follow a prefix is outside the vocabulary";
    if (options.samples && limit > inputs.noise_stride) return "there are fewer random numbers than tokens";
    if (const Phrases* phrases = inputs.phrases_of(i))
      if (phrases->stages < 0 || phrases->stages > MAX_BEAM) return "the stages of phrases are not from 0 to 1000";
    for (int m = 0; !problem && m < ensemble.count; m++) {
      if (int64_t(width_of(options, inputs, i)) * (limit + inputs.source_length(i, m) + 1) >= MAX_NODES)
        return "the product of the beam and the longest output is too large";
      const int length = inputs.source_length(i, m);
      problem = problem_of_source(*ensemble.models[m], inputs.source(i, m), length, limit + positions);
    }
  }
  return problem;
}

}  // namespace rn
