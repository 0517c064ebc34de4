// Vectors of N lanes: one register where it holds them, otherwise pairs of halves, down to registers. GNU vectors wider
// than a register would do the same by themselves, but go through memory for it.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define ENGINE_INLINE inline __attribute__((always_inline))

namespace engine_cpu {
namespace ENGINE_ISA {

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64, kRegisterCount = 32;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32, kRegisterCount = 16;
#elif defined(__ARM_NEON)
constexpr int kRegisterBytes = 16, kRegisterCount = 32;
#else
constexpr int kRegisterBytes = 16, kRegisterCount = 16;
#endif
constexpr int kPartLanes = kRegisterBytes / 4;                        // 32-bit lanes of a register
constexpr int kWideRegisters = kRegisterBytes * kRegisterCount / 64;  // how many vectors of 16 x 32 bits they hold

template <class T, int N>
struct NativeLanes {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};

template <class H>
struct Pair;

// The lanes of a vector. Its parts follow the 32-bit lanes of a register, whatever the element: 16 x u16 lie in as many
// parts as 16 x f32, so that each widens by itself.
template <class T, int N, bool kOne = (N <= kPartLanes && N * sizeof(T) <= kRegisterBytes)>
struct LanesOf {
  using type = typename NativeLanes<T, N>::type;
};
template <class T, int N>
struct LanesOf<T, N, false> {
  using type = Pair<typename LanesOf<T, N / 2>::type>;
};
template <class T, int N>
using Lanes = typename LanesOf<T, N>::type;

template <class V>
struct Traits {
  using Element = std::remove_cv_t<std::remove_reference_t<decltype(std::declval<V&>()[0])>>;
  static constexpr int kLanes = sizeof(V) / sizeof(Element);
};
template <class H>
struct Traits<Pair<H>> {
  using Element = typename Traits<H>::Element;
  static constexpr int kLanes = 2 * Traits<H>::kLanes;
};
template <class V>
using ElementOf = typename Traits<V>::Element;

template <class H>
struct Pair {
  H lo, hi;

  ENGINE_INLINE ElementOf<H>& operator[](int i) { return reinterpret_cast<ElementOf<H>*>(this)[i]; }
  ENGINE_INLINE ElementOf<H> operator[](int i) const { return reinterpret_cast<const ElementOf<H>*>(this)[i]; }
};

// Operators lane by lane, on two pairs or a pair and a number, as GNU vectors have them.
#define ENGINE_PAIR_OPERATOR(op, Result)                                                                       \
  template <class H>                                                                                           \
  ENGINE_INLINE Result operator op(Pair<H> a, Pair<H> b) {                                                     \
    return {a.lo op b.lo, a.hi op b.hi};                                                                       \
  }                                                                                                            \
  template <class H>                                                                                           \
  ENGINE_INLINE Result operator op(Pair<H> a, ElementOf<Pair<H>> b) {                                          \
    return {a.lo op b, a.hi op b};                                                                             \
  }                                                                                                            \
  template <class H>                                                                                           \
  ENGINE_INLINE Result operator op(ElementOf<Pair<H>> a, Pair<H> b) {                                          \
    return {a op b.lo, a op b.hi};                                                                             \
  }
#define ENGINE_PAIR_ARITHMETIC(op)            \
  ENGINE_PAIR_OPERATOR(op, Pair<H>)           \
  template <class H, class B>                 \
  ENGINE_INLINE Pair<H>& operator op##=(Pair<H>& a, B b) { \
    return a = a op b;                        \
  }
#define ENGINE_PAIR_COMPARISON(op) ENGINE_PAIR_OPERATOR(op, PairMask<H>)

template <class H>
using PairMask = Lanes<int32_t, Traits<Pair<H>>::kLanes>;  // of comparisons of 32-bit lanes

ENGINE_PAIR_ARITHMETIC(+)
ENGINE_PAIR_ARITHMETIC(-)
ENGINE_PAIR_ARITHMETIC(*)
ENGINE_PAIR_ARITHMETIC(/)
ENGINE_PAIR_ARITHMETIC(&)
ENGINE_PAIR_ARITHMETIC(|)
ENGINE_PAIR_ARITHMETIC(^)
ENGINE_PAIR_ARITHMETIC(<<)
ENGINE_PAIR_ARITHMETIC(>>)
ENGINE_PAIR_COMPARISON(==)
ENGINE_PAIR_COMPARISON(!=)
ENGINE_PAIR_COMPARISON(<)
ENGINE_PAIR_COMPARISON(<=)
ENGINE_PAIR_COMPARISON(>)
ENGINE_PAIR_COMPARISON(>=)
#undef ENGINE_PAIR_OPERATOR
#undef ENGINE_PAIR_ARITHMETIC
#undef ENGINE_PAIR_COMPARISON

template <class H>
ENGINE_INLINE Pair<H> operator-(Pair<H> a) {
  return {-a.lo, -a.hi};
}
template <class H>
ENGINE_INLINE Pair<H> operator~(Pair<H> a) {
  return {~a.lo, ~a.hi};
}

// ---- loads, stores, bits: unaligned -----------------------------------------------------------------------------

template <class V>
constexpr bool kIsPair = false;
template <class H>
constexpr bool kIsPair<Pair<H>> = true;
template <class V>
using HalfOf = decltype(V::lo);

// Register kIndex of a vector, which has kPartsOf of them.
template <class V>
constexpr int kPartsOf = 1;
template <class H>
constexpr int kPartsOf<Pair<H>> = 2 * kPartsOf<H>;

template <int kIndex, class V>
ENGINE_INLINE auto& part_of(V& value) {
  if constexpr (kPartsOf<std::remove_const_t<V>> == 1) {
    return value;
  } else {
    constexpr int kHalf = kPartsOf<HalfOf<std::remove_const_t<V>>>;
    if constexpr (kIndex < kHalf)
      return part_of<kIndex>(value.lo);
    else
      return part_of<kIndex - kHalf>(value.hi);
  }
}

// visit(index) for each of the indices, which are constants.
template <int... kIndices, class Visit>
ENGINE_INLINE void each_part(std::integer_sequence<int, kIndices...>, Visit visit) {
  (visit(std::integral_constant<int, kIndices>{}), ...);
}

template <class V>
ENGINE_INLINE V load_as(const void* source) {
  if constexpr (kIsPair<V>) {
    return {load_as<HalfOf<V>>(source), load_as<HalfOf<V>>(static_cast<const uint8_t*>(source) + sizeof(V) / 2)};
  } else {
    V value;
    std::memcpy(&value, source, sizeof(V));
    return value;
  }
}

template <class V>
ENGINE_INLINE void store(void* target, V value) {
  if constexpr (kIsPair<V>) {
    store(target, value.lo);
    store(static_cast<uint8_t*>(target) + sizeof(V) / 2, value.hi);
  } else {
    std::memcpy(target, &value, sizeof(V));
  }
}

template <class To, class From>
ENGINE_INLINE To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  if constexpr (kIsPair<To> && kIsPair<From>) {
    return {bit_cast<HalfOf<To>>(value.lo), bit_cast<HalfOf<To>>(value.hi)};
  } else {
    To result;
    std::memcpy(&result, &value, sizeof(To));
    return result;
  }
}

// ---- broadcasts -------------------------------------------------------------------------------------------------

template <class V, int... I>
ENGINE_INLINE V fill_register(ElementOf<V> x, std::integer_sequence<int, I...>) {
  return V{(static_cast<void>(I), x)...};
}

template <class V>
ENGINE_INLINE V splat_as(ElementOf<V> x) {
  if constexpr (kIsPair<V>)
    return {splat_as<HalfOf<V>>(x), splat_as<HalfOf<V>>(x)};
  else
    return fill_register<V>(x, std::make_integer_sequence<int, Traits<V>::kLanes>());
}

// ---- the lanes of two in turn: a0 b0 a1 b1 ... ------------------------------------------------------------------

template <class V, int... I>
ENGINE_INLINE void zip_register(V a, V b, V& low, V& high, std::integer_sequence<int, I...>) {
  constexpr int N = sizeof...(I);
  low = __builtin_shufflevector(a, b, (I / 2 + I % 2 * N)...);
  high = __builtin_shufflevector(a, b, (N / 2 + I / 2 + I % 2 * N)...);
}

template <class V>
ENGINE_INLINE void zip(V a, V b, V& low, V& high) {
  if constexpr (kIsPair<V>) {
    zip(a.lo, b.lo, low.lo, low.hi);
    zip(a.hi, b.hi, high.lo, high.hi);
  } else {
    zip_register(a, b, low, high, std::make_integer_sequence<int, Traits<V>::kLanes>());
  }
}

// ---- conversion of each lane's number ---------------------------------------------------------------------------

// What takes other instructions than a compiler finds is in simd.h and simd_storage.h.
template <class To, class From>
ENGINE_INLINE To convert(From x) {
  static_assert(Traits<To>::kLanes == Traits<From>::kLanes, "lane by lane");
  constexpr int kHalf = Traits<To>::kLanes / 2;
  if constexpr (!kIsPair<To> && !kIsPair<From>) {
    return __builtin_convertvector(x, To);
  } else {
    using FromHalf = typename NativeLanes<ElementOf<From>, kHalf>::type;
    using ToHalf = typename NativeLanes<ElementOf<To>, kHalf>::type;
    if constexpr (kIsPair<To> && kIsPair<From>) {
      return {convert<HalfOf<To>>(x.lo), convert<HalfOf<To>>(x.hi)};
    } else if constexpr (kIsPair<To>) {
      const auto halves = bit_cast<Pair<FromHalf>>(x);
      return {convert<HalfOf<To>>(halves.lo), convert<HalfOf<To>>(halves.hi)};
    } else {
      return bit_cast<To>(Pair<ToHalf>{convert<ToHalf>(x.lo), convert<ToHalf>(x.hi)});
    }
  }
}

// ---- functions of one register, carried over to pairs -----------------------------------------------------------

#define ENGINE_CARRY1(name)                  \
  template <class H>                         \
  ENGINE_INLINE auto name(Pair<H> a) {       \
    using Half = decltype(name(a.lo));       \
    return Pair<Half>{name(a.lo), name(a.hi)}; \
  }
#define ENGINE_CARRY2(name)                               \
  template <class H>                                      \
  ENGINE_INLINE Pair<H> name(Pair<H> a, Pair<H> b) {      \
    return {name(a.lo, b.lo), name(a.hi, b.hi)};          \
  }

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
