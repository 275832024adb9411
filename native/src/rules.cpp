#include "rules.h"

#include <algorithm>
#include <cstring>

#include "scalar.h"

namespace rn {

// Places in the order of values that are sorted at first, and how many times as many when these do not suffice.
constexpr int FIRST_PLACES = 64;
constexpr int MORE_PLACES = 16;

bool Rules::reserve(int limit, Arena* arena) {
  const size_t vocab = size_t(vocab_);
  past_ = arena->take<int>(size_t(limit) + 1);
  stamps_ = arena->take<int>(vocab);
  saved_ = arena->take<real>(vocab);
  if (inputs_.phrases) {
    nearer_ = arena->take<uint8_t>(vocab);
    masked_ = arena->take<real>(vocab);
  }
  if (options_.samples) {
    order_ = arena->take<Candidate>(vocab);
    weights_ = arena->take<double>(vocab);
  }
  if (arena->failed()) return false;
  memset(stamps_, 0, sizeof(int) * vocab);
  return true;
}

void Rules::apply(int input, int t, const Progress& progress, real* value) {
  input_ = input;
  phrases_ = inputs_.phrases_of(input);
  progress_ = progress;
  end_score_ = value[eos_];
  scores_ = value;
  const int prefix = inputs_.prefix_length(input);
  const bool within = t >= inputs_.minimum(input) && t < inputs_.limits[input] && (!prefix || t > prefix);
  if (within && !needs_past(t) && !phrases_) return;
  memcpy(saved_, value, sizeof(real) * size_t(vocab_));
  scores_ = saved_;
  if (needs_past(t)) repeat_rules(value, t);
  length_rule(value, t);
  prefix_rule(value, t);
  if (!phrases_) return;
  phrase_rule(value, t);
  prefix_rule(value, t);
}

void Rules::repeat_rules(real* value, int t) {
  if (options_.repetition_penalty > 1) {
    stamp_++;
    for (int i = 0; i < t; i++) {
      if (stamps_[past_[i]] == stamp_) continue;
      stamps_[past_[i]] = stamp_;
      value[past_[i]] = value[past_[i]] * real(options_.repetition_penalty);
    }
  }
  const int size = options_.no_repeat;
  if (!size || t < size) return;
  for (int start = 0; start + size <= t; start++)
    if (!memcmp(past_ + start, past_ + t - size + 1, sizeof(int) * size_t(size - 1)))
      value[past_[start + size - 1]] = LOWEST;
}

// No end before the minimum, and nothing else at the limit, where a continuation ends at no cost.
void Rules::length_rule(real* value, int t) {
  real end = value[eos_];
  if (t >= inputs_.limits[input_]) {
    std::fill(value, value + vocab_, LOWEST);
    if (inputs_.open_end(input_)) end = 0;
  }
  value[eos_] = t < inputs_.minimum(input_) ? LOWEST : end;
}

// The prefix overrides all other rules.
void Rules::prefix_rule(real* value, int t) {
  const int length = inputs_.prefix_length(input_);
  if (t < length) {
    const int token = inputs_.prefix(input_)[t];
    std::fill(value, value + vocab_, LOWEST);
    value[token] = scores_[token];
  } else if (t > 0 && t == length) {
    const int count = Inputs::length(inputs_.after_prefix_end, input_);
    for (int i = 0; i < count; i++)
      value[inputs_.after_prefix[Inputs::begin(inputs_.after_prefix_end, input_) + i]] = LOWEST;
  }
}

// As `PhraseConstraint` in regard's decode/constraints.py.
void Rules::phrase_rule(real* value, int t) {
  const Phrases& p = *phrases_;
  const size_t row = size_t(progress_.state) * vocab_;
  if (p.stop) {
    const int first_stop = std::max(inputs_.minimum(input_), inputs_.prefix_length(input_));
    for (int v = 0; v < vocab_; v++) {
      const int stop = p.stop[row + v];
      if (stop > 0 && std::max(t + 1 - stop, 0) < first_stop) value[v] = LOWEST;
    }
  }
  pulled_ = false;
  requires_ = std::any_of(p.need, p.need + size_t(p.subsets) * p.states, [](int16_t need) { return need != 0; });
  if (requires_)
    require(value, inputs_.limits[input_] - t);
  else
    for (int v = 0; v < vocab_; v++)
      if (p.ban[row + v]) value[v] = LOWEST;
  if (p.stop && progress_.stopped) {
    std::fill(value, value + vocab_, LOWEST);
    value[eos_] = 0;
  }
}

int Rules::need_after(int token) const {
  const Phrases& p = *phrases_;
  const size_t at = size_t(progress_.state) * vocab_ + token;
  return p.need[size_t(progress_.met | p.met[at]) * p.states + p.next[at]];
}

// Forbid tokens after which the `left` tokens up to the limit are too few.
void Rules::require(real* value, int left) {
  const Phrases& p = *phrases_;
  const size_t row = size_t(progress_.state) * vocab_;
  const int need = p.need[size_t(progress_.met) * p.states + progress_.state];
  const real end = need > 0 ? LOWEST : value[eos_];
  for (int v = 0; v < vocab_; v++) {
    const int after = need_after(v);
    const bool stops = p.stop && p.stop[row + v] && after;
    const bool allowed = !p.ban[row + v] && after < left && !stops && v != eos_;
    nearer_[v] = allowed && after < need;
    if (!allowed) value[v] = LOWEST;
  }
  if (one_path()) redistribute(value, need > 0);
  value[eos_] = end;
}

// Move the probability of the end to tokens that bring a requirement nearer, until the phrase is complete.
void Rules::redistribute(real* value, bool unmet) {
  double best = -INFINITY, sum = 0;
  for (int v = 0; v < vocab_; v++)
    if (nearer_[v]) best = std::max(best, double(value[v]));
  if (!(best > -INFINITY)) return;
  for (int v = 0; v < vocab_; v++) {
    if (nearer_[v])
      sum += exponential(double(value[v]) - best);
    else if (progress_.committed)
      value[v] = LOWEST;
  }
  if (!unmet) return;
  const double near = best + natural_log(sum), end = double(end_score_);
  const double distance = near < end ? near - end : end - near;
  const double grown = (near < end ? end : near) + natural_log(1 + exponential(distance)) - near;
  for (int v = 0; v < vocab_; v++)
    if (nearer_[v]) value[v] = value[v] + real(grown);
  pulled_ = near < end;
}

int Rules::top(real* value, int count, Candidate* out) {
  value[eos_] = LOWEST;
  int total = 0;
  if (staged()) {
    for (int v = 0; v < vocab_; v++) {
      masked_[v] = nearer_[v] ? value[v] : LOWEST;
      if (nearer_[v]) value[v] = LOWEST;
    }
    total = kernels_->top(masked_, vocab_, count, out);
    while (total && !(out[total - 1].value > LOWEST)) total--;
  }
  total += kernels_->top(value, vocab_, count, out + total);
  while (total && !(out[total - 1].value > LOWEST)) total--;
  return total;
}

int Rules::stage(int token) const {
  if (!staged()) return 0;
  const float per_token = float(phrases_->stages) / float(std::max(int(phrases_->need[0]), 1));
  return int(std::ceil(float(need_after(token)) * per_token));
}

Progress Rules::follow(int token) const {
  if (!phrases_) return {};
  const Phrases& p = *phrases_;
  const size_t at = size_t(progress_.state) * vocab_ + token;
  Progress next;
  next.state = p.next[at];
  next.met = progress_.met | p.met[at];
  next.stopped = p.stop && p.stop[at] > 0;
  next.committed = requires_ && one_path() && (progress_.committed || pulled_) && nearer_[token] &&
                   next.met == progress_.met;
  return next;
}

// The weight of the token at a place in the order of values. Most draws need few places, so few are sorted.
double Rules::weight(const real* value, int place) {
  if (place < sorted_) return weights_[place];
  const int before = sorted_;
  if (!before) {
    sorted_ = kernels_->top(value, vocab_, std::min(FIRST_PLACES, vocab_), order_);
  } else {
    sorted_ = std::min(MORE_PLACES * before, vocab_);
    for (int i = 0; i < vocab_; i++) order_[i] = {value[i], i};
    const auto precedes = [](const Candidate& a, const Candidate& b) {
      return a.value != b.value ? a.value > b.value : a.token < b.token;
    };
    std::nth_element(order_, order_ + sorted_ - 1, order_ + vocab_, precedes);
    std::sort(order_, order_ + sorted_, precedes);
  }
  for (int i = before; i < sorted_; i++) weights_[i] = exponential(exponent(order_[i].value));
  return weights_[place];
}

// The logarithm of the weight of a token, relative to that of the most probable one.
double Rules::exponent(real value) const {
  const double temperature = options_.temperature > 1e-30 ? options_.temperature : 1e-30;
  return (double(value) - double(order_[0].value)) / temperature;
}

double Rules::total_weight(const real* value) const {
  constexpr int COUNT = 8;
  double total = 0;
  for (int start = 0; start < vocab_; start += COUNT) {
    double weights[COUNT];
    for (int i = 0; i < COUNT; i++) weights[i] = start + i < vocab_ ? exponent(value[start + i]) : -INFINITY;
    exponentiate<COUNT>(weights);
    for (const double weight : weights) total += weight;
  }
  return total;
}

// Sample a token: `noise` is a share of the probability of the tokens that remain.
int Rules::sample(const real* value, real noise) {
  sorted_ = 0;
  const bool limited = options_.top_k && options_.top_k < vocab_;
  const int most = limited ? options_.top_k : vocab_;
  const double least = options_.min_p * weight(value, 0);
  double total = 0;  // of the tokens before `top_p` and `min_p`
  if (limited)
    for (int i = 0; i < most; i++) total += weight(value, i);
  else if (options_.top_p < 1 || !(least > 0))
    total = total_weight(value);
  double mass = total;  // of the tokens that remain
  if (options_.top_p < 1 || least > 0) {
    const double nucleus = options_.top_p < 1 ? options_.top_p * total : INFINITY;
    mass = 0;
    for (int i = 0; i < most; i++) {
      if (i && (mass >= nucleus || weight(value, i) < least)) break;
      mass += weight(value, i);
    }
  }
  int token = order_[0].token;
  double sum = 0;
  for (int i = 0; i < most && !(sum > double(noise) * mass) && weight(value, i) > 0; i++) {
    sum += weight(value, i);
    token = order_[i].token;
  }
  return token;
}

}  // namespace rn
