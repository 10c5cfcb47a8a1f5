// Vectors of 64 bytes for every processor, with the operators that gcc gives its own.
//
// gcc takes a vector that is wider than the processor's registers apart by way of memory: ten times slower than two vectors side by
// side, which this is (four where registers have 16 bytes). Numbers are the same: each lane is computed alone.

#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

#if defined(__AVX512F__)
constexpr int native_bytes = 64;
#elif defined(__AVX2__)
constexpr int native_bytes = 32;
#else
constexpr int native_bytes = 16;
#endif

// A vector of the processor's own.
template <typename T>
struct Native {
  typedef T type __attribute__((vector_size(native_bytes)));
};

#if defined(__AVX512F__)

typedef float f16v __attribute__((vector_size(64)));
typedef uint32_t u16v __attribute__((vector_size(64)));
typedef int32_t i16v __attribute__((vector_size(64)));

template <typename M, typename V>
inline V chosen(M mask, V a, V b) {
  return mask ? a : b;
}

inline i16v whole_of(f16v x) { return __builtin_convertvector(x, i16v); }  // towards zero
inline f16v float_of(i16v x) { return __builtin_convertvector(x, f16v); }

#else

template <typename T, int bytes>
struct Wide {
  using Half = typename std::conditional_t<bytes == 2 * native_bytes, Native<T>, std::type_identity<Wide<T, bytes / 2>>>::type;
  using Mask = Wide<int32_t, bytes>;
  Half lo, hi;

  T operator[](int i) const {
    T all[bytes / sizeof(T)];
    std::memcpy(all, this, bytes);
    return all[i];
  }
  template <typename U>
  explicit operator Wide<U, bytes>() const {  // the same bits
    return std::bit_cast<Wide<U, bytes>>(*this);
  }
  Wide operator~() const { return {~lo, ~hi}; }
  Wide operator>>(int n) const { return {lo >> n, hi >> n}; }
  Wide operator<<(int n) const { return {lo << n, hi << n}; }
#define SAKIYOMI_OPERATOR(op)                                                                \
  friend inline Wide operator op(Wide a, Wide b) { return {a.lo op b.lo, a.hi op b.hi}; }    \
  friend inline Wide operator op(Wide a, T b) { return {a.lo op b, a.hi op b}; }             \
  friend inline Wide operator op(T a, Wide b) { return {a op b.lo, a op b.hi}; }             \
  Wide& operator op##=(Wide b) { return *this = *this op b; }                                \
  Wide& operator op##=(T b) { return *this = *this op b; }
  SAKIYOMI_OPERATOR(+)
  SAKIYOMI_OPERATOR(-)
  SAKIYOMI_OPERATOR(*)
  SAKIYOMI_OPERATOR(/)
#undef SAKIYOMI_OPERATOR
#define SAKIYOMI_OPERATOR(op)                                                                \
  friend inline Wide operator op(Wide a, Wide b) { return {a.lo op b.lo, a.hi op b.hi}; }    \
  friend inline Wide operator op(Wide a, T b) { return {a.lo op b, a.hi op b}; }             \
  Wide& operator op##=(Wide b) { return *this = *this op b; }
  SAKIYOMI_OPERATOR(&)
  SAKIYOMI_OPERATOR(|)
  SAKIYOMI_OPERATOR(^)
#undef SAKIYOMI_OPERATOR
#define SAKIYOMI_OPERATOR(op)                                                                                                      \
  friend inline Mask operator op(Wide a, Wide b) { return {half_mask(a.lo op b.lo), half_mask(a.hi op b.hi)}; }                    \
  friend inline Mask operator op(Wide a, T b) { return {half_mask(a.lo op b), half_mask(a.hi op b)}; }
  SAKIYOMI_OPERATOR(<)
  SAKIYOMI_OPERATOR(>)
  SAKIYOMI_OPERATOR(>=)
  SAKIYOMI_OPERATOR(!=)
#undef SAKIYOMI_OPERATOR

 private:
  template <typename M>
  static typename Mask::Half half_mask(M mask) {
    return (typename Mask::Half)mask;
  }
};

using f16v = Wide<float, 64>;
using u16v = Wide<uint32_t, 64>;
using i16v = Wide<int32_t, 64>;

template <typename M, typename V>
inline V chosen(M mask, V a, V b) {
  if constexpr (requires { a.lo; })
    return V{chosen(mask.lo, a.lo, b.lo), chosen(mask.hi, a.hi, b.hi)};
  else
    return mask ? a : b;
}

template <typename To, typename From>
inline To turned_into(From x) {
  if constexpr (requires { x.lo; })
    return To{turned_into<typename To::Half>(x.lo), turned_into<typename To::Half>(x.hi)};
  else
    return __builtin_convertvector(x, To);
}

inline i16v whole_of(f16v x) { return turned_into<i16v>(x); }  // towards zero
inline f16v float_of(i16v x) { return turned_into<f16v>(x); }

#endif

// A vector from memory, and to memory. A copy of all 64 bytes at once would go by way of the stack, in pieces that do not fit.
template <typename V>
inline V load(const void* from) {
  V y;
#if !defined(__AVX512F__)
  if constexpr (requires { y.lo; })
    return {load<typename V::Half>(from), load<typename V::Half>((const char*)from + sizeof(V) / 2)};
#endif
  std::memcpy(&y, from, sizeof(V));
  return y;
}

template <typename V>
inline void store(void* to, V x) {
#if !defined(__AVX512F__)
  if constexpr (requires { x.lo; }) {
    store(to, x.lo), store((char*)to + sizeof(V) / 2, x.hi);
    return;
  }
#endif
  std::memcpy(to, &x, sizeof(V));
}

}  // namespace
