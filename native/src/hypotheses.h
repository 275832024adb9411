// The hypotheses of a search, and the nodes of their tokens, which form trees.
#pragma once

#include "rules.h"

namespace rn {

// Numbers of nodes. A node is free again when no hypothesis and no later node needs it.
class Nodes {
 public:
  bool reserve(int count, Arena* arena) {
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
  int number;  // of a sample
  Progress progress;
};

// A token of an output, with the one before it.
struct Past {
  int before, token;
  real score;
};

struct Finished {
  real value;
  int back;       // the last token before the end
  int length;     // up to there
  int token = 0;  // the last one, or -1
  real score = 0;
  int number = 0;  // of a sample
};

struct Sentence {
  int input = -1;  // -1: free
  int step = 0;
  int width = 1;        // hypotheses that continue
  bool closed = false;  // the best output is final
  int alive = 0;
  int ended = 0;
  int finished = 0;
  int past = 0;
  int prompt = 0;  // the length of the longest one of the models
  Encoded* sources = nullptr;  // of each model
  Hypothesis* hypotheses = nullptr;  // the current ones, then as much space for the next
  Past* history = nullptr;
  Finished* best = nullptr;
};

struct Choice {
  real value;
  int parent, token;
  real score;
  bool end;
  int stage;
  int turn;
  Progress progress;
};

inline bool better(const Choice& a, const Choice& b) {
  if (a.value != b.value) return a.value > b.value;
  if (a.end != b.end) return a.end;
  if (a.parent != b.parent) return a.parent < b.parent;
  return a.token < b.token;
}

}  // namespace rn
