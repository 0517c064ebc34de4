// The integer dot product of the quantized kernels: lanes of u8 x 4 times i8 x 4, added up as i32.
#pragma once

#include "../simd.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// Bytes of up to kMost are wide where an instruction that takes one factor's bytes as signed cannot have them.
constexpr bool is_wide(int most) { return most > 127; }

// What products of wide bytes take off them by themselves.
#if defined(__ARM_NEON)
constexpr int kWideBase = 128;
#else
constexpr int kWideBase = 0;
#endif

#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
// Unpacked bytes of different kMost are of one kind where they are multiplied by the same instructions, or nearly so.
constexpr int kind_of_bytes(int most) { return most <= 15 ? 15 : most <= 31 ? 31 : most; }

// Where one row or two share them, wide bytes are 16-bit words, whose sums take a register each; beside more rows they are two
// numbers of four bits, whose sums take two and are put together at the end.
template <int kMost>
constexpr bool multiplies_words(int rows) {
  return is_wide(kMost) && rows <= 2;
}

// Two products of bytes up to kMost fit in 16 bits, and so do sums of that many such pairs.
template <int kMost>
constexpr int kPairsInWord = 32767 / (2 * 128 * (is_wide(kMost) ? 15 : kMost));

// How many registers a sum of kSteps products takes, and a step of the weights. Pairs that are widened one by one leave nothing
// but the sum.
template <int kMost, int kSteps, bool kWords>
constexpr int kSumRegisters =
    !kWords && (is_wide(kMost) || (kSteps > kPairsInWord<kMost> && kPairsInWord<kMost> > 1)) ? 2 : 1;
template <int kMost>
constexpr int kStepRegisters = is_wide(kMost) ? 2 : 1;

// 4 consecutive k of unsigned bytes in every lane, as they are multiplied with several rows: low and high numbers of four bits, or
// even and odd bytes as words.
template <int kMost, bool kWords>
struct ByteStep {
  __m256i parts[kStepRegisters<kMost>];

  ByteStep() = default;
  ENGINE_INLINE explicit ByteStep(u32_part w) {
    const auto bytes = bit_cast<__m256i>(w);
    parts[0] = bytes;
    if constexpr (is_wide(kMost)) {
      const __m256i low = kWords ? _mm256_set1_epi16(255) : _mm256_set1_epi8(15);
      parts[0] = _mm256_and_si256(bytes, low);
      parts[1] = _mm256_srli_epi16(bytes, kWords ? 8 : 4);
      if constexpr (!kWords) parts[1] = _mm256_and_si256(parts[1], low);
    }
  }
};

// 4 consecutive k of a row in every lane: bytes, or even and odd ones as words.
template <int kMost, bool kWords>
struct RowStep {
  __m256i parts[kWords ? 2 : 1];

  ENGINE_INLINE explicit RowStep(i32_part a) {
    const auto bytes = bit_cast<__m256i>(a);
    parts[0] = kWords ? _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8) : bytes;
    if constexpr (kWords) parts[1] = _mm256_srai_epi16(bytes, 8);
  }
};

// start + the sum of kSteps products of bytes of up to kMost with signed ones, exactly: `add` each step in order.
template <int kMost, int kSteps, bool kWords>
class ByteSum {
 public:
  ENGINE_INLINE void begin(i32_part) {}

  template <int kStep>
  ENGINE_INLINE void add(ByteStep<kMost, kWords> w, RowStep<kMost, kWords> a) {
    if constexpr (kWords) {
      add_words<2 * kStep>(low_, w.parts[0], a.parts[0]);
      add_words<2 * kStep + 1>(low_, w.parts[1], a.parts[1]);
    } else if constexpr (kPairs == 1) {
      __m256i pair;
      add_bytes<kStep>(pair, w.parts[0], a.parts[0]);
      sum_ = kStep == 0 ? widened(pair, 1) : sum_ + widened(pair, 1);
      asm("" : "+x"(sum_));  // or g++ 12 keeps the terms, on the stack
    } else {
      add_bytes<kStep>(low_, w.parts[0], a.parts[0]);
      if constexpr (is_wide(kMost)) add_bytes<kStep>(high_, w.parts[1], a.parts[0]);
      if constexpr (!kOnce && (kStep + 1) % kPairs == 0 && kStep + 1 < kSteps) {
        const i32_part sum = widened(low_, 1);
        sum_ = kStep + 1 == kPairs ? sum : sum_ + sum;
      }
    }
  }

  ENGINE_INLINE i32_part end(i32_part start) const {
    if constexpr (kWords) return bit_cast<i32_part>(low_) + start;
    if constexpr (kPairs == 1) return sum_ + start;
    i32_part sum = widened(low_, 1);
    if constexpr (is_wide(kMost)) sum += widened(high_, 16);
    if constexpr (!kOnce) sum += sum_;
    return sum + start;
  }

 private:
  static constexpr int kPairs = kPairsInWord<kMost>;
  static constexpr bool kOnce = kSteps <= kPairs;
  static_assert(!is_wide(kMost) || kOnce);

  // Not the intrinsics in either: g++ 12 multiplies in another order, with all the terms on the stack first.
  template <int kStep>
  ENGINE_INLINE static void add_bytes(__m256i& sums, __m256i w, __m256i a) {
    __m256i pairs;
    if constexpr (kStep % kPairs == 0)
      asm volatile("vpmaddubsw %2, %1, %0" : "=x"(sums) : "x"(w), "x"(a));
    else
      asm volatile("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sums), "=&x"(pairs) : "x"(w), "x"(a));
  }
  template <int kTerm>
  ENGINE_INLINE static void add_words(__m256i& sums, __m256i w, __m256i a) {
    __m256i pairs;
    if constexpr (kTerm == 0)
      asm volatile("vpmaddwd %2, %1, %0" : "=x"(sums) : "x"(w), "x"(a));
    else
      asm volatile("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sums), "=&x"(pairs) : "x"(w), "x"(a));
  }
  ENGINE_INLINE static i32_part widened(__m256i words, int16_t factor) {
    return bit_cast<i32_part>(_mm256_madd_epi16(words, _mm256_set1_epi16(factor)));
  }

  __m256i low_, high_;
  i32_part sum_;
};
#else
#if defined(__ARM_NEON)
constexpr int kind_of_bytes(int most) { return is_wide(most) ? 255 : 127; }
#else
constexpr int kind_of_bytes(int) { return 255; }
#endif

template <int>
constexpr bool multiplies_words(int) {
  return false;
}
template <int kMost, int kSteps, bool>
constexpr int kSumRegisters = 1;
template <int kMost>
constexpr int kStepRegisters = 1;

template <int kMost, bool>
struct ByteStep {
  u32_part bytes;

  ByteStep() = default;
  ENGINE_INLINE explicit ByteStep(u32_part w) : bytes(w) {}
};

template <int kMost, bool>
struct RowStep {
  i32_part bytes;

  ENGINE_INLINE explicit RowStep(i32_part a) : bytes(a) {}
};

template <int kMost, int kSteps, bool kWords>
class ByteSum {
 public:
  ENGINE_INLINE void begin(i32_part start) { sum_ = start; }
  ENGINE_INLINE i32_part end(i32_part) const { return sum_; }

  template <int>
  ENGINE_INLINE void add(ByteStep<kMost, kWords> w, RowStep<kMost, kWords> a) {
#if defined(__AVX512VNNI__)
    // Not the intrinsic: g++ 12 spills accumulators around it.
    asm("vpdpbusd %2, %1, %0" : "+v"(sum_) : "v"(w.bytes), "v"(a.bytes));
#elif defined(__AVXVNNI__)
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum_) : "x"(w.bytes), "x"(a.bytes));
#elif defined(__ARM_NEON)
    const auto less = bit_cast<int8x16_t>(is_wide(kMost) ? w.bytes ^ 0x80808080 : w.bytes);
    const auto s = bit_cast<int8x16_t>(a.bytes);
#if defined(__ARM_FEATURE_DOTPROD)
    sum_ = vdotq_s32(sum_, less, s);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(less), vget_low_s8(s)), high = vmull_high_s8(less, s);
    if constexpr (is_wide(kMost))
      sum_ += vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
    else  // two products in 16 bits are at most 2 * 127 * 128
      sum_ = vpadalq_s16(sum_, vpaddq_s16(low, high));
#endif
#elif defined(__SSE2__)
    // Bytes 0 and 2, then 1 and 3, as 16-bit pairs for pmaddwd.
    const auto u = bit_cast<__m128i>(w.bytes), s = bit_cast<__m128i>(a.bytes);
    const __m128i even = _mm_madd_epi16(_mm_and_si128(u, _mm_set1_epi16(255)), _mm_srai_epi16(_mm_slli_epi16(s, 8), 8));
    const __m128i odd = _mm_madd_epi16(_mm_srli_epi16(u, 8), _mm_srai_epi16(s, 8));
    sum_ += bit_cast<i32_part>(_mm_add_epi32(even, odd));
    asm("" : "+x"(sum_));  // or g++ 12 sums in another order, with all the terms on the stack first
#else
    for (int byte = 0; byte < 4; ++byte)
      sum_ += bit_cast<i32_part>(w.bytes >> 8 * byte & 255) * ((a.bytes << (24 - 8 * byte)) >> 24);
#endif
  }

 private:
  i32_part sum_;
};
#endif

// Four consecutive activation bytes in every lane.
ENGINE_INLINE i32_part splat_step(const int8_t* q) { return splat_as<i32_part>(load_as<int32_t>(q)); }

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
