// The facts of a call that argument rules (python/gqa_attn/_rules.py, generated/rules.h) look at, and their texts.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <string_view>

namespace gqa_attn::rules {

using std::isfinite;

struct Shape {
  const int64_t* sizes = nullptr;
  int64_t rank = 0;

  bool operator==(const Shape& other) const { return std::equal(sizes, sizes + rank, other.sizes, other.sizes + other.rank); }
  bool operator==(std::initializer_list<int64_t> other) const {
    return std::equal(sizes, sizes + rank, other.begin(), other.end());
  }
};

struct Device {
  std::string_view type;
  int32_t index = -1;

  bool operator==(const Device& other) const { return type == other.type && index == other.index; }
};

// The last four sizes have names; a size that the tensor lacks is 1.
struct TensorFacts {
  bool given = false;
  int64_t rank = 0;
  Shape shape;
  std::string_view dtype;
  Device device;
  std::string_view layout = "NoneType";
  int64_t batch = 1;
  int64_t seqlen = 1;
  int64_t heads = 1;
  int64_t head_dim = 1;
};

// Facts as Python's messages show them.
inline std::string text(std::string_view fact) { return std::string(fact); }
inline std::string text(int64_t fact) { return std::to_string(fact); }
inline std::string text(bool fact) { return fact ? "True" : "False"; }
inline std::string text(double fact) {
  if (std::isnan(fact)) return "nan";
  char digits[32];
  std::snprintf(digits, sizeof digits, "%g", fact);
  return digits;
}
inline std::string text(const Shape& fact) {
  std::string sizes;
  for (int64_t i = 0; i < fact.rank; ++i) sizes += (i ? ", " : "") + std::to_string(fact.sizes[i]);
  return "[" + sizes + "]";
}
inline std::string text(const Device& fact) {
  return fact.index < 0 ? text(fact.type) : text(fact.type) + ":" + std::to_string(fact.index);
}

}  // namespace gqa_attn::rules
