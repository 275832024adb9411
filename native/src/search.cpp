#include "search.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

#include "hypotheses.h"
#include "scalar.h"

namespace rn {

namespace {

constexpr int MAX_ENCODED_TOKENS = 512;  // at a time
constexpr size_t MAX_NODE_BYTES = size_t(1) << 30;  // of all sentences that are decoded at the same time
constexpr int MAX_STAGES = 1 << 24;
// The multiple of its length to which a hypothesis may still grow, at no cost, to enter an n-best.
constexpr double NBEST_GROWTH = 1.25;

// x^p of a positive number.
real power(double x, double p) {
  if (p == 1) return real(x);
  if (p == 0) return 1;
  return real(exponential(p * natural_log(x)));
}

// One model of an ensemble, with its memory.
struct Member {
  const Model* model = nullptr;
  Positions *source_positions = nullptr, *target_positions = nullptr;
  int chunk = 0;  // source tokens at a time
  real** encoder_blocks = nullptr;
  real* nodes = nullptr;
  Activations space;
};

}  // namespace

class Search {
 public:
  Search(const Ensemble& ensemble, const Options& options, const Inputs& inputs, Results* results)
      : ensemble_(ensemble), model_(*ensemble.models[0]), options_(options), inputs_(inputs),
        arena_(&ensemble.spaces[0]->memory), results_(results), rules_(model_, options, inputs_) {}

  // Sentences that can be decoded at the same time.
  int slots() {
    measure();
    size_t sentence = 0;
    for (int m = 0; m < ensemble_.count; m++) sentence += (ensemble_.models[m]->decoder.node_size + 1) * sizeof(real);
    const size_t tokens = size_t(width_) * size_t(longest_);
    const size_t most = std::min(MAX_NODE_BYTES / (sentence * tokens), size_t(MAX_NODES) / tokens);
    return std::min(std::min(inputs_.count, options_.sentences), most > 1 ? int(most) : 1);
  }

  bool reserve() {
    slots_ = slots();
    const int rows = slots_ * width_;
    vocab_stride_ = padded(model_.target_vocab);
    members_ = arena_->take<Member>(size_t(ensemble_.count));
    sentences_ = arena_->take<Sentence>(size_t(slots_));
    rows_ = arena_->take<Row>(size_t(rows > longest_source_ ? rows : longest_source_) + MAX_ENCODED_TOKENS);
    logits_ = arena_->take<real>(size_t(rows) * vocab_stride_);
    other_logits_ = arena_->take<real>(ensemble_.count > 1 ? size_t(rows) * vocab_stride_ : 0);
    candidates_ = arena_->take<Candidate>(2 * size_t(width_) + size_t(options_.alternatives));
    choices_ = arena_->take<Choice>(size_t(width_) * (2 * size_t(width_) + 2));
    top_ = arena_->take<Candidate>(size_t(options_.top_tokens));
    top_tokens_ = arena_->take<int32_t>(size_t(options_.top_tokens));
    top_scores_ = arena_->take<double>(size_t(options_.top_tokens));
    turns_ = arena_->take<int>(size_t(longest_stage_) + 1);
    fresh_ = arena_->take<Encoded*>(size_t(slots_));
    waiting_ = arena_->take<Sentence*>(size_t(slots_));
    return reserve_results() && rules_.reserve(limit_, arena_) && reserve_members(rows) && reserve_sentences() &&
           nodes_.reserve(rows * longest_ + 1, arena_);
  }

  Status step() {
    if (options_.cancelled && options_.cancelled()) return RN_CANCELLED;
    if (next_ < inputs_.count) admit();
    const int rows = extend();
    if (!rows) return RN_DONE;
    for (int m = 0; m < ensemble_.count; m++) predict_with(m, rows);
    for (int s = 0, row = 0; s < slots_; s++) {
      Sentence& sentence = sentences_[s];
      if (sentence.input < 0) continue;
      real* first = logits_ + size_t(row) * vocab_stride_;
      row += sentence.alive;
      for (int w = 0; w < sentence.alive; w++) {
        real* logp = first + size_t(w) * vocab_stride_;
        if (!model_.kernels->log_softmax(logp, model_.target_vocab)) return RN_NOT_NUMBERS;
        for (int i = 0; i < options_.blocked_count; i++) logp[options_.blocked[i]] = LOWEST;
      }
      if (options_.top_tokens) top_count_ = model_.kernels->top(first, model_.target_vocab, options_.top_tokens, top_);
      advance(&sentence, first);
    }
    return RN_RUNNING;
  }

  void describe(Step* step) {
    *step = Step();
    step->token = -1;
    while (step->top_count < top_count_ && top_[step->top_count].value > LOWEST) step->top_count++;
    for (int i = 0; i < step->top_count; i++) {
      top_tokens_[i] = top_[i].token;
      top_scores_[i] = double(top_[i].value);
    }
    step->top_tokens = top_tokens_;
    step->top_scores = top_scores_;
    const Sentence& sentence = sentences_[0];
    if (sentence.input >= 0) {
      const Past& past = sentence.history[sentence.hypotheses[0].back];
      step->token = past.token;
      step->score = double(past.score);
    } else if (results_->counts[0] && results_->outputs[0].length == sentence.step) {
      step->token = results_->ids[sentence.step - 1];
      step->score = double(results_->scores[sentence.step - 1]);
    }
  }

 private:
  // The sizes that the memory depends on.
  void measure() {
    width_ = longest_source_ = 1;
    limit_ = longest_stage_ = 0;
    results_size_ = 0;
    for (int i = 0; i < inputs_.count; i++) {
      width_ = std::max(width_, width_of(options_, inputs_, i));
      limit_ = std::max(limit_, int(inputs_.limits[i]));
      results_size_ += int64_t(inputs_.limits[i] + 1) * options_.keep;
      if (const Phrases* phrases = inputs_.phrases_of(i)) {
        const int need = std::max(int(phrases->need[0]), 1);
        const int64_t stages = int64_t(inputs_.limits[i] + 1) * phrases->stages / need + 1;
        longest_stage_ = std::max(longest_stage_, int(std::min(stages, int64_t(MAX_STAGES))));
      }
      for (int m = 0; m < ensemble_.count; m++)
        longest_source_ = std::max(longest_source_, inputs_.source_length(i, m));
    }
    longest_ = limit_ + 1 + (model_.encoder.present ? 0 : longest_source_);
  }

  bool reserve_results() {
    results_->counts = arena_->take<int32_t>(size_t(inputs_.count));
    results_->outputs = arena_->take<Output>(size_t(inputs_.count) * options_.keep);
    results_->ids = arena_->take<int32_t>(size_t(results_size_));
    results_->scores = arena_->take<real>(size_t(results_size_));
    return !arena_->failed();
  }

  bool reserve_members(int rows) {
    if (arena_->failed()) return false;
    for (int m = 0; m < ensemble_.count; m++) {
      Member* member = new (members_ + m) Member();
      const Model& model = *ensemble_.models[m];
      member->model = &model;
      member->source_positions = &ensemble_.spaces[m]->source_positions;
      member->target_positions = &ensemble_.spaces[m]->target_positions;
      int source = 1;
      for (int i = 0; i < inputs_.count; i++) source = std::max(source, inputs_.source_length(i, m));
      member->chunk = model.encoder.present ? std::max(source, MAX_ENCODED_TOKENS) : source;
      member->nodes = arena_->take<real>((size_t(rows) * longest_ + 1) * model.decoder.node_size);
      if (arena_->failed() || !member->target_positions->require(model.decoder, longest_) ||
          !member->space.reserve(model, std::max(rows, member->chunk), std::max(longest_, source), arena_))
        return false;
      if (!model.encoder.present) continue;
      const int count = (member->chunk + LANE_COUNT - 1) / LANE_COUNT + slots_;
      real* blocks = arena_->take<real>(size_t(count) * model.encoder.block_size);
      member->encoder_blocks = arena_->take<real*>(size_t(count));
      if (arena_->failed() || !member->source_positions->require(model.encoder, source)) return false;
      for (int i = 0; i < count; i++) member->encoder_blocks[i] = blocks + size_t(i) * model.encoder.block_size;
    }
    return true;
  }

  bool reserve_sentences() {
    const int blocks = model_.encoder.present ? padded(longest_source_) / LANE_COUNT : 0;
    for (int s = 0; s < slots_; s++) {
      Sentence* sentence = new (sentences_ + s) Sentence();
      sentence->sources = arena_->take<Encoded>(size_t(ensemble_.count));
      sentence->hypotheses = arena_->take<Hypothesis>(size_t(2 * width_));
      int* paths = arena_->take<int>(size_t(2 * width_) * longest_);
      sentence->history = arena_->take<Past>(size_t(limit_ + 1) * width_);
      sentence->best = arena_->take<Finished>(size_t(options_.keep) + 1);
      if (arena_->failed()) return false;
      for (int w = 0; w < 2 * width_; w++) sentence->hypotheses[w].path = paths + size_t(w) * longest_;
      for (int m = 0; m < ensemble_.count; m++) {
        const Stack& decoder = ensemble_.models[m]->decoder;
        Encoded* source = new (sentence->sources + m) Encoded();
        source->blocks = arena_->take<real*>(size_t(blocks));
        source->initial = arena_->take<real>(decoder.recurrent() ? decoder.node_size : 0);
        real* memory = arena_->take<real>(size_t(blocks) * decoder.block_size);
        if (arena_->failed()) return false;
        for (int b = 0; b < blocks; b++) source->blocks[b] = memory + size_t(b) * decoder.block_size;
      }
    }
    return true;
  }

  // Fill free places with waiting inputs, when enough are free to encode several at once.
  void admit() {
    int vacant = 0;
    for (int s = 0; s < slots_; s++) vacant += sentences_[s].input < 0;
    if (vacant * 4 < slots_) return;
    int count = 0;
    for (int s = 0; s < slots_ && next_ < inputs_.count; s++) {
      if (sentences_[s].input >= 0) continue;
      begin(&sentences_[s], next_++);
      waiting_[count++] = &sentences_[s];
    }
    for (int m = 0; m < ensemble_.count; m++)
      if (model_.encoder.present)
        encode(m, count);
      else
        for (int i = 0; i < count; i++) read_prompt(m, *waiting_[i]);
  }

  void begin(Sentence* sentence, int input) {
    sentence->input = input;
    sentence->step = sentence->ended = sentence->finished = sentence->past = sentence->prompt = 0;
    sentence->alive = options_.samples ? options_.samples : 1;
    sentence->width = width_of(options_, inputs_, input);
    sentence->closed = false;
    for (int m = 0; m < ensemble_.count; m++) {
      const int length = inputs_.source_length(input, m);
      sentence->sources[m].length = length;
      if (!model_.encoder.present) sentence->prompt = std::max(sentence->prompt, length);
    }
    const int before = sentence->prompt ? sentence->prompt - 1 : 0;
    for (int w = 0; w < sentence->alive; w++) {
      Hypothesis& h = sentence->hypotheses[w];
      h = {0, 0, before, h.path, -1, 0, w, {}};
      if (w) {
        memcpy(h.path, sentence->hypotheses[0].path, sizeof(int) * size_t(before));
        if (before) nodes_.use(h.path[before - 1]);
        continue;
      }
      for (int i = 0; i < before; i++) append_node(&h, i);
    }
  }

  void encode(int m, int count) {
    Member& member = members_[m];
    int rows = 0, blocks = 0, fresh = 0;
    for (int s = 0; s < count; s++) {
      const int length = waiting_[s]->sources[m].length;
      if (fresh && rows + length > member.chunk) {
        read_source(*member.model, *member.source_positions, rows_, rows, fresh_, fresh, &member.space);
        rows = blocks = fresh = 0;
      }
      fresh_[fresh++] = &waiting_[s]->sources[m];
      const int32_t* tokens = inputs_.source(waiting_[s]->input, m);
      for (int i = 0; i < length; i++)
        rows_[rows + i] = {tokens[i], i, member.encoder_blocks + blocks, length, nullptr, nullptr};
      rows += length;
      blocks += (length + LANE_COUNT - 1) / LANE_COUNT;
    }
    if (fresh) read_source(*member.model, *member.source_positions, rows_, rows, fresh_, fresh, &member.space);
  }

  // Feed all tokens of a prompt but the last, which the first step feeds. The prompts of all models end at the same
  // node.
  void read_prompt(int m, const Sentence& sentence) {
    Member& member = members_[m];
    const int32_t* source = inputs_.source(sentence.input, m);
    const int length = sentence.sources[m].length;
    const int* path = sentence.hypotheses[0].path + sentence.prompt - length;
    for (int i = 0; i < length - 1; i++) rows_[i] = {source[i], i, nullptr, 0, path, nullptr};
    if (length > 1)
      run_decoder(*member.model, *member.target_positions, rows_, length - 1, member.nodes, &member.space);
  }

  // A node for the token at `position`, which belongs to this hypothesis instead of the node before it.
  void append_node(Hypothesis* hypothesis, int position) {
    const int before = position ? hypothesis->path[position - 1] : -1;
    hypothesis->path[position] = nodes_.add(before);
    if (before >= 0) nodes_.release(before);
  }

  // A node for the next token of each hypothesis -> how many there are.
  int extend() {
    int count = 0;
    for (int s = 0; s < slots_; s++) {
      Sentence& sentence = sentences_[s];
      if (sentence.input < 0) continue;
      for (int w = 0; w < sentence.alive; w++) {
        Hypothesis& h = sentence.hypotheses[w];
        append_node(&h, h.length++);
      }
      count += sentence.alive;
    }
    return count;
  }

  // Add the logits of one model, with its weight, to those of the models before it.
  void predict_with(int m, int rows) {
    Member& member = members_[m];
    const Model& model = *member.model;
    int count = 0;
    for (int s = 0; s < slots_; s++) {
      const Sentence& sentence = sentences_[s];
      if (sentence.input < 0) continue;
      const Encoded& source = sentence.sources[m];
      const int shift = sentence.prompt ? sentence.prompt - source.length : 0;
      const int first = sentence.prompt ? inputs_.source(sentence.input, m)[source.length - 1] : model.start;
      for (int w = 0; w < sentence.alive; w++) {
        const Hypothesis& h = sentence.hypotheses[w];
        const int token = sentence.step ? h.token : first;
        rows_[count++] = {token, h.length - 1 - shift, source.blocks, source.length, h.path + shift, source.initial};
      }
    }
    run_decoder(model, *member.target_positions, rows_, rows, member.nodes, &member.space);
    predict(model, rows, &member.space, m ? other_logits_ : logits_);
    combine(ensemble_, m, other_logits_, size_t(rows) * vocab_stride_, logits_);
  }

  // The best continuations of a hypothesis under the rules, the end first -> how many there are.
  int choose(const Sentence& sentence, int parent, real* value, Choice* out) {
    const int input = sentence.input, t = sentence.step;
    const Hypothesis& hypothesis = sentence.hypotheses[parent];
    const real sum = hypothesis.sum;
    if (rules_.needs_past(t)) {
      int back = hypothesis.back;
      for (int i = t - 1; i >= 0; i--, back = sentence.history[back].before)
        rules_.past()[i] = sentence.history[back].token;
    }
    rules_.apply(input, t, hypothesis.progress, value);
    auto choice = [&](int token, real added) {
      const bool end = token == model_.eos;
      const Progress progress = end ? Progress() : rules_.follow(token);
      return Choice{sum + added, parent, token, rules_.score(token), end, end ? 0 : rules_.stage(token), 0, progress};
    };
    if (options_.samples && t >= inputs_.prefix_length(input) && t < inputs_.limits[input]) {
      const int sample = input * options_.samples + hypothesis.number;
      const int token = rules_.sample(value, inputs_.noise[size_t(sample) * inputs_.noise_stride + t]);
      if (!(value[token] > LOWEST)) return 0;
      out[0] = choice(token, value[token]);
      return 1;
    }
    int count = 0;
    if (value[model_.eos] > LOWEST) out[count++] = choice(model_.eos, value[model_.eos]);
    if (t >= inputs_.limits[input]) return count;
    const int best = rules_.top(value, options_.samples ? 1 : sentence.width, candidates_);
    for (int i = 0; i < best; i++) out[count++] = choice(candidates_[i].token, candidates_[i].value);
    return count;
  }

  void advance(Sentence* sentence, real* logp) {
    if (options_.alternatives && sentence->step == inputs_.prefix_length(sentence->input)) {
      list_alternatives(sentence, logp);
      return;
    }
    int count = 0;
    for (int w = 0; w < sentence->alive; w++)
      count += choose(*sentence, w, logp + size_t(w) * vocab_stride_, choices_ + count);
    const int most = options_.samples ? count : order(*sentence, count);
    int next = 0;
    real best = LOWEST;
    Hypothesis* old = sentence->hypotheses;
    Hypothesis* fresh = old + width_;
    for (int i = 0; i < most; i++) {
      const Choice& choice = choices_[i];
      const Hypothesis& parent = old[choice.parent];
      if (choice.end) {
        if (options_.samples || i < sentence->width) finish(sentence, choice, parent);
      } else if (next < sentence->width) {
        fresh[next] = {choice.value,   choice.token,  parent.length,   fresh[next].path,
                       sentence->past, choice.parent, parent.number, choice.progress};
        sentence->history[sentence->past++] = {parent.back, choice.token, choice.score};
        best = std::max(best, choice.value);
        next++;
      }
    }
    sentence->step++;
    if (!next || (!options_.samples && settled(sentence, best))) {
      leave(sentence);
      return;
    }
    for (int w = 0; w < next; w++) {
      const Hypothesis& parent = old[fresh[w].parent];
      memcpy(fresh[w].path, parent.path, sizeof(int) * size_t(parent.length));
      nodes_.use(parent.path[parent.length - 1]);
    }
    for (int w = 0; w < sentence->alive; w++) nodes_.release(old[w].path[old[w].length - 1]);
    for (int w = 0; w < next; w++) std::swap(old[w], fresh[w]);
    sentence->alive = next;
  }

  // Put the best choices first, in order -> how many: twice the beam. Ends among the first half finish.
  int order(const Sentence& sentence, int count) {
    const int most = std::min(count, 2 * sentence.width);
    if (sentence.width > options_.beam) {
      std::sort(choices_, choices_ + count, better);
      take_turns(count);
    } else {
      std::partial_sort(choices_, choices_ + most, choices_ + count, better);
    }
    return most;
  }

  // The stages of progress share the beam in turn: the best of each, then the second best of each.
  void take_turns(int count) {
    memset(turns_, 0, sizeof(int) * (size_t(longest_stage_) + 1));
    for (int i = 0; i < count; i++) choices_[i].turn = turns_[std::min(choices_[i].stage, longest_stage_)]++;
    std::sort(choices_, choices_ + count, [](const Choice& a, const Choice& b) {
      return a.turn != b.turn ? a.turn < b.turn : better(a, b);
    });
  }

  // The outputs of a search for the best tokens after the prefix.
  void list_alternatives(Sentence* sentence, real* value) {
    const Hypothesis& h = sentence->hypotheses[0];
    rules_.apply(sentence->input, sentence->step, h.progress, value);
    const int count = model_.kernels->top(value, model_.target_vocab, options_.alternatives, candidates_);
    for (int i = 0; i < count && candidates_[i].value > LOWEST; i++) {
      const int token = candidates_[i].token;
      sentence->best[i] = {candidates_[i].value, h.back, sentence->step, token, rules_.score(token), 0};
      sentence->finished = i + 1;
    }
    sentence->step++;
    leave(sentence);
  }

  void finish(Sentence* sentence, const Choice& choice, const Hypothesis& parent) {
    const int t = sentence->step;
    const bool open = inputs_.open_end(sentence->input) && t >= inputs_.limits[sentence->input];
    const int length = t + !(open || parent.progress.stopped);
    const real value = choice.value / power(length ? length : 1, options_.length_penalty);
    const Finished finished = {value, parent.back, t, open ? -1 : model_.eos, choice.score, parent.number};
    Finished* best = sentence->best;
    sentence->ended++;
    int at = sentence->finished;
    if (options_.samples)
      for (; at > 0 && best[at - 1].number > finished.number; at--) best[at] = best[at - 1];
    else
      for (; at > int(sentence->closed) && best[at - 1].value < value; at--) best[at] = best[at - 1];
    best[at] = finished;
    if (sentence->finished < options_.keep) sentence->finished++;
  }

  // Whether no hypothesis may still enter the n-best; `sum` is that of the best one.
  bool settled(Sentence* sentence, real sum) const {
    const int t = sentence->step;
    const double penalty = options_.length_penalty;
    const real first = sentence->finished ? sentence->best[0].value : LOWEST;
    const real last = sentence->finished == options_.keep ? sentence->best[options_.keep - 1].value : LOWEST;
    if (sentence->width == 1 && sentence->finished) return true;
    if (!options_.exact) {
      const bool better = sum / power(t, penalty) > first;
      sentence->closed = sentence->closed || (sentence->ended >= options_.beam && !better);
      const bool enters = options_.keep > 1 && sum / power(NBEST_GROWTH * t, penalty) > last;
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
      const int length = finished.length + (finished.token >= 0);
      int32_t* ids = results_->ids + used_;
      real* scores = results_->scores + used_;
      int back = finished.back;
      for (int i = finished.length - 1; i >= 0; i--) {
        ids[i] = sentence->history[back].token;
        scores[i] = sentence->history[back].score;
        back = sentence->history[back].before;
      }
      if (finished.token >= 0) {
        ids[length - 1] = finished.token;
        scores[length - 1] = finished.score;
      }
      Output* outputs = results_->outputs + size_t(input) * options_.keep;
      bool repeated = false;
      for (int i = 0; i < stored && !repeated && !options_.samples; i++)
        repeated = outputs[i].length == length &&
                   !memcmp(results_->ids + outputs[i].first, ids, sizeof(int32_t) * size_t(length));
      if (repeated) continue;
      double value = double(finished.value);
      if (sentence->width == 1 || options_.samples) {  // one path: the sum of its scores
        value = 0;
        for (int i = 0; i < length; i++) value += double(scores[i]);
      }
      outputs[stored++] = {used_, length, finished.length == inputs_.limits[input], value};
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

  const Ensemble& ensemble_;
  const Model& model_;  // the first one
  const Options& options_;
  const Inputs inputs_;
  Arena* arena_;
  Results* results_;
  Rules rules_;
  int width_ = 1, slots_ = 0, longest_ = 0, longest_source_ = 0, limit_ = 0, longest_stage_ = 0;
  int vocab_stride_ = 0, next_ = 0;
  int64_t used_ = 0, results_size_ = 0;  // ids in the results
  Member* members_ = nullptr;
  Sentence* sentences_ = nullptr;
  Sentence** waiting_ = nullptr;
  Encoded** fresh_ = nullptr;
  Row* rows_ = nullptr;
  real *logits_ = nullptr, *other_logits_ = nullptr;
  Candidate* candidates_ = nullptr;
  Candidate* top_ = nullptr;
  int top_count_ = 0;
  int32_t* top_tokens_ = nullptr;
  double* top_scores_ = nullptr;
  int* turns_ = nullptr;  // by stage: choices so far
  Choice* choices_ = nullptr;
  Nodes nodes_;
};

Status begin(const Ensemble& ensemble, const Options& options, const Inputs& inputs, Results* results,
             Search** search) {
  results->problem = problem_of(ensemble, options, inputs, 1);
  if (results->problem) return RN_INVALID;
  Arena& arena = ensemble.spaces[0]->memory;
  arena.reset();
  void* place = arena.take<Search>(1);
  if (!place) return RN_OUT_OF_MEMORY;
  *search = new (place) Search(ensemble, options, inputs, results);
  return (*search)->reserve() ? RN_RUNNING : RN_OUT_OF_MEMORY;
}

Status advance(Search* search, Step* step) {
  const Status status = search->step();
  if (status == RN_RUNNING) search->describe(step);
  return status;
}

Status search(const Ensemble& ensemble, const Options& options, const Inputs& inputs, Results* results) {
  Search* search = nullptr;
  Status status = begin(ensemble, options, inputs, results, &search);
  while (status == RN_RUNNING) status = search->step();
  return status;
}

}  // namespace rn
