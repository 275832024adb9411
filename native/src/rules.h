// Rules that steer a search. They change the values that rank tokens, never the reported scores.
#pragma once

#include "search.h"

namespace rn {

// The progress of a hypothesis in the automaton of its phrases.
struct Progress {
  int state = 0;
  int met = 0;             // subset of the requirements
  bool committed = false;  // to a phrase that it has begun
  bool stopped = false;
};

// The rules and the sampling of a search. The functions after `apply` are about the same hypothesis.
class Rules {
 public:
  Rules(const Model& model, const Options& options, const Inputs& inputs)
      : options_(options), inputs_(inputs), kernels_(model.kernels), vocab_(model.target_vocab), eos_(model.eos) {}

  bool reserve(int limit, Arena* arena);

  // Whether the rules need the tokens of a hypothesis, which are then written to `past`.
  bool needs_past(int step) const { return step > 0 && (options_.repetition_penalty > 1 || options_.no_repeat); }
  int* past() { return past_; }

  // Change the log-probabilities of the tokens after a hypothesis at `step` to the values that rank them.
  void apply(int input, int step, const Progress& progress, real* value);
  // The log-probability of a token.
  real score(int token) const { return token == eos_ ? end_score_ : scores_[token]; }
  // The best tokens but the end, of all kinds -> how many there are.
  int top(real* value, int count, Candidate* out);
  // The stage of a hypothesis after a token: 0 when all requirements are met.
  int stage(int token) const;
  Progress follow(int token) const;
  int sample(const real* value, real noise);

 private:
  void repeat_rules(real* value, int t);
  void length_rule(real* value, int t);
  void prefix_rule(real* value, int t);
  void phrase_rule(real* value, int t);
  void require(real* value, int left);
  void redistribute(real* value, bool unmet);
  // By input: one hypothesis follows one path, and the probability of an early end goes to tokens of a phrase.
  bool one_path() const {
    return options_.samples || options_.alternatives || (options_.beam == 1 && !phrases_->stages);
  }
  bool staged() const { return phrases_ && phrases_->stages && requires_ && !one_path(); }
  int need_after(int token) const;
  double weight(const real* value, int place);
  double exponent(real value) const;
  double total_weight(const real* value) const;

  const Options& options_;
  const Inputs& inputs_;
  const Kernels* kernels_;
  const int vocab_, eos_;
  int input_ = 0;
  const Phrases* phrases_ = nullptr;
  Progress progress_;
  bool requires_ = false, pulled_ = false;
  uint8_t* nearer_ = nullptr;  // by token: whether it is allowed and brings a requirement nearer
  const real* scores_ = nullptr;
  real end_score_ = 0;
  real *saved_ = nullptr, *masked_ = nullptr;
  int* past_ = nullptr;    // tokens of a hypothesis
  int* stamps_ = nullptr;  // by token: when it was last seen
  int stamp_ = 0;
  Candidate* order_ = nullptr;  // of samples: tokens by value, of which the first `sorted_` are in place
  double* weights_ = nullptr;
  int sorted_ = 0;
};

}  // namespace rn
