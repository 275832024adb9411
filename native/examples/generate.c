// Print the best output of every line of standard input and its score, with a file written by `regard-native pack`.
// For models with an encoder whose tokens are characters, or are separated by spaces. Needs a little-endian machine.
#include <regard_native.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BEAM = 5, MAX_LINE = 1 << 16, VERSION = 1, CHARACTERS = 0, SPACES = 2 };

// The numbers after the magic of a file, in its order.
typedef struct {
  int32_t version, int8, continues, source_scheme, target_scheme, source_unk, target_unk, eos;
  int32_t positions, ratio, extra;  // limits of an output
  int32_t numbers, tensors, before, after, blocked, source_tokens, source_bytes, target_tokens, target_bytes;
} Header;

// The tokens of a side: their texts follow each other, `end` is where each ends.
typedef struct {
  int32_t count, unk;
  const int32_t* end;
  const char* text;
} Vocabulary;

static void fail(const char* message) {
  fprintf(stderr, "generate: %s\n", message);
  exit(2);
}

static void* allocate(size_t count, size_t size) {
  void* memory = calloc(count + 1, size);
  if (!memory) fail("there is not enough memory");
  return memory;
}

// The next `count` values of the file.
static const char* file;
static size_t left;
static const void* take(int64_t count, size_t size) {
  const char* start = file;
  if (count < 0 || (uint64_t)count > left / size) fail("the file is damaged: it ends too early");
  file += (size_t)count * size;
  left -= (size_t)count * size;
  return start;
}

static void read_file(const char* path) {
  FILE* stream = fopen(path, "rb");
  long size = -1;
  if (stream && !fseek(stream, 0, SEEK_END)) size = ftell(stream);
  if (size < 0) fail("the file cannot be read");
  rewind(stream);
  char* data = allocate((size_t)size, 1);
  left = fread(data, 1, (size_t)size, stream);
  file = data;
  fclose(stream);
}

static const int32_t* take_ends(int32_t count, int32_t bytes) {
  const int32_t* end = take(count, sizeof *end);
  for (int32_t i = 0; i < count; i++)
    if (end[i] < (i ? end[i - 1] : 0) || end[i] > bytes) fail("the file is damaged: a vocabulary is not in order");
  return end;
}

static int32_t id_of(const Vocabulary* v, const char* text, int32_t length) {
  for (int32_t i = 0, start = 0; i < v->count; start = v->end[i++])
    if (v->end[i] - start == length && i != v->unk && !memcmp(v->text + start, text, (size_t)length)) return i;
  return v->unk;
}

// The ids of a text -> their number, at most that of its bytes.
static int32_t encode(const Vocabulary* v, int32_t scheme, const char* text, int32_t* ids) {
  int32_t count = 0;
  while (*text) {
    int32_t length = 1;
    if (scheme == SPACES)
      length = (int32_t)strcspn(text, " ");
    else
      while ((text[length] & 0xC0) == 0x80) length++;  // further bytes of a character in UTF-8
    if (length) ids[count++] = id_of(v, text, length);
    text += length ? length : 1;
  }
  return count;
}

static void print_tokens(const Vocabulary* v, int32_t scheme, const int32_t* ids, int32_t count) {
  for (int32_t k = 0, printed = 0; k < count; k++) {
    const int32_t start = ids[k] > 0 && ids[k] < v->count ? v->end[ids[k] - 1] : 0;
    const int32_t end = ids[k] < v->count ? v->end[ids[k]] : 0;
    if (end <= start) continue;  // a special token
    if (scheme == SPACES && printed++) putchar(' ');
    fwrite(v->text + start, 1, (size_t)(end - start), stdout);
  }
}

int main(int argc, char** argv) {
  if (argc != 2) fail("usage: generate FILE < LINES");
  read_file(argv[1]);
  if (left < 8 || memcmp(take(8, 1), "regardrn", 8)) fail("this is not a file of regard-native pack");
  const Header* h = take(1, sizeof *h);
  if (h->version != VERSION) fail("the file has another version");
  if (h->continues) fail("this program does not read language models");
  if ((h->source_scheme != CHARACTERS && h->source_scheme != SPACES) ||
      (h->target_scheme != CHARACTERS && h->target_scheme != SPACES))
    fail("this program reads models of characters and of tokens separated by spaces; this one has other tokens");

  const double* numbers = take(h->numbers, sizeof *numbers);
  const int64_t* sizes = take(h->tensors, sizeof *sizes);
  const int64_t* rows = take(h->tensors, sizeof *rows);
  const float** tensors = allocate((size_t)h->tensors, sizeof *tensors);
  for (int32_t i = 0; i < h->tensors; i++) tensors[i] = take(sizes[i], sizeof(float));
  const RnDescription description = {numbers, (size_t)h->numbers, tensors, sizes, rows, (size_t)h->tensors};
  const int32_t* before = take(h->before, sizeof *before);
  const int32_t* after = take(h->after, sizeof *after);
  RnOptions options = rn_default_options();
  options.beam = BEAM;
  options.blocked = take(options.blocked_count = h->blocked, sizeof(int32_t));
  Vocabulary source = {h->source_tokens, h->source_unk, take_ends(h->source_tokens, h->source_bytes), NULL};
  Vocabulary target = {h->target_tokens, h->target_unk, take_ends(h->target_tokens, h->target_bytes), NULL};
  source.text = take(h->source_bytes, 1);
  target.text = take(h->target_bytes, 1);
  if (left) fail("the file is damaged: it is too long");

  const char* problem = NULL;
  RnModel* model = rn_model(&description, h->int8, NULL, &problem);
  if (!model) fail(problem);
  RnWorkspace* workspace = rn_workspace();
  if (!workspace) fail("there is not enough memory");
  const RnModel* models[] = {model};
  RnWorkspace* spaces[] = {workspace};
  const RnEnsemble ensemble = {1, models, spaces, NULL};

  static char line[MAX_LINE];
  int32_t* ids = allocate((size_t)h->before + MAX_LINE + (size_t)h->after, sizeof *ids);
  memcpy(ids, before, (size_t)h->before * sizeof *ids);
  while (fgets(line, MAX_LINE, stdin)) {
    line[strcspn(line, "\r\n")] = 0;
    const int32_t tokens = encode(&source, h->source_scheme, line, ids + h->before);
    memcpy(ids + h->before + tokens, after, (size_t)h->after * sizeof *ids);
    const int64_t count = (int64_t)h->before + tokens + h->after;
    const int64_t wanted = h->ratio * (count - 1) + h->extra;
    const int32_t limit = wanted < h->positions ? (int32_t)wanted : h->positions;
    const RnInputs inputs = {.count = 1, .sources = ids, .source_end = &count, .limits = &limit};
    RnResults results = {0};
    const int32_t status = rn_search(&ensemble, &options, &inputs, &results);
    if (status == RN_INVALID) fail(results.problem);
    if (status != RN_DONE) fail(status == RN_OUT_OF_MEMORY ? "there is not enough memory" : "the scores are not numbers");
    const RnOutput* best = results.outputs;
    const int32_t length = results.counts[0] ? best->length : 0;  // no output if the rules allow none
    double score = 0;
    for (int32_t k = 0; k < length; k++) score += results.scores[best->first + k];
    print_tokens(&target, h->target_scheme, results.ids + best->first, length);
    printf("\t%.6f\n", score);
  }
  rn_free_workspace(workspace);
  rn_free_model(model);
  return 0;
}
