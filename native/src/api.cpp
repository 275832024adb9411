// The C interface, which include/regard_native.h describes.
#if defined(_WIN32)
#define RN_API __declspec(dllexport)
#else
#define RN_API __attribute__((visibility("default")))
#endif

#include <cfenv>
#include <cstring>
#include <new>

#include "search.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#ifndef RN_VERSION
#define RN_VERSION ""
#endif

using namespace rn;

namespace {

#if defined(__x86_64__)
// Add the kernels for this processor and operating system, fastest first. This reads CPUID, because
// __builtin_cpu_supports needs a runtime library that zig does not have.
void add_usable(const Kernels** usable, int* count) {
  uint32_t a, b, c, d, state = 0, high;
  if (__get_cpuid(1, &a, &b, &c, &d) && (c & bit_OSXSAVE)) __asm__("xgetbv" : "=a"(state), "=d"(high) : "c"(0));
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
  // The operating system saves the registers: 0x6 for those of AVX2, 0xE6 for those of AVX-512.
  constexpr uint32_t AVX512 = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
  if ((state & 0xE6) == 0xE6 && (b & AVX512) == AVX512 && (c & bit_AVX512VNNI)) usable[(*count)++] = &AVX512_KERNELS;
  if ((state & 0x6) == 0x6 && (b & bit_AVX2)) usable[(*count)++] = &AVX2_KERNELS;
}
#elif defined(__aarch64__) && (defined(__linux__) || defined(__APPLE__))
void add_usable(const Kernels** usable, int* count) {
#if defined(__linux__)
  constexpr unsigned long DOT_PRODUCT = 1 << 20;  // HWCAP_ASIMDDP
  if (!(getauxval(AT_HWCAP) & DOT_PRODUCT)) return;
#endif
  usable[(*count)++] = &DOTPROD_KERNELS;  // every Apple processor has these instructions
}
#else
void add_usable(const Kernels**, int*) {}
#endif

// The fastest kernels that run here, or those with `name`, or null.
const Kernels* choose_kernels(const char* name) {
  const Kernels* usable[3] = {};
  int count = 0;
  add_usable(usable, &count);
  usable[count++] = &PORTABLE_KERNELS;
  for (int i = 0; i < count; i++)
    if (!name || !strcmp(name, usable[i]->name)) return usable[i];
  return nullptr;
}

// The default environment of floating-point numbers for one call: another library of the process may have changed the
// rounding or switched denormal numbers off, which would change bits.
class DefaultEnvironment {
 public:
  DefaultEnvironment() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultEnvironment() { std::fesetenv(&before_); }

 private:
  std::fenv_t before_;
};

}  // namespace

const char* rn_version() { return RN_VERSION; }

int32_t rn_interface() {
  const size_t sizes[] = {sizeof(Description), sizeof(Ensemble), sizeof(Options), sizeof(Inputs), sizeof(Phrases),
                          sizeof(Results),     sizeof(Output),   sizeof(Forced),  sizeof(Step)};
  int32_t sum = 0, factor = 1;
  for (const size_t size : sizes) sum += int32_t(size) * factor, factor *= 5;
  return sum;
}

int32_t rn_score_size() { return int32_t(sizeof(real)); }

const char* rn_kernels(const char* name) {
  const Kernels* kernels = choose_kernels(name);
  return kernels ? kernels->name : nullptr;
}

Model* rn_model(const Description* description, int32_t int8, const char* kernels, const char** problem) {
  const DefaultEnvironment environment;
  const Kernels* chosen = choose_kernels(kernels);
  *problem = "these kernels do not run on this machine";
  if (!chosen) return nullptr;
  Model* model = new (std::nothrow) Model();
  *problem = "not enough memory for the model";
  if (!model) return nullptr;
  *problem = read_model(*description, int8 != 0, chosen, model);
  if (!*problem) return model;
  delete model;
  return nullptr;
}

void rn_free_model(Model* model) { delete model; }

Workspace* rn_workspace() { return new (std::nothrow) Workspace(); }

void rn_free_workspace(Workspace* workspace) { delete workspace; }

Options rn_default_options() {
  Options options = {};
  options.beam = options.keep = 1;
  options.sentences = 32;
  options.length_penalty = options.repetition_penalty = options.temperature = options.top_p = 1;
  return options;
}

int32_t rn_search(const Ensemble* ensemble, const Options* options, const RnInputs* inputs, Results* results) {
  const DefaultEnvironment environment;
  return search(*ensemble, *options, Inputs(*inputs), results);
}

int32_t rn_begin(const Ensemble* ensemble, const Options* options, const RnInputs* inputs, Results* results,
                        Search** search) {
  const DefaultEnvironment environment;
  return begin(*ensemble, *options, Inputs(*inputs), results, search);
}

int32_t rn_step(Search* search, Step* step) {
  const DefaultEnvironment environment;
  return advance(search, step);
}

int32_t rn_score(const Ensemble* ensemble, const RnInputs* inputs, const Forced* forced, const char** problem) {
  const DefaultEnvironment environment;
  return score(*ensemble, Inputs(*inputs), *forced, problem);
}
