// The C interface of regard-native, for C99 and C++: models in memory, and searches over token ids.
//
// No function throws or exits. The caller owns all arguments; pointers in them must stay valid until the call returns,
// and those of `rn_begin` until the last `rn_step`. Models may be shared by threads; a workspace belongs to one thread
// at a time. In all structures but RnOptions, zero is the default.
#ifndef REGARD_NATIVE_H
#define REGARD_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#ifndef RN_API
#define RN_API
#endif

#ifdef __cplusplus
namespace rn {
struct Model;
struct Workspace;
class Search;
}  // namespace rn
typedef rn::Model RnModel;
typedef rn::Workspace RnWorkspace;
typedef rn::Search RnSearch;
extern "C" {
#else
typedef struct RnModel RnModel;          // packed weights
typedef struct RnWorkspace RnWorkspace;  // the memory of one thread for searches with one model
typedef struct RnSearch RnSearch;        // a search in steps
#endif

#ifdef RN_DOUBLE
typedef double RnReal;  // only in a build of the library for tests
#else
typedef float RnReal;
#endif

// Results of the functions that search and score.
typedef enum {
  RN_DONE,
  RN_OUT_OF_MEMORY,
  RN_NOT_NUMBERS,  // the scores of the model are not numbers; its weights are broken
  RN_INVALID,      // invalid options or inputs; see `problem`
  RN_RUNNING,      // only of rn_begin and rn_step
  RN_CANCELLED     // by the function in the options
} RnStatus;

// A model: numbers in the order in which the library reads them, and tensors with their sizes.
typedef struct {
  const double* numbers;
  size_t count;
  const float* const* tensors;
  const int64_t* sizes;
  const int64_t* rows;  // the first dimension of each tensor
  size_t tensor_count;
} RnDescription;

// One model, or several with the same target vocabulary, whose logits are averaged with `weights`, which sum to 1. Each
// model needs its own workspace; the first one has the memory of the search and its results.
typedef struct {
  int32_t count;  // 1 or more
  const RnModel* const* models;
  RnWorkspace* const* spaces;
  const double* weights;
} RnEnsemble;

// Options of a search; begin with those of `rn_default_options`.
typedef struct {
  int32_t beam;           // 1: greedy search
  int32_t keep;           // outputs per input
  int32_t exact;          // search until no open hypothesis can enter the list of outputs
  int32_t sentences;      // decoded at the same time, fewer if they need much memory
  int32_t blocked_count;  // of `blocked`
  int32_t no_repeat;      // no sequence of this many tokens occurs twice; 0: no limit
  int32_t samples;        // per input, all kept; 0: no sampling
  int32_t top_k;          // of samples; 0: all
  int32_t alternatives;   // outputs are the prefix and each of this many best tokens after it; 0: complete outputs
  int32_t top_tokens;     // most probable tokens to report after each step
  double length_penalty;  // outputs are ranked by score / length ** length_penalty
  double repetition_penalty;
  double temperature, top_p, min_p;  // of samples
  const int32_t* blocked;            // tokens that are never produced
  int32_t (*cancelled)(void);        // or null; called before each step: a result other than 0 ends the search
} RnOptions;

// The automaton of required and forbidden phrases and of stop strings, over `states` and the target vocabulary. Its
// tables are those of regard's decode/phrases.py.
typedef struct {
  const int32_t* next;  // [states][vocabulary]; null: no phrases
  const int16_t* met;   // bits of the requirements that the token meets
  const uint8_t* ban;
  const int16_t* stop;  // or null: no stop strings
  const int16_t* need;  // [subsets of requirements][states]: fewest tokens until the output may end
  int32_t states, subsets;
  int32_t stages;  // of progress that a beam keeps apart, and by which it is wider
} RnPhrases;

// Sources in token ids, one after the other, all of one model before those of the next; `source_end` is where each
// ends. Other lists of ids likewise, with one row per input. An array may be null if no input needs it.
typedef struct {
  int32_t count;
  const int32_t* sources;  // of a decoder-only model: prompts
  const int64_t* source_end;
  const int32_t* prefixes;
  const int64_t* prefix_end;
  const int32_t* limits;        // most output tokens, the end token not counted; never null
  const int32_t* minimums;      // fewest
  const uint8_t* open_ends;     // whether an output stops at its limit without an end token
  const int32_t* after_prefix;  // tokens that do not follow the prefix directly
  const int64_t* after_prefix_end;
  const float* noise;  // a number from 0 to 1 for each token of each sample
  int32_t noise_stride;
  const RnPhrases* phrases;
} RnInputs;

// An output of an input, best first; samples in their order. Its ids, with the end token, and their log-probabilities
// begin at `first` in the arrays of RnResults.
typedef struct {
  int64_t first;
  int32_t length;
  int32_t limited;  // whether it ended at the limit
  double value;     // by which it was ranked
} RnOutput;

// Results, in the memory of the first workspace; they are valid until its next use.
typedef struct {
  int32_t* counts;    // outputs of each input
  RnOutput* outputs;  // those of input i begin at i * keep
  int32_t* ids;
  RnReal* scores;
  const char* problem;  // of invalid options or inputs
} RnResults;

// The addition of one step to the first output of the first input, without a beam.
typedef struct {
  int32_t token;  // -1: the output has ended without a token
  int32_t top_count;
  double score;
  const int32_t* top_tokens;  // the most probable ones of this step
  const double* top_scores;
} RnStep;

// The results of a forced pass, in arrays of the caller.
typedef struct {
  int32_t top_tokens;
  int32_t blocked_count;
  int32_t head_count;
  const int32_t* blocked;  // tokens that are never among the most probable ones
  const int32_t* heads;    // cross-attention heads for alignments, each as layer and head
  RnReal* scores;          // the log-probability of each token of all outputs
  int32_t* top_ids;        // the most probable tokens at each position; -1: none
  RnReal* top_scores;
  RnReal* alignment;  // of each pair: mean weights of the heads, [output tokens][source tokens], zero before
} RnForced;

// The version of the library; empty if it was not built by the package.
RN_API const char* rn_version(void);

// A number computed from the sizes of the structures; a caller in another language compares it with its own.
RN_API int32_t rn_interface(void);

// The size of RnReal in bytes.
RN_API int32_t rn_score_size(void);

// The name of the fastest kernels for this machine (`name` null), or `name`, or null if those do not run here.
RN_API const char* rn_kernels(const char* name);

// A packed model, or null and the error. `kernels` is null, or a name for tests.
RN_API RnModel* rn_model(const RnDescription* description, int32_t int8, const char* kernels, const char** problem);
RN_API void rn_free_model(RnModel* model);

// A workspace, or null without memory. It is reused, and grows and shrinks with the searches.
RN_API RnWorkspace* rn_workspace(void);
RN_API void rn_free_workspace(RnWorkspace* workspace);

// Greedy search with one output.
RN_API RnOptions rn_default_options(void);

// Search the best outputs of every input.
RN_API int32_t rn_search(const RnEnsemble* ensemble, const RnOptions* options, const RnInputs* inputs,
                         RnResults* results);

// A search in steps, one token of each hypothesis at a time: rn_begin, then rn_step while the result is RN_RUNNING. The
// search lives in the first workspace.
RN_API int32_t rn_begin(const RnEnsemble* ensemble, const RnOptions* options, const RnInputs* inputs,
                        RnResults* results, RnSearch** search);
RN_API int32_t rn_step(RnSearch* search, RnStep* step);

// Score given outputs: the prefixes of `inputs`, with their end tokens and with their lengths as limits. Alignments are
// those of the first model.
RN_API int32_t rn_score(const RnEnsemble* ensemble, const RnInputs* inputs, const RnForced* forced,
                        const char** problem);

#ifdef __cplusplus
}
#endif

#endif
