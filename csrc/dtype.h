// Element types: what a bool element is, what a type accumulates in, and the one dispatch from a dtype to a type.
#pragma once

#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <type_traits>

namespace maskwise {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;

// An element of a bool tensor. Any byte but 0 is true, which `bool` itself would not promise: a mask may come from an
// image of 0 and 255.
struct Bool {
  uint8_t byte;
  Bool() = default;
  template <class T>
  explicit Bool(T value) : byte(value != T(0)) {}
  operator uint8_t() const { return byte != 0; }
};

template <class T>
constexpr bool kIntegral = std::is_integral_v<T> || std::is_same_v<T, Bool>;
template <class T>
constexpr bool kFloating = !kIntegral<T>;

// The signed integer as wide as T.
template <class T>
using BitsOf = std::conditional_t<
    sizeof(T) == 8, int64_t,
    std::conditional_t<sizeof(T) == 4, int32_t, std::conditional_t<sizeof(T) == 2, int16_t, int8_t>>>;

// What a type is accumulated in: float for itself and the narrower floats, double, or int64.
template <class T>
using Acc = std::conditional_t<kIntegral<T>, int64_t, std::conditional_t<sizeof(T) == 8, double, float>>;

inline bool is_floating(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::Half ||
         dtype == ScalarType::BFloat16;
}

// Calls call(T{}) for the dtype, among the floating types.
template <class Call>
void dispatch_floating(ScalarType dtype, const Call& call) {
  switch (dtype) {
    case ScalarType::Float: return call(float{});
    case ScalarType::Double: return call(double{});
    case ScalarType::Half: return call(Half{});
    case ScalarType::BFloat16: return call(BFloat16{});
    default: STD_TORCH_CHECK(false, "maskwise: a kernel was called with a dtype that it does not take");
  }
}

// Calls call(T{}) for the dtype, among the floating and the integer types.
template <class Call>
void dispatch_numeric(ScalarType dtype, const Call& call) {
  switch (dtype) {
    case ScalarType::Long: return call(int64_t{});
    case ScalarType::Int: return call(int32_t{});
    case ScalarType::Short: return call(int16_t{});
    case ScalarType::Char: return call(int8_t{});
    case ScalarType::Byte: return call(uint8_t{});
    default: return dispatch_floating(dtype, call);
  }
}

// Calls call(T{}) for the dtype, among the floating and the integer types and bool.
template <class Call>
void dispatch_any(ScalarType dtype, const Call& call) {
  if (dtype == ScalarType::Bool) return call(Bool{});
  dispatch_numeric(dtype, call);
}

// Calls call(T{}) with the unsigned integer of so many bytes: for kernels that only move elements.
struct Bytes16 {
  uint64_t low, high;
};
template <class Call>
void dispatch_bytes(int64_t bytes, const Call& call) {
  switch (bytes) {
    case 1: return call(uint8_t{});
    case 2: return call(uint16_t{});
    case 4: return call(uint32_t{});
    case 8: return call(uint64_t{});
    case 16: return call(Bytes16{});
    default: STD_TORCH_CHECK(false, "maskwise: a kernel was called with a dtype that it does not take");
  }
}

}  // namespace maskwise
