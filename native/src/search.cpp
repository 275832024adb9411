#include "search.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

#include "scalar.h"

namespace rn {

namespace {

constexpr real LOWEST = real(-INFINITY);
constexpr int MAX_ENCODED_TOKENS = 512;  // at a time
constexpr size_t MAX_NODE_BYTES = size_t(1) << 30;  // of all sentences that are decoded at the same time
// The multiple of its length to which a hypothesis may still grow, at no cost, to enter an n-best.
constexpr double NBEST_GROWTH = 1.25;

// The nodes of all outputs, as trees. A node is free again when no hypothesis and no later node needs it.
class Nodes {
 public:
  bool reserve(int count, size_t node_size, Arena* arena) {
    values = arena->take<real>(size_t(count) * node_size);
    parent_ = arena->take<int>(size_t(count));
    uses_ = arena->take<int>(size_t(count));
    free_ = arena->take<int>(size_t(count));
    if (arena->failed()) return false;
    for (int i = 0; i < count; i++) free_[i] = count - 1 - i;
    left_ = count;
    return true;
  }
  int add(int parent) {
    const int node = free_[--left_];
    parent_[node] = parent;
    uses_[node] = 1;
    if (parent >= 0) uses_[parent]++;
    return node;
  }
  void use(int node) { uses_[node]++; }
  void release(int node) {
    while (node >= 0 && --uses_[node] == 0) {
      free_[left_++] = node;
      node = parent_[node];
    }
  }

  real* values = nullptr;

 private:
  int *parent_ = nullptr, *uses_ = nullptr, *free_ = nullptr;
  int left_ = 0;
};

struct Hypothesis {
  real sum;
  int token;   // to feed next
  int length;  // of the path
  int* path;   // nodes
  int back;    // its last entry in the history; -1: none
  int parent;  // the hypothesis that it continues, until it replaces it
};

// A token of an output, with the one before it.
struct Past {
  int before, token;
  real score;
};

struct Finished {
  real value;
  int back;  // the last token before the end
  int length;
  real end_score;
};

struct Sentence {
  int input = -1;  // -1: free
  int step = 0;
  bool closed = false;  // the best output is final
  int alive = 0;
  int ended = 0;
  int finished = 0;
  int past = 0;
  Encoded source;
  Hypothesis* hypotheses = nullptr;  // the current ones, then as much space for the next
  Past* history = nullptr;
  Finished* best = nullptr;
};

struct Choice {
  real value;
  int parent, token;
  real score;
  bool end;
};

bool better(const Choice& a, const Choice& b) {
  if (a.value != b.value) return a.value > b.value;
  if (a.end != b.end) return a.end;
  if (a.parent != b.parent) return a.parent < b.parent;
  return a.token < b.token;
}

// x^p of a positive number.
real power(double x, double p) {
  if (p == 1) return real(x);
  if (p == 0) return 1;
  return real(exponential(p * natural_log(x)));
}

class Search {
 public:
  Search(const Model& model, const Options& options, const Inputs& inputs, Workspace* space, Results* results)
      : model_(model), options_(options), inputs_(inputs), arena_(&space->memory), results_(results),
        source_positions_(space->source_positions), target_positions_(space->target_positions) {}

  Status run() {
    if (!reserve()) return OUT_OF_MEMORY;
    while (true) {
      admit();
      const int rows = collect();
      if (!rows) return DONE;
      run_decoder(model_, target_positions_, rows_, rows, nodes_.values, &space_);
      predict(model_, rows, &space_, logits_);
      for (int s = 0, row = 0; s < slots_; s++) {
        Sentence& sentence = sentences_[s];
        if (sentence.input < 0) continue;
        real* first = logits_ + size_t(row) * vocab_stride_;
        row += sentence.alive;
        for (int w = 0; w < sentence.alive; w++)
          if (!model_.kernels->log_softmax(first + size_t(w) * vocab_stride_, model_.target_vocab)) return NOT_NUMBERS;
        advance(&sentence, first);
      }
    }
  }

 private:
  bool reserve() {
    width_ = options_.beam;
    slots_ = inputs_.count < options_.sentences ? inputs_.count : options_.sentences;
    int source = 1, limit = 0;
    int64_t tokens = 0;
    for (int i = 0; i < inputs_.count; i++) {
      if (inputs_.source_length(i) > source) source = inputs_.source_length(i);
      if (inputs_.limits[i] > limit) limit = inputs_.limits[i];
      tokens += int64_t(inputs_.limits[i] + 1) * options_.keep;
    }
    const bool encodes = model_.encoder.present;
    longest_ = limit + 1 + (encodes ? 0 : source);
    const size_t sentence = size_t(width_) * size_t(longest_) * (model_.decoder.node_size + 1) * sizeof(real);
    const size_t most = MAX_NODE_BYTES / sentence;
    if (most < size_t(slots_)) slots_ = most ? int(most) : 1;
    const int blocks = encodes ? padded(source) / LANE_COUNT : 0;
    const int rows = slots_ * width_;
    chunk_ = encodes ? (source > MAX_ENCODED_TOKENS ? source : MAX_ENCODED_TOKENS) : source;
    vocab_stride_ = padded(model_.target_vocab);
    sentences_ = arena_->take<Sentence>(size_t(slots_));
    rows_ = arena_->take<Row>(size_t(rows > chunk_ ? rows : chunk_));
    logits_ = arena_->take<real>(size_t(rows) * vocab_stride_);
    candidates_ = arena_->take<Candidate>(size_t(width_) + 1);
    choices_ = arena_->take<Choice>(size_t(width_) * (width_ + 2));
    results_->counts = arena_->take<int32_t>(size_t(inputs_.count));
    results_->outputs = arena_->take<Output>(size_t(inputs_.count) * options_.keep);
    results_->ids = arena_->take<int32_t>(size_t(tokens));
    results_->scores = arena_->take<real>(size_t(tokens));
    fresh_ = arena_->take<Encoded*>(size_t(slots_));
    past_ = arena_->take<int>(size_t(limit) + 1);
    changed_ = arena_->take<Candidate>(2 * size_t(limit) + size_t(options_.after_prefix_count) + 1);
    stamps_ = arena_->take<int>(size_t(model_.target_vocab));
    if (options_.sample) {
      order_ = arena_->take<Candidate>(size_t(model_.target_vocab));
      weights_ = arena_->take<double>(size_t(model_.target_vocab));
    }
    if (arena_->failed()) return false;
    memset(stamps_, 0, sizeof(int) * size_t(model_.target_vocab));
    if (encodes) {
      const int count = (chunk_ + LANE_COUNT - 1) / LANE_COUNT + slots_;
      real* encoder_blocks = arena_->take<real>(size_t(count) * model_.encoder.block_size);
      real** pointers = arena_->take<real*>(size_t(count));
      if (arena_->failed()) return false;
      for (int i = 0; i < count; i++) pointers[i] = encoder_blocks + size_t(i) * model_.encoder.block_size;
      encoder_blocks_ = pointers;
      if (!source_positions_.require(model_.encoder, source)) return false;
    }
    for (int s = 0; s < slots_; s++) {
      Sentence* sentence = new (sentences_ + s) Sentence();
      sentence->source.blocks = arena_->take<real*>(size_t(blocks));
      sentence->source.initial = arena_->take<real>(model_.decoder.recurrent() ? model_.decoder.node_size : 0);
      real* memory = arena_->take<real>(size_t(blocks) * model_.decoder.block_size);
      sentence->hypotheses = arena_->take<Hypothesis>(size_t(2 * width_));
      int* paths = arena_->take<int>(size_t(2 * width_) * longest_);
      sentence->history = arena_->take<Past>(size_t(limit + 1) * width_);
      sentence->best = arena_->take<Finished>(size_t(options_.keep) + 1);
      if (arena_->failed()) return false;
      for (int b = 0; b < blocks; b++) sentence->source.blocks[b] = memory + size_t(b) * model_.decoder.block_size;
      for (int w = 0; w < 2 * width_; w++) sentence->hypotheses[w].path = paths + size_t(w) * longest_;
    }
    return nodes_.reserve(rows * longest_ + 1, model_.decoder.node_size, arena_) &&
           target_positions_.require(model_.decoder, longest_) &&
           space_.reserve(model_, rows > chunk_ ? rows : chunk_, longest_ > source ? longest_ : source, arena_);
  }

  // Fill free places with waiting inputs, when enough are free to encode several at once.
  void admit() {
    int vacant = 0;
    for (int s = 0; s < slots_; s++) vacant += sentences_[s].input < 0;
    if (next_ >= inputs_.count || vacant * 4 < slots_) return;
    int rows = 0, blocks = 0, fresh = 0;
    for (int s = 0; s < slots_ && next_ < inputs_.count; s++) {
      Sentence& sentence = sentences_[s];
      if (sentence.input >= 0) continue;
      const int length = inputs_.source_length(next_);
      if (fresh && rows + length > chunk_) {
        read_source(model_, source_positions_, rows_, rows, fresh_, fresh, &space_);
        rows = blocks = fresh = 0;
      }
      begin(&sentence, next_++);
      if (!model_.encoder.present) continue;
      fresh_[fresh++] = &sentence.source;
      const int32_t* tokens = inputs_.source(sentence.input);
      for (int i = 0; i < length; i++) rows_[rows + i] = {tokens[i], i, encoder_blocks_ + blocks, length, nullptr, nullptr};
      rows += length;
      blocks += (length + LANE_COUNT - 1) / LANE_COUNT;
    }
    if (fresh) read_source(model_, source_positions_, rows_, rows, fresh_, fresh, &space_);
  }

  void begin(Sentence* sentence, int input) {
    sentence->input = input;
    sentence->step = sentence->ended = sentence->finished = sentence->past = 0;
    sentence->alive = 1;
    sentence->closed = false;
    sentence->source.length = inputs_.source_length(input);
    Hypothesis& first = sentence->hypotheses[0];
    first.sum = 0;
    first.length = 0;
    first.back = -1;
    first.token = model_.start;
    if (!model_.encoder.present) read_prompt(sentence);
  }

  // Feed all tokens of a prompt but the last, which the first step feeds.
  void read_prompt(Sentence* sentence) {
    const int32_t* source = inputs_.source(sentence->input);
    const int length = sentence->source.length - 1;
    Hypothesis& first = sentence->hypotheses[0];
    first.token = source[length];
    first.length = length;
    for (int i = 0; i < length; i++) {
      append_node(&first, i);
      rows_[i] = {source[i], i, nullptr, 0, first.path, nullptr};
    }
    if (length) run_decoder(model_, target_positions_, rows_, length, nodes_.values, &space_);
  }

  // A node for the token at `position`, which belongs to this hypothesis instead of the node before it.
  void append_node(Hypothesis* hypothesis, int position) {
    const int before = position ? hypothesis->path[position - 1] : -1;
    hypothesis->path[position] = nodes_.add(before);
    if (before >= 0) nodes_.release(before);
  }

  // The rows of the next step: one for each hypothesis.
  int collect() {
    int count = 0;
    for (int s = 0; s < slots_; s++) {
      Sentence& sentence = sentences_[s];
      if (sentence.input < 0) continue;
      for (int w = 0; w < sentence.alive; w++) {
        Hypothesis& h = sentence.hypotheses[w];
        append_node(&h, h.length);
        rows_[count++] = {h.token, h.length, sentence.source.blocks, sentence.source.length, h.path, sentence.source.initial};
        h.length++;
      }
    }
    return count;
  }

  // Change log-probabilities to the values that rank tokens; `changed_` remembers what they were.
  void apply_rules(const Sentence& sentence, int parent, real* value) {
    changed_count_ = 0;
    for (int i = 0; i < options_.blocked_count; i++) value[options_.blocked[i]] = LOWEST;
    const int t = sentence.step;
    if (t > 0 && (options_.repetition_penalty > 1 || options_.no_repeat)) {
      int back = sentence.hypotheses[parent].back;
      for (int i = t - 1; i >= 0; i--, back = sentence.history[back].before) past_[i] = sentence.history[back].token;
      repeat_rules(value, t);
    }
    const int prefix = inputs_.prefix_length(sentence.input);
    if (t > 0 && t == prefix)
      for (int i = 0; i < options_.after_prefix_count; i++) change(value, options_.after_prefix[i], LOWEST);
  }

  void repeat_rules(real* value, int t) {
    if (options_.repetition_penalty > 1) {
      stamp_++;
      for (int i = 0; i < t; i++) {
        if (stamps_[past_[i]] == stamp_) continue;
        stamps_[past_[i]] = stamp_;
        change(value, past_[i], value[past_[i]] * real(options_.repetition_penalty));
      }
    }
    const int size = options_.no_repeat;
    if (!size || t < size) return;
    for (int start = 0; start + size <= t; start++)
      if (!memcmp(past_ + start, past_ + t - size + 1, sizeof(int) * size_t(size - 1)))
        change(value, past_[start + size - 1], LOWEST);
  }

  void change(real* value, int token, real to) {
    changed_[changed_count_++] = {value[token], token};
    value[token] = to;
  }

  // The log-probability of a token whose value the rules may have changed; the first change has it.
  real score_of(const real* value, int token) const {
    for (int i = 0; i < changed_count_; i++)
      if (changed_[i].token == token) return changed_[i].value;
    return value[token];
  }

  // The best continuations of a hypothesis under the rules, the end first -> how many there are.
  int choose(const Sentence& sentence, int parent, real* value, Choice* out) {
    const int input = sentence.input, t = sentence.step;
    const real sum = sentence.hypotheses[parent].sum;
    apply_rules(sentence, parent, value);
    if (t < inputs_.prefix_length(input)) {
      const int token = inputs_.prefix(input)[t];
      const real score = score_of(value, token);
      out[0] = {sum + score, parent, token, score, false};
      return score > LOWEST;
    }
    int count = 0;
    const real end = value[model_.eos];
    const bool full = t >= inputs_.limits[input];
    const real end_value = full && options_.open_end ? real(0) : end;
    const bool may_end = t >= inputs_.minimums[input] && end_value > LOWEST;
    if (options_.sample && !full) {
      if (!may_end) value[model_.eos] = LOWEST;
      const int token = draw(value, inputs_.noise[size_t(input) * inputs_.noise_stride + t]);
      if (!(value[token] > LOWEST)) return 0;
      out[0] = {sum + value[token], parent, token, score_of(value, token), token == model_.eos};
      return 1;
    }
    if (may_end) out[count++] = {sum + end_value, parent, model_.eos, end, true};
    if (full) return count;
    value[model_.eos] = LOWEST;
    const int best = model_.kernels->top(value, model_.target_vocab, width_, candidates_);
    for (int i = 0; i < best; i++) {
      const int token = candidates_[i].token;
      if (candidates_[i].value > LOWEST)
        out[count++] = {sum + candidates_[i].value, parent, token, score_of(value, token), false};
    }
    return count;
  }

  // Sample a token: `noise` is a share of the probability of the tokens that remain.
  int draw(const real* value, real noise) {
    const int vocab = model_.target_vocab;
    for (int i = 0; i < vocab; i++) order_[i] = {value[i], i};
    std::sort(order_, order_ + vocab, [](const Candidate& a, const Candidate& b) {
      return a.value != b.value ? a.value > b.value : a.token < b.token;
    });
    const double temperature = options_.temperature > 1e-30 ? options_.temperature : 1e-30;
    double total = 0;
    for (int i = 0; i < vocab; i++) {
      weights_[i] = exponential((double(order_[i].value) - double(order_[0].value)) / temperature);
      total += weights_[i];
    }
    const int most = options_.top_k && options_.top_k < vocab ? options_.top_k : vocab;
    double kept = 0, all = 0;
    int count = 0;
    for (; count < most; count++) all += weights_[count];
    const double nucleus = options_.top_p * (options_.top_k ? all : total);
    for (count = 0; count < most; count++) {
      if (count && (kept >= nucleus || weights_[count] < options_.min_p * weights_[0])) break;
      kept += weights_[count];
    }
    double sum = 0;
    for (int i = 0; i < count; i++) {
      sum += weights_[i];
      if (sum > double(noise) * kept) return order_[i].token;
    }
    return order_[count - 1].token;
  }

  void advance(Sentence* sentence, real* logp) {
    int count = 0;
    for (int w = 0; w < sentence->alive; w++)
      count += choose(*sentence, w, logp + size_t(w) * vocab_stride_, choices_ + count);
    // The best 2 * width candidates, in order; ends among the first `width` of them finish.
    const int most = count < 2 * width_ ? count : 2 * width_;
    for (int i = 0; i < most; i++) {
      int first = i;
      for (int j = i + 1; j < count; j++)
        if (better(choices_[j], choices_[first])) first = j;
      const Choice choice = choices_[first];
      choices_[first] = choices_[i];
      choices_[i] = choice;
    }
    int next = 0;
    Hypothesis* old = sentence->hypotheses;
    Hypothesis* fresh = old + width_;
    const int t = sentence->step;
    for (int i = 0; i < most; i++) {
      const Choice& choice = choices_[i];
      if (choice.end) {
        if (i < width_) finish(sentence, choice, old[choice.parent].back);
      } else if (next < width_) {
        fresh[next] = {choice.value, choice.token, 0, fresh[next].path, sentence->past, choice.parent};
        sentence->history[sentence->past++] = {old[choice.parent].back, choice.token, choice.score};
        next++;
      }
    }
    sentence->step = t + 1;
    if (!next || settled(sentence, t, fresh[0].sum)) {
      leave(sentence);
      return;
    }
    for (int w = 0; w < next; w++) {
      const Hypothesis& parent = old[fresh[w].parent];
      fresh[w].length = parent.length;
      memcpy(fresh[w].path, parent.path, sizeof(int) * size_t(parent.length));
      nodes_.use(parent.path[parent.length - 1]);
    }
    for (int w = 0; w < sentence->alive; w++) nodes_.release(old[w].path[old[w].length - 1]);
    for (int w = 0; w < next; w++) {
      const Hypothesis swapped = old[w];
      old[w] = fresh[w];
      fresh[w].path = swapped.path;
    }
    sentence->alive = next;
  }

  void finish(Sentence* sentence, const Choice& choice, int back) {
    const int t = sentence->step;
    const bool open = options_.open_end && t >= inputs_.limits[sentence->input];
    const int length = t + !open;
    const real value = choice.value / power(length ? length : 1, options_.length_penalty);
    sentence->ended++;
    int at = sentence->finished;
    Finished* best = sentence->best;
    for (; at > int(sentence->closed) && best[at - 1].value < value; at--) best[at] = best[at - 1];
    best[at] = {value, back, t, choice.score};
    if (sentence->finished < options_.keep) sentence->finished++;
  }

  // Whether no hypothesis may still enter the n-best; `sum` is that of the best one.
  bool settled(Sentence* sentence, int t, real sum) const {
    const double penalty = options_.length_penalty;
    const real first = sentence->finished ? sentence->best[0].value : LOWEST;
    const real last = sentence->finished == options_.keep ? sentence->best[options_.keep - 1].value : LOWEST;
    if (!options_.exact) {
      const bool better = sum / power(t + 1, penalty) > first;
      sentence->closed = sentence->closed || (sentence->ended >= width_ && !better);
      const bool enters = options_.keep > 1 && sum / power(NBEST_GROWTH * (t + 1), penalty) > last;
      if (sentence->closed && !enters) return true;
    }
    return !(sum / power(inputs_.limits[sentence->input] + 1, penalty) > last);
  }

  // Store the outputs of a sentence and free its place.
  void leave(Sentence* sentence) {
    const int input = sentence->input;
    int stored = 0;
    for (int f = 0; f < sentence->finished; f++) {
      const Finished& finished = sentence->best[f];
      const bool limited = finished.length == inputs_.limits[input];
      const bool ends = !(limited && options_.open_end);
      const int length = finished.length + ends;
      int32_t* ids = results_->ids + used_;
      real* scores = results_->scores + used_;
      int back = finished.back;
      for (int i = finished.length - 1; i >= 0; i--) {
        ids[i] = sentence->history[back].token;
        scores[i] = sentence->history[back].score;
        back = sentence->history[back].before;
      }
      if (ends) {
        ids[length - 1] = model_.eos;
        scores[length - 1] = finished.end_score;
      }
      Output* outputs = results_->outputs + size_t(input) * options_.keep;
      bool repeated = false;
      for (int i = 0; i < stored && !repeated; i++)
        repeated = outputs[i].length == length &&
                   !memcmp(results_->ids + outputs[i].first, ids, sizeof(int32_t) * size_t(length));
      if (repeated) continue;
      outputs[stored++] = {used_, length, limited, double(finished.value)};
      used_ += length;
    }
    results_->counts[input] = stored;
    for (int w = 0; w < sentence->alive; w++) {
      const Hypothesis& h = sentence->hypotheses[w];
      nodes_.release(h.path[h.length - 1]);
    }
    sentence->input = -1;
    sentence->alive = 0;
  }

  const Model& model_;
  const Options& options_;
  const Inputs& inputs_;
  Arena* arena_;
  Results* results_;
  Positions &source_positions_, &target_positions_;
  int width_ = 1, slots_ = 0, longest_ = 0, chunk_ = 0, vocab_stride_ = 0, next_ = 0;
  int64_t used_ = 0;  // ids in the results
  Sentence* sentences_ = nullptr;
  Encoded** fresh_ = nullptr;
  Row* rows_ = nullptr;
  real* logits_ = nullptr;
  real** encoder_blocks_ = nullptr;
  Candidate* candidates_ = nullptr;
  Choice* choices_ = nullptr;
  Candidate* changed_ = nullptr;  // tokens with their log-probabilities before the rules
  int changed_count_ = 0;
  int* past_ = nullptr;    // tokens of a hypothesis
  int* stamps_ = nullptr;  // by token: when it was last seen
  int stamp_ = 0;
  Candidate* order_ = nullptr;  // of samples
  double* weights_ = nullptr;
  Activations space_;
  Nodes nodes_;
};

}  // namespace

constexpr int MAX_TOKENS = 1 << 20;  // of a source or an output
constexpr int64_t MAX_NODES = 1 << 29;
constexpr int MAX_BEAM = 1000;

bool valid(const Model& model, const Options& options, const Inputs& inputs, int additional) {
  if (inputs.count < 1 || options.beam < 1 || options.beam > MAX_BEAM || options.keep < 1 ||
      options.keep > MAX_BEAM || options.sentences < 1)
    return false;
  const int vocab = model.encoder.present ? model.source_vocab : model.target_vocab;
  for (int i = 0; i < options.blocked_count; i++)
    if (options.blocked[i] < 0 || options.blocked[i] >= model.target_vocab) return false;
  for (int i = 0; i < options.after_prefix_count; i++)
    if (options.after_prefix[i] < 0 || options.after_prefix[i] >= model.target_vocab) return false;
  if (options.no_repeat < 0 || options.top_k < 0) return false;
  if (options.sample && (options.beam > 1 || !inputs.noise)) return false;
  for (int i = 0; i < inputs.count; i++) {
    if (options.sample && inputs.limits[i] > inputs.noise_stride) return false;
    const int source = inputs.source_length(i), prefix = inputs.prefix_length(i), limit = inputs.limits[i];
    if (source < 1 || prefix < 0 || limit < prefix || limit > MAX_TOKENS || source > MAX_TOKENS) return false;
    for (int s = 0; s < source; s++)
      if (inputs.source(i)[s] < 0 || inputs.source(i)[s] >= vocab) return false;
    for (int p = 0; p < prefix; p++)
      if (inputs.prefix(i)[p] < 0 || inputs.prefix(i)[p] >= model.target_vocab) return false;
    const int positions = limit + additional + (model.encoder.present ? 0 : source - 1);
    if (int64_t(options.beam) * positions >= MAX_NODES) return false;
    if (model.decoder.position == LEARNED && positions > model.decoder.table_rows) return false;
    if (model.encoder.present && model.encoder.position == LEARNED && source > model.encoder.table_rows) return false;
  }
  return true;
}

Status search(const Model& model, const Options& options, const Inputs& inputs, Workspace* space, Results* results) {
  if (!valid(model, options, inputs, 1)) return INVALID;
  space->memory.reset();
  return Search(model, options, inputs, space, results).run();
}

}  // namespace rn
