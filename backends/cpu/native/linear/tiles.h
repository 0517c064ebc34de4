// Tiles of the quantized product: kRows activation rows x one strip of 64 columns.
//
// The arithmetic of one output, the same for every number of rows, chunk and thread:
//   acc = 0;  for each group g of k in order:
//     acc = acc * (unit of the span before / unit of this one)                   where a span of one activation scale begins
//     dot = sum (u - offset) * q over the group, exact in i32
//     acc = fma(f32(dot), weight_scale[g], acc)
//     acc = fma(weight_minimum[g], f32(-sum q), acc)                             where the family has minimums
//   acc = acc * unit of the last span
// A unit is the span's activation scale (RowUnits). So the scales of activations take one multiplication a span.
// The offset costs next to nothing: -offset * sum q is where the integer sum starts, or what is added to it. These starts, or
// the factors of the minimums, are a row's corrections, one a group.
#pragma once

#include <array>
#include <cstring>
#include <utility>

#include "ahead.h"
#include "q8g32.h"
#include "sources.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// Of 32 vector registers the integer sums of a tile take up to 24, weights 2 or 4 and an activation 1; of 16 (AVX2) up to 12,
// weights 2, an activation and a product 1. Where a panel takes several registers, its sums are those of one panel or of a part
// of it. Float sums of 32 registers are where the compiler puts them, unless a pass has only two panels: then they are in
// registers, too, and a group stores nothing (each store costs as much as a product on Zen 4), but weights that come from memory
// stream best in one pass. Fewer registers have no room for float sums.
constexpr int kTileRows = kRegisterBytes >= 32 ? 6 : kWideRegisters >= 8 ? 4 : 2;
constexpr int kPassPanels = kWideRegisters >= 32 ? 2 : 4;  // in a pass with many rows,
constexpr int kTilePanels = kWideRegisters >= 32 ? 2 : 1;  // of which so many at a time

// How many panels of a dense strip are summed at a time for so many rows: each pass over its weights reads whole lines.
template <int kRows, int kPanels = 4>
constexpr int dense_panels() {
  if constexpr (kPanels == 1 || kRows * kPanels * kPartsOf<f32x16> <= kRegisterCount * 3 / 4)
    return kPanels;
  else
    return dense_panels<kRows, kPanels / 2>();
}

// How many registers a sum takes beside those of so many rows.
template <class Source, int kRows>
constexpr int kSumsTake = kSumRegisters<Source::kMost, Source::kGroupSize / 4, multiplies_words<Source::kMost>(kRows)>;

// How many panels one pass over packed weights sums at a time for so many rows: with fewer than all of them it reads a part of what
// lies together in memory, and comes back for the others.
template <class Packed, int kRows, int kPanels = 4>
constexpr int panels_at_once() {
  if constexpr (kPanels == 1 || kWideRegisters >= 32 ||
                kRows * kPanels * kPartsOf<i32x16> * kSumsTake<Packed, kRows> <= kRegisterCount / 2)
    return kPanels;
  else
    return panels_at_once<Packed, kRows, kPanels / 2>();
}

// How many of a panel's registers are summed at a time for so many rows: all of them, or as many as have room for their sums
// beside the weights, an activation and a product.
template <class Source, int kRows, int kParts = kPartsOf<i32x16>>
constexpr int parts_at_once() {
  constexpr int kSums = kRows * kSumsTake<Source, kRows>;
  constexpr int kWeights = kStepRegisters<Source::kMost>;
  if constexpr (kParts == 1 || kParts * (kSums + kWeights) + 2 <= kRegisterCount)
    return kParts;
  else
    return parts_at_once<Source, kRows, kParts / 2>();
}

// The sum of -q over group g.
template <class Source>
ENGINE_INLINE int32_t group_sum(const int32_t* sums, int64_t g) {
  return Source::kGroupSize == 16 ? sums[g] : sums[2 * g] + sums[2 * g + 1];
}

// The float sums of kRows rows x kPanels panels, from zero on where they begin or else from what lies at acc [kRows][64], where
// `leave` leaves them. A span has kSpanGroups groups.
template <int kRows, int kPanels, int kSpanGroups, bool kHeld = (kWideRegisters >= 32)>
class FloatSums {
 public:
  ENGINE_INLINE FloatSums(float* acc, bool begin) : acc_(acc) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) sums_[r][p] = begin ? f32x16{} : load(acc + r * kStrip + 16 * p);
  }
  template <int kPart>
  ENGINE_INLINE f32_part get(int row, int panel, const RowFactors&) const {
    return part_of<kPart>(sums_[row][panel]);
  }
  template <int kPart>
  ENGINE_INLINE void put(int row, int panel, f32_part sum) {
    part_of<kPart>(sums_[row][panel]) = sum;
  }
  // rows: their factors of the group that comes, which begins a span or does not.
  ENGINE_INLINE void next_group(const RowFactors* rows, bool begins) {
    if (begins) rescale(rows);
  }
  ENGINE_INLINE void rescale(const RowFactors* rows) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) sums_[r][p] *= splat(rows[r].rescale);
  }
  ENGINE_INLINE void leave() const {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) store(acc_ + r * kStrip + 16 * p, sums_[r][p]);
  }

 private:
  f32x16 sums_[kRows][kPanels];
  float* acc_;
};

template <int kRows, int kPanels, int kSpanGroups>
class FloatSums<kRows, kPanels, kSpanGroups, false> {
 public:
  ENGINE_INLINE FloatSums(float* acc, bool begin) : acc_(acc) {
    static_assert(16 * kPanels == kStrip, "the rows' sums lie one after the other");
    if (begin) std::memset(acc, 0, sizeof(float) * kStrip * kRows);
  }
  // Rescaled as they are read, though the factors of groups that begin no span are 1, unless nearly all groups are such.
  template <int kPart>
  ENGINE_INLINE f32_part get(int row, int panel, const RowFactors& factors) const {
    const f32_part sum = load_as<f32_part>(place<kPart>(row, panel));
    return kApart ? sum : sum * splat_as<f32_part>(factors.rescale);
  }
  template <int kPart>
  ENGINE_INLINE void put(int row, int panel, f32_part sum) {
    store(place<kPart>(row, panel), sum);
  }
  ENGINE_INLINE void next_group(const RowFactors* rows, bool begins) const {
    if (kApart && begins) rescale(rows);
    asm volatile("" : : : "memory");  // or the compiler keeps a copy of each on the stack from group to group
  }
  ENGINE_INLINE void rescale(const RowFactors* rows) const {
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) {
        float* const at = acc_ + r * kStrip + 16 * p;
        store(at, load(at) * splat(rows[r].rescale));
      }
  }
  ENGINE_INLINE void leave() const {}

 private:
  static constexpr bool kApart = kSpanGroups >= 8;

  template <int kPart>
  ENGINE_INLINE float* place(int row, int panel) const {
    return acc_ + row * kStrip + 16 * panel + kPartLanes * kPart;
  }

  float* acc_;
};

// What products take off the bytes of this source by itself.
template <class Source>
constexpr int kBase = is_wide(Source::kMost) ? kWideBase : 0;

constexpr int64_t kTogether = 64 / sizeof(RowFactors);  // rows whose factors fill a line

// The factors of `count` (at most kTogether) of `rows` rows, from the first on, for each of the groups, to [group][row], so that a
// tile reads them from one place, and behind the last group the last unit. A correction is an i32 start, or an f32 factor where
// there are minimums.
template <class Packed>
void factor_rows(const uint8_t* const* q8g32, int64_t depth, int64_t first, int64_t count, int64_t rows, RowFactors* factors) {
  const int64_t groups = depth / Packed::kGroupSize;
  RowUnits units[kTogether];
  for (int64_t i = 0; i < count; ++i) units[i] = RowUnits(q8g32_scales(q8g32[first + i], depth), depth / 32, kSpanOf<Packed> / 32);
  factors += first;
  for (int64_t g = 0; g < groups; ++g, factors += rows)
    for (int64_t i = 0; i < count; ++i) {
      const int32_t sum = group_sum<Packed>(q8g32_sums(q8g32[first + i], depth), g);
      const int32_t correction =
          Packed::kMinimums ? bit_cast<int32_t>(static_cast<float>(sum)) : (Packed::kOffset - kBase<Packed>) * sum;
      const int64_t k = g * Packed::kGroupSize;
      factors[i] = {k % kSpanOf<Packed> == 0 ? units[i].begin(k / 32) : 1.0f, correction};
    }
  for (int64_t i = 0; i < count; ++i) factors[i] = {units[i].end(), 0};
}

template <class Row, int kStep, int... kRows>
ENGINE_INLINE std::array<Row, sizeof...(kRows)> each_row(const int8_t* const* q, std::integer_sequence<int, kRows...>) {
  return {Row(splat_step(q[kRows] + 4 * kStep))...};
}

// dots [row][panel][part] += the source's products with the rows, for all steps of a group from kStep on. Where registers
// are few, what there is less of stays in them: a step of the rows, or of the weights.
template <int kStep, int kPart0, class Source, class Ahead, class Sum, int kRows, int kPanels, int kParts>
ENGINE_INLINE void dot_steps(const Source& source, int group, int panel0, const Ahead& ahead, const int8_t* const* q,
                             Sum (&dots)[kRows][kPanels][kParts]) {
  if constexpr (kStep < Source::kGroupSize / 4) {
    if constexpr (kPart0 == 0) ahead.template ask<kStep, Source::kGroupSize / 4>();
    constexpr bool kWords = multiplies_words<Source::kMost>(kRows);
    using Weights = ByteStep<Source::kMost, kWords>;
    using Row = RowStep<Source::kMost, kWords>;
    if constexpr (kRows < kPanels * kParts && kWideRegisters < 32) {
      const auto a = each_row<Row, kStep>(q, std::make_integer_sequence<int, kRows>());
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) {
        const u32x16 bytes = source.template weights<kStep>(group, panel0 + p);
        each_part(std::make_integer_sequence<int, kParts>(), [&](auto i) __attribute__((always_inline)) {
          const Weights w(part_of<kPart0 + i>(bytes));
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) dots[r][p][i].template add<kStep>(w, a[r]);
        });
      }
    } else {
      Weights w[kPanels][kParts];
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) {
        const u32x16 bytes = source.template weights<kStep>(group, panel0 + p);
        each_part(std::make_integer_sequence<int, kParts>(), [&](auto i) __attribute__((always_inline)) {
          w[p][i] = Weights(part_of<kPart0 + i>(bytes));
        });
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Row a(splat_step(q[r] + 4 * kStep));
#pragma GCC unroll 8
        for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll 8
          for (int i = 0; i < kParts; ++i) dots[r][p][i].template add<kStep>(w[p][i], a);
      }
    }
    dot_steps<kStep + 1, kPart0>(source, group, panel0, ahead, q, dots);
  }
}

// The rows of a tile, from some k on.
template <int kRows>
struct QuantizedRows {
  const int8_t* q[kRows];
  const int32_t* nsums[kRows];
  const RowFactors* factors;  // `pitch` from group to group
  int64_t pitch;

  // k0 is a multiple of 32; factors: of the first row, from its first group on, among those of `pitch` rows.
  template <int kGroupSize>
  ENGINE_INLINE static QuantizedRows at(const uint8_t* const* rows, int64_t depth, int64_t k0, const RowFactors* factors,
                                        int64_t pitch) {
    QuantizedRows tile;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      tile.q[r] = reinterpret_cast<const int8_t*>(rows[r]) + k0;
      tile.nsums[r] = q8g32_sums(rows[r], depth) + k0 / 16;
    }
    tile.factors = factors + k0 / kGroupSize * pitch;
    tile.pitch = pitch;
    return tile;
  }
};

// Adds one group of kPanels panels to the sums, from column `at` on, of kRows rows from kFirst on: of each panel the kParts
// registers from kPart0 on.
template <int kFirst, int kRows, int kPanels, int kPart0, int kParts, class Source, class Ahead, int kAll, int kWidth, int kSpan>
ENGINE_INLINE void add_group_parts(const Source& source, int group, int panel0, int at, const Ahead& ahead,
                                   const QuantizedRows<kAll>& rows, FloatSums<kAll, kWidth, kSpan>& sums) {
  ByteSum<Source::kMost, Source::kGroupSize / 4, multiplies_words<Source::kMost>(kRows)> dots[kRows][kPanels][kParts];
  const int8_t* q[kRows];
  const RowFactors* const factors = rows.factors + group * rows.pitch + kFirst;
  const auto start = [&](int r) __attribute__((always_inline)) {
    if constexpr (!Source::kMinimums) return splat_as<i32_part>(factors[r].correction);
    if constexpr (kBase<Source> == 0) return i32_part{};
    return splat_as<i32_part>(-kBase<Source> * group_sum<Source>(rows.nsums[kFirst + r], group));
  };
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    q[r] = rows.q[kFirst + r] + group * Source::kGroupSize;
    // Or the compiler keeps the group's activations for the next part, on the stack.
    if constexpr (kPanels < kWidth || kParts < kPartsOf<i32x16>) asm("" : "+r"(q[r]));
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll 8
      for (int i = 0; i < kParts; ++i) dots[r][p][i].begin(start(r));
  }
  dot_steps<0, kPart0>(source, group, panel0, ahead, q, dots);
#pragma GCC unroll 8
  for (int p = 0; p < kPanels; ++p) {
    const f32x16 scale = source.scale(group, panel0 + p);
    const f32x16 minimum = source.minimum(group, panel0 + p);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      each_part(std::make_integer_sequence<int, kParts>(), [&](auto i) __attribute__((always_inline)) {
        constexpr int kPart = kPart0 + i;
        f32_part sum = sums.template get<kPart>(kFirst + r, at + p, factors[r]);
        sum = fma(convert<f32_part>(dots[r][p][i].end(start(r))), part_of<kPart>(scale), sum);
        if constexpr (Source::kMinimums)
          sum = fma(part_of<kPart>(minimum), splat_as<f32_part>(bit_cast<float>(factors[r].correction)), sum);
        sums.template put<kPart>(kFirst + r, at + p, sum);
      });
    }
  }
}

template <int kFirst, int kRows, int kPanels, int kPart0 = 0, class Source, class Ahead, int kAll, int kWidth, int kSpan>
ENGINE_INLINE void add_group(const Source& source, int group, int panel0, int at, const Ahead& ahead,
                             const QuantizedRows<kAll>& rows, FloatSums<kAll, kWidth, kSpan>& sums) {
  if constexpr (kPart0 < kPartsOf<i32x16>) {
    constexpr int kParts = parts_at_once<Source, kRows>();
    add_group_parts<kFirst, kRows, kPanels, kPart0, kParts>(source, group, panel0, at, ahead, rows, sums);
    add_group<kFirst, kRows, kPanels, kPart0 + kParts>(source, group, panel0, at, ahead, rows, sums);
  }
}

// acc [kRows][64] = the product of a strip as it is packed, in one pass. Where all of the rows are too many for the registers,
// each half of them adds a group in turn.
template <class Packed, int kRows>
void multiply_in_one_pass(const uint8_t* strip, int64_t depth, const uint8_t* const* all, const RowFactors* factors, float* acc) {
  constexpr int kFirst = kRows <= kTileRows ? kRows : (kRows + 1) / 2, kGroups = Packed::kUnit / Packed::kGroupSize;
  constexpr int kPanels = panels_at_once<Packed, kRows>(), kGroupsASpan = kSpanOf<Packed> / Packed::kGroupSize;
  constexpr int kReadBytes = Packed::kUnitBytes / kGroups * kPanels / 4;  // by one add_group
  const int64_t distance = packed_distance<Packed, kRows>();
  FloatSums<kRows, 4, kGroupsASpan> sums(acc, true);
  for (int64_t k = 0; k < depth; k += Packed::kUnit, strip += Packed::kUnitBytes) {
    const Packed unit(strip);
    const auto rows = QuantizedRows<kRows>::template at<Packed::kGroupSize>(all, depth, k, factors, kRows);
    const uint8_t* ahead = strip + distance;
    for (int group = 0; group < kGroups; ++group) {
      sums.next_group(rows.factors + group * rows.pitch, group % kGroupsASpan == 0);
#pragma GCC unroll 1
      for (int panel = 0; panel < 4; panel += kPanels, ahead += kReadBytes) {
        const LinesAhead<(kReadBytes + 63) / 64> lines{ahead};
        add_group<0, kFirst, kPanels>(unit, group, panel, panel, lines, rows, sums);
        if constexpr (kFirst < kRows)
          add_group<kFirst, kRows - kFirst, kPanels>(unit, group, panel, panel, NoneAhead{}, rows, sums);
      }
    }
  }
  sums.rescale(factors + depth / Packed::kGroupSize * kRows);
  sums.leave();
}

// acc [kRows][64] += the source's groups, `size` k that begin at k0 of the rows, which are `depth` deep; or = where it is the first k.
template <class Source, int kRows>
void add_groups(const Source& source, int64_t k0, int64_t size, const uint8_t* const* all, int64_t depth,
                const RowFactors* factors, int64_t pitch, StreamAhead ahead, float* acc) {
  const auto rows = QuantizedRows<kRows>::template at<Source::kGroupSize>(all, depth, k0, factors, pitch);
  constexpr int kGroupsASpan = Source::kSpan / Source::kGroupSize;
  const int groups = static_cast<int>(size / Source::kGroupSize);
#pragma GCC unroll 1
  for (int panel0 = 0; panel0 < 4; panel0 += kPassPanels) {
    FloatSums<kRows, kPassPanels, kGroupsASpan> sums(acc + 16 * panel0, k0 == 0);
    for (int group = 0; group < groups; ++group) {
      ahead.next();
      sums.next_group(rows.factors + group * rows.pitch, group % kGroupsASpan == 0);
#pragma GCC unroll 4
      for (int p = 0; p < kPassPanels; p += kTilePanels)
        add_group<0, kRows, kTilePanels>(source, group, panel0 + p, p, NoneAhead{}, rows, sums);
    }
    if (k0 + size == depth) sums.rescale(rows.factors + groups * rows.pitch);
    sums.leave();
  }
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
