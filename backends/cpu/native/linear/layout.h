// Layouts of the packed weight families. What every family shares:
//
// A matrix of N columns (outputs) and depth K lies in strips of 64 columns, N padded to 64 with zeros; a strip is four
// panels of 16 columns, one panel a vector register wide, and is read from front to back: depth outermost, panels next.
// For the quantized families a register's 64 bytes are 16 columns x 4 consecutive k (a "step"), as vpdpbusd takes them,
// always unsigned: u = q + offset. A strip is a sequence of units of kUnit k:
//
//   family  unit  bytes  offset  unit contents (columns 0..63 in each plane)
//   w4        32   1152       8  f16 scale[64]; 4 x (4 panels x 64 bytes: step 2i in the low nibbles, 2i+1 in the high)
//   w5        32   1408      16  as w4, and behind the nibbles 4 panels x 64 bytes: bit i is the fifth of step i
//   w4m       32   1280       0  f16 scale[64], minimum[64]; groups as in w4.  weight = scale * u - minimum
//   w5m       32   1536       0  the same with groups as in w5
//   w4z       32   1216       0  f16 scale[64]; u8 zero[64]; groups as in w4.  weight = scale * (u - zero)
//   w4k      256   9216       0  f16 d[64], dmin[64]; u8 packed[12][64]: 6-bit scales and minimums of 8 groups as in Q4_K;
//                                8 groups of 32 as in w4.         weight = d * scale * u - dmin * minimum
//   w5k      256  11264       0  the same with groups as in w5
//   w2k      256   5376       0  f16 d[64], dmin[64]; u8 both[16][64]: of each group of 16 a scale low, a minimum high; then a
//                                group's four steps in 4 panels x 64 bytes, step i in bits 2i, 2i+1.  weight as in w4k
//   w3k      256   7296       4  f16 d[64]; i8 scale[16][64]; steps as in w2k; then for each two groups 4 panels x 64 bytes: bit i
//                                is the third one of step i of the first, bit 4 + i of the second.  weight as in w6
//   w6       256  13440      32  f16 d[64]; i8 scale[16][64] for groups of 16; then for each group of 16 its four steps in
//                                3 x (4 panels x 64 bytes): step i < 3 in the low six bits of line i, and of step 3 the
//                                bits 2i, 2i+1 in the high two.  weight = d * scale * (u - 32)
//   w4nl      32   1152     128  f16 scale[64]; groups as in w4, whose nibbles are places in a table (four_bits.h)
//   w4e       32   1152      12  bf16 scale[64]; groups as in w4, of E2M1
//   w4e16     64   2560      12  f32 d[64]; u8 scale[4][64], E4M3, for groups of 16; two groups of 32 as in w4, of E2M1
//   w4x      256   9024     128  u8 table[16], four times; f32 d[64]; i8 scale[8][64]; 8 groups of 32 as in w4, whose nibbles are
//                                places in the table.             weight = d * scale * (table[u] - 128)
//   w4l      256   9024      64  the same with numbers up to 63
//   w4l16    256   9536      64  the same for groups of 16
//   w8        32   2176     128  f16 scale[64]; 8 steps x (4 panels x 64 bytes)
//   w8s       32   2304     128  f32 scale[64]; steps as in w8
//   w8m       32   2560       0  f32 scale[64], minimum[64]; steps as in w8.  weight = scale * u - minimum
//
// Most formats are packed as small as they are stored, or nearly (bits a weight, in the file -> packed): MXFP4 4.25 -> 4.5,
// NVFP4 4.5 -> 5, which its scale of the whole weight takes, IQ4_XS 4.25 -> 4.4, Q3_K 3.44 -> 3.56. IQ3_S (3.44), IQ3_XXS
// (3.06), IQ2_S (2.56), IQ2_XS (2.31), IQ2_XXS (2.06), IQ1_M (1.75), IQ1_S (1.56), TQ2_0 (2.06) and TQ1_0 (1.69), whose numbers
// are few, take 4.4 or 4.7, exactly. Products are finite only with scales up to 2^60 (q8g32.h: units), which MXFP4 and f32
// alone can pass.
//
// Dense families hold each k's 64 columns together: f32 [K][64], f16 [K][64], and bf16 [K/2][64][2], two consecutive k in
// one 32-bit lane as vdpbf16ps and the rows of AMX's tiles have them, K padded to 32 with zeros. Activations of bf16 weights
// are bf16 as well; those of the others f32. Of the weights that kernels widen to f32 as they read them,
//
//   f8        32   2304  f32 scale[64]; E4M3 [32][64]
//   nf4, fp4  64   2304  f32 scale[64]; bytes [32][64]: k = 2i in the high nibble of byte i, 2i + 1 in the low, both of them
//                        indices into the format's table (four_bits.h)
//
// FP8's scales lie at 9 bits a weight, where a file has one a row or a block; NF4 and FP4 are as large as in the file.
//
// K is a multiple of the unit, but for bf16.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../packed_weight.h"

namespace engine_cpu {

constexpr int64_t kStrip = 64;
constexpr int64_t kPanel = 16;

enum class Family {
  f32, f16, bf16, f8, nf4, fp4, w4, w5, w4m, w5m, w4z, w4k, w5k, w2k, w3k, w6, w4nl, w4e, w4e16, w4x, w4l, w4l16, w8, w8s, w8m
};

struct Layout {
  Family family;
  const char* name;    // PackedWeight::family
  const char* format;  // what is packed into it, and is exact in it
  int64_t block;       // k a block of the source rows
  int64_t block_bytes;
  int64_t unit;        // k a unit
  int64_t unit_bytes;  // of a strip
};

// The layout for a format ("F32", "Q4_K", "MXFP4", ...), or of a packed weight.
// std::invalid_argument names those that exist.
const Layout& layout_of_format(const std::string& format);
const Layout& layout_of(const PackedWeight& weight);

inline int64_t strips_of(int64_t columns) { return (columns + kStrip - 1) / kStrip; }
inline int64_t units_of(const Layout& layout, int64_t depth) { return (depth + layout.unit - 1) / layout.unit; }
// Bytes of a row of the checkpoint's tensor.
inline int64_t row_bytes(const Layout& layout, int64_t depth) { return depth / layout.block * layout.block_bytes; }
inline int64_t strip_bytes(const Layout& layout, int64_t depth) { return units_of(layout, depth) * layout.unit_bytes; }

// Room for pack_columns. `grid`: of the formats IQ1, IQ2 and IQ3 what their indices mean, eight numbers or four an entry, each a nibble,
// the first one lowest (weights.py); empty for all others. std::invalid_argument where depth or grid do not fit the format.
std::shared_ptr<PackedWeight> alloc_weight(const std::string& format, int64_t columns, int64_t depth, int64_t count,
                                           std::vector<uint32_t> grid = {});

// Packs `count` rows of blocks (row_bytes apart) as columns first... of matrix `index`. Disjoint columns may be packed by
// several threads at once.
void pack_columns(PackedWeight& weight, const uint8_t* rows, int64_t count, int64_t first, int64_t index);

// One column (a row of the checkpoint's tensor), exactly dequantized: f32 [depth].
void unpack_column(const PackedWeight& weight, int64_t column, int64_t index, float* out);

}  // namespace engine_cpu
